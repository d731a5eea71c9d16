"""Prompts: where they come from, and which groups an iteration samples."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from shared.errors import InputError

DIGIT_IMAGES = Path(__file__).parent / "assets" / "digit_images.safetensors"  # by scripts/pretrain_toys.py
HELD_OUT = 360  # the last of the images: no model was trained to name them
BUILT_IN = ("digits", "digit-images", "digit-images-test")
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Prompt(NamedTuple):
    """A prompt's text and whatever else its line says about it (for rewards that need more than the text)."""

    text: str
    metadata: dict


def load_prompts(source: str) -> list[Prompt]:
    """The prompts of a built-in set or of a file.

    source: "digits" (ten prompts, "a handwritten zero" .. "a handwritten nine"), "digit-images" (1,437 real
    digits, each with the question which one it is; its image and answer are metadata), "digit-images-test"
    (the 360 held out), or the path of a UTF-8 file: one prompt a line, or for names ending in .jsonl one
    object a line, with its text under "prompt" and the rest kept as metadata.
    Blank lines are skipped. Raises InputError, in one line, for a file that is missing, not UTF-8, malformed
    or without prompts.
    """
    if source == "digits":
        return [Prompt(f"a handwritten {word}", {}) for word in DIGIT_WORDS]
    if source in BUILT_IN:
        return _digit_images(slice(-HELD_OUT) if source == "digit-images" else slice(-HELD_OUT, None))
    path = Path(source)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        sets = ", ".join(f'"{name}"' for name in BUILT_IN)
        raise InputError(f"no prompts file {source}: give a path, or a built-in set ({sets})") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"prompts file {source} is not UTF-8 (byte {error.start}): save it as UTF-8"
        ) from None
    except OSError as error:
        raise InputError(f"prompts file {source} cannot be read: {error.strerror}") from None
    parse = _parse_json_line if path.suffix == ".jsonl" else lambda line, where: Prompt(line.strip(), {})
    prompts = [parse(line, f"{source}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError(f"prompts file {source} holds no prompts: write one a line")
    return prompts


def _digit_images(rows: slice) -> list[Prompt]:
    """Questions about the real digits: an image is eight rows of eight grey levels, 0 to 16."""
    digits = load_file(DIGIT_IMAGES)
    pairs = zip(digits["images"][rows].tolist(), digits["labels"][rows].tolist(), strict=True)
    return [
        Prompt("which digit is this?", {"image": image, "answer": DIGIT_WORDS[label]})
        for image, label in pairs
    ]


def _parse_json_line(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error})") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
        raise InputError(f'{where}: expected an object with its text under "prompt"')
    return Prompt(entry["prompt"], {key: value for key, value in entry.items() if key != "prompt"})


def digit_of(text: str) -> int:
    """The digit that a prompt names, as a word or a figure: "a handwritten three" -> 3.

    Raises InputError unless the text names exactly one digit.
    """
    words = re.findall(r"[a-z]+|\d+", text.lower())
    found = {DIGIT_WORDS.index(w) for w in words if w in DIGIT_WORDS} | {int(w) for w in words if w.isdigit()}
    if len(found) != 1 or not found <= set(range(10)):
        raise InputError(f'prompt "{text}" must name exactly one digit, as in "a handwritten three"')
    return found.pop()


def sample_groups(num_prompts: int, num_groups: int, seed: int, iteration: int) -> list[int]:
    """The prompts of an iteration, one index a group: shuffled passes over all prompts, no prompt twice in
    one iteration.

    A function of its arguments alone, so a resumed run continues the same passes. A pass drops the
    num_prompts % num_groups prompts that do not fill an iteration; they differ from pass to pass. iteration
    counts from 0.
    Raises InputError if there are fewer prompts than groups.
    """
    if not 1 <= num_groups <= num_prompts:
        raise InputError(
            f"--num-prompts {num_groups}: the set has {num_prompts} prompts, so it must be 1 to {num_prompts}"
        )
    per_pass = num_prompts // num_groups
    generator = torch.Generator().manual_seed(seed * 1_000_003 + iteration // per_pass)
    order = torch.randperm(num_prompts, generator=generator).tolist()
    first = iteration % per_pass * num_groups
    return order[first : first + num_groups]
