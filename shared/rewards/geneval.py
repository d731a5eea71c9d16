"""GenEval (arXiv 2310.11513): whether an image shows the objects that its prompt names, judged from what a
detector finds in it.

Here are the rules alone, on detections of any detector. A prompt's metadata are those of the benchmark's
file evaluation_metadata.jsonl, which is a prompt file of this project as it is:

    {"tag": "color_attr", "prompt": "a photo of a red cup and a blue cat", "include": [
        {"class": "cup", "count": 1, "color": "red"}, {"class": "cat", "count": 1, "color": "blue"}]}

"position": ["left of", 0] of an object places it relative to the first of the list; "exclude": [{"class":
"cat", "count": 3}] forbids three cats or more. A tag is single_object, two_object, counting, colors, position
or color_attr.
"""

import math
from typing import NamedTuple

from shared.errors import InputError
from shared.prompts import Prompt

# The benchmark's settings, for its detector (Mask2Former).
MIN_SCORE, MIN_SCORE_COUNTING = 0.3, 0.9  # detections count above it; in prompts tagged "counting"
MAX_OBJECTS = 16  # of a class: the most confident ones
SLACK = 0.1  # of the sum of two objects' sizes: so far apart, neither is beside the other
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
POSITIONS = ("left of", "right of", "above", "below")


class Detection(NamedTuple):
    """An object in an image."""

    label: str  # its class
    score: float  # the detector's confidence, in [0, 1]
    box: tuple[float, float, float, float]  # left, top, right, bottom; y points down, in any unit
    color: str | None = None  # one of COLORS


class Judgement(NamedTuple):
    """Of an image. partial == 1 implies strict."""

    strict: bool  # the benchmark's verdict: no object is missing or excluded, colours and positions are right
    partial: float  # in [0, 1]: the mean over all demands


def judge(detections: list[Detection], metadata: dict) -> Judgement:
    """What an image with these detections is worth to the prompt with this metadata.

    strict is the benchmark's rule: of each class at least `count` objects, of which the `count` most
    confident ones have the colour and the position; and of no excluded class too many.

    partial is the mean over the demands of all "include" entries: their count, 1 - |found - count| / count
    but at least 0; their colour, the share of objects that have it; their position, 1 or 0. Where the count
    is not met exactly, colour and position are 0, as are positions where the colour or the other object is
    not right. An excluded class that is not included is one more demand, 1 or 0.
    Differs from the reward server of Flow-GRPO, whose count has no lower bound and whose wrong position is
    two demands, a 0 and a 1; there an excluded class that is not included is no demand.
    """
    objects = kept(detections, metadata["tag"])
    demands, exact = _demands(objects, metadata, False), _demands(objects, metadata, True)
    included = {wanted["class"] for wanted in metadata["include"]}
    strict = min(demands) == 1
    for unwanted in metadata.get("exclude", []):
        few = len(objects.get(unwanted["class"], [])) < unwanted["count"]
        strict = strict and few
        if unwanted["class"] not in included:
            exact.append(float(few))
    return Judgement(strict, sum(exact) / len(exact))


def kept(detections: list[Detection], tag: str) -> dict[str, list[Detection]]:
    """The detections that count, by class: the most confident first, at most MAX_OBJECTS of them."""
    least = MIN_SCORE_COUNTING if tag == "counting" else MIN_SCORE
    objects = {}
    for detection in sorted(detections, key=lambda d: -d.score):
        if detection.score > least:
            objects.setdefault(detection.label, []).append(detection)
    return {label: found[:MAX_OBJECTS] for label, found in objects.items()}


def relations(a: tuple[float, ...], b: tuple[float, ...]) -> set[str]:
    """Where box a is, seen from box b: none, one, or (diagonally) two of POSITIONS.

    The offset of the centres, each coordinate brought closer to 0 by SLACK times the boxes' sizes, must be
    above half of the centres' distance in a direction. It does not depend on the unit.
    """
    offsets = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    slack = [SLACK * (a[i + 2] - a[i] + b[i + 2] - b[i]) for i in (0, 1)]
    half = math.hypot(*offsets) / 2
    (across, down), (dx, dy) = offsets, slack
    found = (-across - dx > half, across - dx > half, -down - dy > half, down - dy > half)
    return {name for name, is_there in zip(POSITIONS, found, strict=True) if is_there}


def check_geneval(prompts: list[Prompt]) -> None:
    """Raises InputError, in one line, if there is a prompt whose metadata are not GenEval's."""
    for prompt in prompts:
        try:
            fault = _fault(prompt.metadata)
        except (LookupError, TypeError, ValueError, AttributeError):
            fault = "its metadata are not GenEval's"
        if fault:
            text = " ".join(prompt.text.split())
            raise InputError(f"prompt {text!r}: {fault}; expected a line of evaluation_metadata.jsonl")


def _demands(objects: dict[str, list[Detection]], metadata: dict, exact: bool) -> list[float]:
    """How well each demand of the "include" entries is met, in [0, 1]. exact: an object too many is a fault,
    else the most confident ones stand for their class."""
    demands, groups = [], []
    for wanted in metadata["include"]:
        group = objects.get(wanted["class"], [])
        group = group if exact else group[: wanted["count"]]
        own = _demands_of(group, wanted, groups)
        groups.append(group if min(own) == 1 else None)
        demands += own
    return demands


def _demands_of(group: list[Detection], wanted: dict, groups: list[list[Detection] | None]) -> list[float]:
    """Those of one entry. group: its objects; groups: of each earlier entry its objects, or None if they are
    not right."""
    count = wanted["count"]
    own = [max(0.0, 1 - abs(len(group) - count) / count)]
    if "color" in wanted:
        right = sum(d.color == wanted["color"] for d in group)
        own.append(right / count if own[0] == 1 else 0.0)
    if "position" in wanted:
        position, other = wanted["position"]
        pairs = [(a.box, b.box) for a in group for b in groups[other] or []]
        placed = bool(pairs) and all(position in relations(*pair) for pair in pairs)
        own.append(float(placed and min(own) == 1))
    return own


def _fault(metadata: dict) -> str | None:
    """What is wrong with the metadata of a prompt."""
    if not isinstance(metadata["tag"], str) or not metadata["include"]:
        return 'it has no "tag" or no "include"'
    for i, wanted in enumerate([*metadata["include"], *metadata.get("exclude", [])]):
        if not isinstance(wanted["class"], str) or type(wanted["count"]) is not int or wanted["count"] < 1:
            return f"{wanted} needs a class and a count of at least 1"
        if "color" in wanted and wanted["color"] not in COLORS:
            return f"the color {wanted['color']!r} is none of {', '.join(COLORS)}"
        if "position" in wanted:
            position, other = wanted["position"]
            if position not in POSITIONS or type(other) is not int or not 0 <= other < i:
                return f"the position {wanted['position']} is not {' or '.join(POSITIONS)} an earlier object"
    return None
