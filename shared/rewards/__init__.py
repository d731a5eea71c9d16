"""Rewards: functions f(pixels, prompts) -> (B,) float32, by name, and weighted sums of them.

A reward's factory `make_<name>(device)` loads what it needs and returns f. pixels are (B, 3, H, W) in [0, 1],
prompts the `Prompt` of each image; f keeps the order, returns equal values for equal input, needs no
gradient, and raises on failure. The rewards of understanding take answers, B strings, in place of pixels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shared.errors import InputError, RewardError
from shared.prompts import Prompt
from shared.rewards.answers import make_answer
from shared.rewards.image import make_jpeg
from shared.rewards.ocr import check_ocr, make_ocr
from shared.rewards.remote import check_remote, make_remote, make_remote_answers
from shared.rewards.toy import make_ink, make_label, make_next

REWARDS = {"label": make_label, "ink": make_ink, "next": make_next, "jpeg": make_jpeg}
REWARDS |= {"ocr": make_ocr, "remote": make_remote}
ANSWER_REWARDS = {"answer": make_answer, "remote": make_remote_answers}
CHECKS = {"ocr": check_ocr, "remote": check_remote}  # of prompts, before training: each raises InputError


class Reward(NamedTuple):
    """One part of the training reward."""

    name: str
    weight: float
    function: Callable[[Tensor | list[str], list[Prompt]], Tensor]


def make_rewards(spec: str, device="cpu", task: str = "generation") -> list[Reward]:
    """The parts of a reward: "ink", or a weighted sum such as "label:1,jpeg:0.5" (the weight is 1 where none
    is given). Those of the task "generation" score images, those of "understanding" answers.

    Raises InputError for an unknown name, one of the other task, a name given twice, or a weight that is not
    a number other than 0.
    """
    kinds = [(REWARDS, "images"), (ANSWER_REWARDS, "answers")]
    (known, made), (others, scored) = kinds if task == "generation" else kinds[::-1]
    parts = {}
    for item in spec.split(","):
        name, _, weight = (word.strip() for word in item.partition(":"))
        if name in others and name not in known:
            raise InputError(
                f"reward {name!r} scores {scored}, and --task {task} makes {made}: use {', '.join(known)}"
            )
        if name not in known:
            raise InputError(f"unknown reward {name!r}: known are {', '.join(known)}")
        if name in parts:
            raise InputError(f"reward {name!r} is given twice in {spec!r}")
        try:
            parts[name] = float(weight) if weight or ":" in item else 1.0
        except ValueError:
            raise InputError(
                f"weight {weight!r} of reward {name!r} is not a number: write it as in {name}:0.5"
            ) from None
        if parts[name] == 0 or not torch.isfinite(torch.tensor(parts[name])):
            raise InputError(f"weight of reward {name!r} must be a finite number other than 0, not {weight}")
    return [Reward(name, weight, known[name](device)) for name, weight in parts.items()]


def check_prompts(rewards: list[Reward], prompts: list[Prompt]) -> None:
    """Raises InputError, in one line, if there is a prompt that one of the rewards cannot score."""
    for reward in rewards:
        if reward.name in CHECKS:
            CHECKS[reward.name](prompts)


class Scores(NamedTuple):
    """Rewards of B images or answers."""

    total: Tensor  # (B,) the weighted sum, on the CPU
    parts: dict[str, Tensor]  # each part by name, (B,), unweighted
    calls: int  # calls of a reward function


def score(
    rewards: list[Reward],
    made: Tensor | list[str],
    prompts: list[Prompt],
    batch_size: int | None = None,
) -> Scores:
    """Score B images or answers, at most batch_size in one call of each reward (None: all at once).

    made: pixels (B, 3, H, W) in [0, 1], or B answers; prompts: B of them. Raises RewardError, naming the
    reward, if it raises, returns another number of values than prompts, or returns a value that is not
    finite. A failure never becomes a reward of 0.
    """
    if isinstance(made, Tensor) and not torch.isfinite(made).all():
        raise FloatingPointError("the model made images that are not finite: is the learning rate too high?")
    batch_size = batch_size or max(len(prompts), 1)
    parts, calls = {}, 0
    for reward in rewards:
        values = []
        for first in range(0, len(prompts), batch_size):
            rows = slice(first, first + batch_size)
            values.append(_call(reward, made[rows], prompts[rows]))
            calls += 1
        parts[reward.name] = torch.cat(values)
    total = sum(reward.weight * parts[reward.name] for reward in rewards)
    return Scores(total, parts, calls)


def _call(reward: Reward, made: Tensor | list[str], prompts: list[Prompt]) -> Tensor:
    """One checked call of a reward. Returns (B,) float32 on the CPU."""
    try:
        with torch.no_grad():
            values = torch.as_tensor(reward.function(made, prompts)).float().cpu()
    except Exception as error:
        raise RewardError(f"reward {reward.name!r} failed: {type(error).__name__}: {error}") from error
    if values.shape != (len(prompts),):
        kind = "images" if isinstance(made, Tensor) else "answers"
        raise RewardError(
            f"reward {reward.name!r} returned shape {tuple(values.shape)} for {len(prompts)} {kind}"
        )
    if not torch.isfinite(values).all():
        bad = int((~torch.isfinite(values)).sum())
        raise RewardError(f"reward {reward.name!r} returned {bad} values that are not finite")
    return values
