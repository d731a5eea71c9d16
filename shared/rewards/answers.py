"""Rewards on answers in words, of a model that is shown an image."""

import torch
from torch import Tensor

from shared.prompts import Prompt


def make_answer(device="cpu"):
    """`answer`: 1 if the answer is that of the prompt's metadata, whatever its case and outer blanks, else
    0."""

    def answer(answers: list[str], prompts: list[Prompt]) -> Tensor:
        pairs = zip(answers, prompts, strict=True)
        return torch.tensor([float(_plain(given) == _plain(p.metadata["answer"])) for given, p in pairs])

    return answer


def _plain(text: str) -> str:
    return text.strip().casefold()
