"""What a training loop needs around its algorithm: set-up, EMA, the update, processes, timing."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shared.args import model_options
from shared.errors import InputError
from shared.policies import make_policy
from shared.prompts import Prompt, load_prompts, sample_groups
from shared.rewards import Reward, check_prompts, make_rewards


class EMA:
    """Exponential moving average of the trainable weights, updated once per optimiser update. Decay 0 is the
    weights themselves."""

    def __init__(self, module: nn.Module, decay: float):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("the model has no trainable parameters")
        self.average = [p.detach().clone() for p in self.parameters]
        self._average_into = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        """average = decay average + (1 - decay) weights."""
        self._average_into(self.average, [p.detach() for p in self.parameters], None)

    def applied(self) -> contextlib.AbstractContextManager:
        """Within this context the model has the averaged weights."""
        return swapped(self.parameters, self.average)


@contextlib.contextmanager
def swapped(parameters: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Within this context the parameters have other values."""
    own = [p.detach().clone() for p in parameters]
    set_values(parameters, values)
    try:
        yield
    finally:
        set_values(parameters, own)


class Setup(NamedTuple):
    """What a run needs before its folder is opened."""

    accelerator: Accelerator
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    share: range  # the groups of this process, of those of an iteration
    policy: Any
    rewards: list[Reward]


def set_up(args, task: str | None = None) -> Setup:
    """Load the prompts, the model and the rewards. Raises InputError, before a weight is trained or a file
    written, for prompts that are too few or that the model or a reward cannot take, and for groups that
    processes cannot share.

    task: None for a continuous flow; what a discrete one makes, "generation" or "understanding".
    """
    prompts = load_prompts(args.prompts)
    eval_prompts = load_prompts(args.eval_prompts) if args.eval_prompts else prompts
    sample_groups(len(prompts), args.num_prompts, args.seed, 0)
    accelerator = Accelerator()
    share = own_groups(accelerator, args.num_prompts)
    policy = make_policy(args.model, accelerator.device, task, model_options(args))
    rewards = make_rewards(args.reward, accelerator.device, task or "generation")
    for each in (prompts, eval_prompts):
        policy.check(each)
        check_prompts(rewards, each)
    return Setup(accelerator, prompts, eval_prompts, share, policy, rewards)


def prepare(accelerator: Accelerator, policy, args):
    """AdamW and EMA of the policy's trainable weights. policy.module is wrapped for the accelerator, as is
    the optimizer. Returns (optimizer, ema)."""
    ema = EMA(policy.module, args.ema_decay)
    optimizer = AdamW(ema.parameters, args.learning_rate, eps=args.adam_eps, weight_decay=args.weight_decay)
    policy.module, optimizer = accelerator.prepare(policy.module, optimizer)
    return optimizer, ema


def own_groups(accelerator: Accelerator, num_groups: int) -> range:
    """The groups of this process: an equal, contiguous share, since a group never spans processes.

    Raises InputError if the groups cannot be dealt out equally.
    """
    count, rank = accelerator.num_processes, accelerator.process_index
    if num_groups % count:
        raise InputError(
            f"--num-prompts {num_groups} cannot be dealt equally to {count} processes:"
            f" give a multiple of {count}"
        )
    return range(rank * num_groups // count, (rank + 1) * num_groups // count)


def gather(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Values (B, ...) of all processes, in the order of the processes, on the CPU."""
    return accelerator.gather(values.to(accelerator.device)).cpu()


def micro_batches(count: int, size: int | None) -> list[slice]:
    """Slices of at most `size` rows that cover `count` rows in order (None: one slice)."""
    size = size or count
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def apply_update(accelerator: Accelerator, module: nn.Module, optimizer, max_grad_norm: float) -> float:
    """One optimiser update with the accumulated gradients, scaled down to max_grad_norm. Returns their norm
    before scaling.

    Raises FloatingPointError, with the weights untouched, if a gradient is not finite.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    norm = float(accelerator.clip_grad_norm_(trained, max_grad_norm))
    if not norm < float("inf"):
        raise FloatingPointError(f"the gradient's norm is {norm}; the last checkpoint is intact")
    optimizer.step()
    optimizer.zero_grad()
    return norm


def average(
    accelerator: Accelerator, weighted: list[tuple[float, dict[str, float | None]]]
) -> dict[str, float | None]:
    """Weighted means of metrics over the computed micro-batches of all processes that have them; of
    ratio_deviation the maximum.

    The first has all metrics, as a number or None. A metric that is None everywhere stays None.
    """

    def over_processes(value: float) -> Tensor:
        return gather(accelerator, torch.tensor([value], dtype=torch.float64))

    means = {}
    for name in weighted[0][1]:
        present = [(weight, m[name]) for weight, m in weighted if m.get(name) is not None]
        mass = over_processes(sum(weight for weight, _ in present)).sum().item()
        if name == "ratio_deviation":
            means[name] = over_processes(max(value for _, value in present)).max().item()
        else:
            total = over_processes(sum(weight * value for weight, value in present)).sum().item()
            means[name] = total / mass if mass else None
    return means


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of the block to seconds[name]."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def set_values(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into parameters, one by one, in place."""
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)
