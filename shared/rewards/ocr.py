"""Reward on the text in an image, read by RapidOCR (its package ships its models; it runs on the CPU)."""

import re

import torch
from torch import Tensor

from shared.errors import InputError
from shared.prompts import Prompt
from shared.rewards.image import bytes_of

MAX_SIDE = 960  # larger images are scaled down to it; smaller ones are not scaled up, which takes far longer
QUOTED = re.compile('"([^"]*)"|“([^”]*)”')


def make_ocr(device="cpu"):
    """`ocr`: how much of the quoted text of the prompt the image shows, in [0, 1]: see similarity. An image
    without legible text scores 0.

    All text of the image counts, line by line. In released code of Flow-GRPO the score is 1 wherever the
    target is part of what is read, so that more text around it costs nothing; here it does.
    Raises InputError if the package is not installed.
    """
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise InputError(
            f"reward 'ocr' needs more packages ({error}):"
            " pip install -c scripts/constraints.txt rapidocr onnxruntime"
        ) from None
    settings = {
        "Global.log_level": "error",
        "Det.limit_side_len": MAX_SIDE,
        "Det.limit_type": "max",
        "EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads(),
    }
    read = RapidOCR(params=settings)

    def ocr(pixels: Tensor, prompts: list[Prompt]) -> Tensor:
        values = []
        for image, prompt in zip(pixels, prompts, strict=True):
            lines = read(bytes_of(image)[:, :, ::-1], use_cls=False).txts  # BGR; None where there is no text
            values.append(similarity("".join(lines or ()), target_of(prompt.text)))
        return torch.tensor(values)

    return ocr


def check_ocr(prompts: list[Prompt]) -> None:
    """Raises InputError if there is a prompt without a text in quotes."""
    for prompt in prompts:
        target_of(prompt.text)


def target_of(text: str) -> str:
    """The first text in double quotes, straight or curly, of a prompt. Raises InputError if there is none."""
    found = QUOTED.search(text)
    target = found and (found[1] or found[2] or "")
    if not target or not _plain(target):
        raise InputError(
            f"prompt {' '.join(text.split())!r} has no text in double quotes, which reward 'ocr' looks for"
        )
    return target


def similarity(read: str, target: str) -> float:
    """1 - edit distance / length of the target, at least 0; both in lower case and without blanks."""
    read, target = _plain(read), _plain(target)
    return max(0.0, 1 - edit_distance(read, target) / len(target))


def edit_distance(a: str, b: str) -> int:
    """The least number of characters to insert, delete or replace that make a into b (Levenshtein)."""
    distances = list(range(len(b) + 1))  # from the first i characters of a to the first j of b
    for i, char in enumerate(a, 1):
        previous, distances[0] = distances[0], i
        for j, other in enumerate(b, 1):
            replaced = previous + (char != other)
            previous = distances[j]
            distances[j] = min(replaced, previous + 1, distances[j - 1] + 1)
    return distances[-1]


def _plain(text: str) -> str:
    return "".join(text.casefold().split())
