"""Rewards on the 8x8 digits, from a judge: a small classifier of the real digits (scripts/pretrain_toys.py
trains it)."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shared.prompts import Prompt, digit_of

JUDGE = Path(__file__).parents[1] / "assets" / "digits_judge.safetensors"


class DigitsJudge(nn.Module):
    """Classifier of 8x8 digits: grey pixels (B, 8, 8) in [0, 1] to logits (B, 10)."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 10),
        )

    def forward(self, grey: Tensor) -> Tensor:
        return self.layers(grey)


def _load_judge(device) -> DigitsJudge:
    judge = DigitsJudge().requires_grad_(False)
    judge.load_state_dict(load_file(JUDGE))
    return judge.to(device)


def make_label(device="cpu"):
    """`label`: the judge's probability of the prompted digit, in [0, 1]."""
    judge = _load_judge(device)

    def label(pixels: Tensor, prompts: list[Prompt]) -> Tensor:
        digits = torch.tensor([digit_of(p.text) for p in prompts], device=device)
        return judge(pixels.to(device).mean(dim=1)).softmax(dim=1).gather(1, digits[:, None])[:, 0]

    return label


def make_next(device="cpu"):
    """`next`: 1 if the judge gives more than half of its probability to the digit after the prompted one
    (0 after 9), else 0."""
    judge = _load_judge(device)

    def next_digit(pixels: Tensor, prompts: list[Prompt]) -> Tensor:
        digits = torch.tensor([(digit_of(p.text) + 1) % 10 for p in prompts], device=device)
        probabilities = judge(pixels.to(device).mean(dim=1)).softmax(dim=1)
        return (probabilities.gather(1, digits[:, None])[:, 0] > 0.5).float()

    return next_digit


def make_ink(device="cpu"):
    """`ink`: the `label` reward times the ink of the image, its mean pixel value in [0, 1]. Long-tailed; it
    never saturates."""
    label = make_label(device)
    return lambda pixels, prompts: label(pixels, prompts) * pixels.to(device).flatten(1).mean(dim=1)
