"""What the adapters share: loading functions and statements of a checkout, and the contract in their terms.

An adapter runs code of the user's own checkout, in two ways, and only where the user asked for it by naming
the checkout in an environment variable:
    modules      a file of the checkout is imported by its path. Its imports from diffusers are answered by
                 placeholders, since the step functions use those names in annotations only; the one that they
                 call, `randn_tensor`, returns ones, so that a step without a given result returns exactly
                 mean + 1 * standard deviation.
    statements   formulas that stand inside a training script's main() cannot be imported. They are found by
                 `ast`, by the names that they assign, and executed unchanged in a namespace that holds their
                 inputs under the script's names.
Signatures and conventions are translated; faults are not repaired. What the code does not offer raises
NotOffered, which the oracle counts as not checked.
"""

import ast
import contextlib
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-4  # what both projects add to the standard deviation of rewards
SURROGATE = ("ratio", "unclipped_loss", "clipped_loss", "policy_loss")  # the scripts' names, in their order


class NoCheckout(Exception):
    """There is no checkout, or not all of it is there. The message is one line."""


class NotOffered(NotImplementedError):
    """The published code has no such option: this says nothing against it, and the oracle skips it."""


class Checkout:
    """A folder with published code, named by an environment variable. Raises NoCheckout."""

    def __init__(self, variable: str, project: str):
        folder = os.environ.get(variable)
        if not folder:
            raise NoCheckout(f"set {variable} to the folder of a checkout of {project}")
        self.variable, self.folder = variable, Path(folder)
        if not self.folder.is_dir():
            raise NoCheckout(f"{variable}={folder}: there is no such folder")

    def file(self, path: str) -> Path:
        """A file of the checkout. Raises NoCheckout."""
        if not (self.folder / path).is_file():
            raise self.incomplete(f"it has no {path}")
        return self.folder / path

    def incomplete(self, reason: str) -> NoCheckout:
        return NoCheckout(f"{self.variable}={self.folder}: {reason}")

    def load(self, path: str, name: str) -> Callable:
        """The function or class `name` of a module of the checkout. Raises NoCheckout."""
        spec = importlib.util.spec_from_file_location(f"checkout_{Path(path).stem}", self.file(path))
        module = importlib.util.module_from_spec(spec)
        try:
            with placeholders(self.tree(path)):
                spec.loader.exec_module(module)
        except Exception as error:
            words = " ".join(str(error).split())
            raise self.incomplete(f"{path} cannot be imported: {type(error).__name__}: {words}") from None
        if not callable(getattr(module, name, None)):
            raise self.incomplete(f"{path} does not define {name}")
        return getattr(module, name)

    def tree(self, path: str) -> ast.Module:
        """A file's syntax tree. Raises NoCheckout."""
        try:
            return ast.parse(self.file(path).read_text(encoding="utf-8"))
        except SyntaxError as error:
            raise self.incomplete(f"{path} is not Python: {error}") from None

    def statements(self, path: str, found: Callable[[ast.stmt], bool], what: str) -> str:
        """The statements of a file for which `found` is true, in order, as source. Raises NoCheckout."""
        nodes = [node for node in ast.walk(self.tree(path)) if isinstance(node, ast.stmt) and found(node)]
        if not nodes:
            raise self.incomplete(f"{path} has no statement that {what}")
        nodes.sort(key=lambda node: node.lineno)
        return "\n".join(ast.unparse(node) for node in nodes)


def assigns(name: str, mentions: str = "") -> Callable[[ast.stmt], bool]:
    """For `Checkout.statements`: statements `name = ...`, with some words on their right side."""

    def found(node: ast.stmt) -> bool:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            return False
        return node.targets[0].id == name and mentions in ast.unparse(node.value)

    return found


def execute(statements: str, **names) -> dict:
    """Run statements of a checkout as a module that has the given names. Returns all its names afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statements_of_checkout.py"
        path.write_text(statements, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        vars(module).update({"torch": torch, **names})
        spec.loader.exec_module(module)
    return vars(module)


@contextlib.contextmanager
def placeholders(tree: ast.Module) -> Iterator[None]:
    """While a file is imported: modules in place of those of diffusers that it imports from."""
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [name for name in names if name.split(".")[0] == "diffusers"]
    kept = {name: sys.modules.get(name) for name in names}
    try:
        sys.modules.update({name: _placeholder(name) for name in names})
        yield
    finally:
        for name, module in kept.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _placeholder(name: str) -> ModuleType:
    """A module that has every name: `randn_tensor` returns ones, all else is a class without instances."""
    module = ModuleType(name)

    def attribute(key: str):
        if key.startswith("__"):
            raise AttributeError(key)
        if key == "randn_tensor":
            return lambda shape, generator=None, device=None, dtype=None: torch.ones(shape, dtype=dtype)

        def refuse(self, *args, **kwargs):
            raise NotOffered(f"{name}.{key} is a placeholder of the adapter")

        return type(key, (), {"__init__": refuse})

    module.__getattr__ = attribute
    return module


# ---- one stochastic step


class Step(NamedTuple):
    """The arguments of `transition` besides x and v."""

    sigma: float
    sigma_next: float
    noise_level: float
    sigma_clip: float
    kind: str


class StepStd(Tensor):
    """A step_std that knows its step: the published log-prob and KL need more of it than this number."""

    step: Step

    def clone(self, *args, **kwargs) -> "StepStd":
        copy = super().clone(*args, **kwargs).as_subclass(StepStd)
        copy.step = self.step
        return copy


class PublishedStep:
    """The contract's step functions by a published `sde_step_with_logprob` and KL formula.

    function:  takes a scheduler, of which it uses `sigmas` and `index_for_timestep`, the velocity, one
               timestep a sample, the state, and the next state or None (it then draws that). Returns the
               next state, the log-density averaged over entries, the mean, and what it calls std_dev_t.
    kl:        the statements that assign kl_loss.
    dims:      of the model's latents, batch included; (B, E) is passed as (B, E, 1, ...), others as they are.
    arguments: of a step, and whether it is to be the ODE's: what the grid has at index 1, and keywords.
               Raises NotOffered.
    kind:      of the step where none is given, and for log-prob and KL where a step_std is a plain number.
    """

    def __init__(self, function: Callable, kl: str, dims: int, arguments: Callable, kind: str):
        self.function, self.kl, self.dims = function, kl, dims
        self.arguments, self.kind = arguments, kind

    def run(self, step: Step, x: Tensor, v: Tensor, x_next: Tensor | None = None, ode: bool = False) -> tuple:
        """Call the published function in the middle of a grid 1, s, sigma, sigma_next, 0 in float32."""
        second, keywords = self.arguments(step, ode)
        sigmas = torch.tensor([1.0, second, step.sigma, step.sigma_next, 0.0], dtype=torch.float32)
        scheduler = SimpleNamespace(sigmas=sigmas, index_for_timestep=int)
        return self.function(scheduler, v, torch.full((len(x),), 2), x, prev_sample=x_next, **keywords)

    def fit(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape, *[1] * (self.dims - 2)) if x.dim() == 2 else x

    def ode_step(self, x: Tensor, v: Tensor, sigma: float, sigma_next: float) -> Tensor:
        step = Step(float(sigma), float(sigma_next), 0.0, float(sigma_next), self.kind)
        result = self.run(step, self.fit(x), self.fit(v), ode=True)[0]
        return result.reshape(x.shape) if x.dim() == 2 else result

    def transition(
        self, x: Tensor, v: Tensor, sigma: float, sigma_next: float, *, noise_level: float,
        sigma_clip: float, kind: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The published mean, and the standard deviation that its sampling branch multiplies noise with."""
        numbers = (float(value) for value in (sigma, sigma_next, noise_level, sigma_clip))
        step = Step(*numbers, kind or self.kind)
        mean = self.run(step, self.fit(x), self.fit(v))[2]
        std = self.at_zero(step)[0].detach().reshape(()).clone().as_subclass(StepStd)
        std.step = step
        return (mean.reshape(x.shape) if x.dim() == 2 else mean), std

    def at_zero(self, step: Step, v: float = 0.0) -> tuple:
        """The published function at x = 0 and one velocity; its next state is mean + standard deviation."""
        x = torch.zeros([1] * self.dims)
        return self.run(step, x, torch.full_like(x, v))

    def step_of(self, std: float | Tensor) -> Step:
        """The step that a step_std comes from; for a number a step of dt = 3/16 in the middle."""
        if isinstance(std, StepStd):
            return std.step
        return Step(0.5, 0.3125, float(std) / math.sqrt(0.1875), 0.75, self.kind)  # g = noise_level there

    def gaussian_log_prob(self, x_next: Tensor, mean: Tensor, step_std: float | Tensor) -> Tensor:
        """The published log-density, as a sum: at x = 0 and the velocity that has this mean."""
        step = self.step_of(step_std)
        factor = self.at_zero(step, v=1.0)[2].reshape(())
        v = self.fit(mean).float() / factor
        return self.run(step, torch.zeros_like(v), v, self.fit(x_next))[1] * mean[0].numel()

    def gaussian_kl(self, mean: Tensor, mean_ref: Tensor, step_std: float | Tensor) -> Tensor:
        """The published KL formula, as a sum over entries: sample by sample, for it averages over the batch,
        with the std_dev_t (and square root of dt, where it asks for that) of the published step function."""
        outputs = self.at_zero(self.step_of(step_std))
        rest = dict(zip(("std_dev_t", "dt_ref"), outputs[3:], strict=False))
        result = []
        for one, ref in zip(self.fit(mean).float(), self.fit(mean_ref).float(), strict=True):
            names = {"prev_sample_mean": one[None], "prev_sample_mean_ref": ref[None]}
            result.append(execute(self.kl, **names, **rest)["kl_loss"] * one.numel())
        return torch.stack(result)


# ---- advantages and surrogate


def surrogate_of(checkout: Checkout, script: str) -> Callable:
    """`clipped_surrogate` by the statements of a training script."""
    codes = [checkout.statements(script, assigns(name), f"assigns {name}") for name in SURROGATE]

    def clipped_surrogate(log_prob_new, log_prob_old, advantages, clip_range, weights=None):
        """The script's policy_loss. Its old log-probs and advantages are stored numbers: detached here. It
        has no weights, but a weight >= 0 acts like a factor of the advantage."""
        if weights is not None:
            advantages = advantages * weights
        names = {
            "log_prob": log_prob_new.reshape(-1),
            "sample": {"log_probs": log_prob_old.detach().reshape(-1, 1)},
            "advantages": advantages.detach().reshape(-1),
            "config": SimpleNamespace(train=SimpleNamespace(clip_range=clip_range)),
            "j": 0,
        }
        for code in codes:
            names = execute(code, **names)
        return names["policy_loss"], {}

    return clipped_surrogate


def advantages_of(checkout: Checkout, script: str, one_tracker_a_step: bool) -> Callable:
    """`group_advantages` by PerPromptStatTracker and the statement of a training script that clamps."""
    tracker = checkout.load("flow_grpo/stat_tracking.py", "PerPromptStatTracker")
    clamping = checkout.statements(script, assigns("advantages", "adv_clip_max"), "clamps advantages")

    def group_advantages(rewards, std="group", eps=EPS, clamp=5.0):
        """A (P, G) of rewards is one step. The prompts are named by their index."""
        if std not in ("group", "batch") or eps != EPS:
            raise NotOffered("PerPromptStatTracker has std = group or batch, and eps = 1e-4")
        P, G = rewards.shape[:2]
        columns = rewards.reshape(P * G, -1).numpy()
        prompts = [str(p) for p in range(P) for _ in range(G)]
        parts = [columns[:, j] for j in range(columns.shape[1])] if one_tracker_a_step else [columns]
        results = [tracker(global_std=std == "batch").update(prompts, part) for part in parts]
        stored = torch.cat([torch.as_tensor(a).reshape(P * G, -1) for a in results], dim=1)
        config = SimpleNamespace(train=SimpleNamespace(adv_clip_max=clamp))
        names = execute(clamping, sample={"advantages": stored}, config=config, j=slice(None))
        return names["advantages"].reshape(rewards.shape)

    return group_advantages


def sd3_step(checkout: Checkout, script: str) -> PublishedStep:
    """The step of images: `flow` is its "sde", and where it takes an sde_type there is "cps", too."""
    function = checkout.load("flow_grpo/diffusers_patch/sd3_sde_with_logprob.py", "sde_step_with_logprob")
    kl = checkout.statements(script, assigns("kl_loss"), "assigns kl_loss")
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    types = {"flow": {"sde_type": "sde"}, "cps": {"sde_type": "cps"}} if "sde_type" in names else {"flow": {}}

    def arguments(step: Step, ode: bool) -> tuple[float, dict]:
        if step.kind not in types:
            raise NotOffered(f"this checkout's step has no kind {step.kind}")
        return step.sigma_clip, {"noise_level": 0.0 if ode else step.noise_level, **types[step.kind]}

    return PublishedStep(function, kl, 4, arguments, "flow")
