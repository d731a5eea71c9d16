"""GenEval's rules, exactly, on detections made by hand: every task, and what its partial score is worth."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InputError
from shared.prompts import Prompt, load_prompts
from shared.rewards.geneval import COLORS, Detection, check_geneval, judge, kept, relations

LEFT, RIGHT = (0, 40, 20, 60), (80, 40, 100, 60)
TOP, BOTTOM = (40, 0, 60, 20), (40, 80, 60, 100)
MIDDLE = (40, 40, 60, 60)


def cat(score=0.95, box=MIDDLE, color=None):
    return Detection("cat", score, box, color)


def dog(score=0.95, box=MIDDLE, color=None):
    return Detection("dog", score, box, color)


def one(label, count=1, **more):
    return {"class": label, "count": count, **more}


SINGLE = {"tag": "single_object", "include": [one("cat")]}
TWO = {"tag": "two_object", "include": [one("cat"), one("dog")]}
COUNTING = {"tag": "counting", "include": [one("cat", 3)], "exclude": [one("cat", 4)]}
COLOR = {"tag": "colors", "include": [one("cat", color="red")]}
POSITION = {"tag": "position", "include": [one("dog"), one("cat", position=["left of", 0])]}
BINDING = {"tag": "color_attr", "include": [one("cat", color="red"), one("dog", color="blue")]}
TWO_RED = {"tag": "colors", "include": [one("cat", 2, color="red")]}
NO_DOG = {"tag": "single_object", "include": [one("cat")], "exclude": [one("dog")]}
OF_RED = {"tag": "position", "include": [one("dog", color="red"), one("cat", position=["left of", 0])]}

CASES = [
    # metadata, detections, strict, partial
    (SINGLE, [cat()], True, 1.0),
    (SINGLE, [cat(0.31)], True, 1.0),
    (SINGLE, [cat(0.3)], False, 0.0),
    (SINGLE, [dog()], False, 0.0),
    (SINGLE, [], False, 0.0),
    (SINGLE, [cat(), cat(0.8)], True, 0.0),  # the benchmark accepts a second cat
    (SINGLE, [cat(), cat(0.2), dog()], True, 1.0),
    (TWO, [dog(), cat()], True, 1.0),
    (TWO, [cat()], False, 0.5),
    (TWO, [cat(), cat(0.5)], False, 0.0),
    (TWO, [cat(), dog(), dog(0.5)], True, 0.5),
    (COUNTING, [cat()] * 3, True, 1.0),
    (COUNTING, [cat()] * 2, False, 2 / 3),
    (COUNTING, [cat()] * 4, False, 2 / 3),
    (COUNTING, [cat()] * 7, False, 0.0),  # never below 0
    (COUNTING, [cat(), cat(), cat(0.9)], False, 2 / 3),  # counts need more confidence
    (COUNTING, [cat(), cat(), cat(0.91), cat(0.9), dog()], True, 1.0),
    (COLOR, [cat(color="red")], True, 1.0),
    (COLOR, [cat(color="blue")], False, 0.5),
    (COLOR, [cat()], False, 0.5),
    (COLOR, [dog(color="red")], False, 0.0),
    (COLOR, [cat(0.5, color="blue"), cat(0.9, color="red")], True, 0.0),  # the most confident is red
    (COLOR, [cat(0.9, color="blue"), cat(0.5, color="red")], False, 0.0),
    (POSITION, [cat(box=LEFT), dog(box=RIGHT)], True, 1.0),
    (POSITION, [cat(box=RIGHT), dog(box=LEFT)], False, 2 / 3),
    (POSITION, [cat(), dog()], False, 2 / 3),
    (POSITION, [cat(box=LEFT)], False, 1 / 3),
    (POSITION, [dog(box=RIGHT)], False, 1 / 3),
    (POSITION, [cat(box=LEFT), cat(0.5, box=TOP), dog(box=RIGHT)], True, 1 / 3),
    (POSITION, [cat(box=LEFT), dog(box=RIGHT), dog(0.5, box=LEFT)], True, 1 / 3),
    (BINDING, [cat(color="red"), dog(color="blue")], True, 1.0),
    (BINDING, [cat(color="blue"), dog(color="red")], False, 0.5),
    (BINDING, [cat(color="red"), dog(color="red")], False, 0.75),
    (BINDING, [cat(color="red")], False, 0.5),
    (TWO_RED, [cat(color="red"), cat(color="red")], True, 1.0),
    (TWO_RED, [cat(color="red"), cat(color="blue")], False, 0.75),
    (TWO_RED, [cat(color="red")], False, 0.25),
    (NO_DOG, [cat()], True, 1.0),
    (NO_DOG, [cat(), dog()], False, 0.5),
    (OF_RED, [cat(box=LEFT), dog(box=RIGHT, color="red")], True, 1.0),
    (OF_RED, [cat(box=LEFT), dog(box=RIGHT, color="blue")], False, 0.5),
]


@pytest.mark.parametrize("metadata, detections, strict, partial", CASES)
def test_every_task(metadata, detections, strict, partial):
    assert judge(detections, metadata) == (strict, pytest.approx(partial))
    check_geneval([Prompt("a photo", metadata)])


def test_positions_hold_for_all_pairs():
    two_cats = {"tag": "position", "include": [one("dog"), one("cat", 2, position=["left of", 0])]}
    right = [dog(box=RIGHT), cat(box=LEFT), cat(0.5, box=MIDDLE)]
    assert judge(right, two_cats) == (True, 1.0)
    assert judge([dog(box=MIDDLE), cat(box=LEFT), cat(0.5, box=RIGHT)], two_cats) == (False, 2 / 3)
    two_dogs = {"tag": "position", "include": [one("dog", 2), one("cat", position=["above", 0])]}
    assert judge([cat(box=TOP), dog(), dog(0.5, box=BOTTOM)], two_dogs) == (True, 1.0)
    assert judge([cat(), dog(box=TOP), dog(0.5, box=BOTTOM)], two_dogs) == (False, 2 / 3)


@pytest.mark.parametrize("a, b, expected", [
    (LEFT, RIGHT, {"left of"}),
    (RIGHT, LEFT, {"right of"}),
    (TOP, BOTTOM, {"above"}),
    (BOTTOM, TOP, {"below"}),
    (LEFT, TOP, {"left of", "below"}),
    (RIGHT, TOP, {"right of", "below"}),
    (MIDDLE, MIDDLE, set()),
    ((44, 40, 64, 60), MIDDLE, set()),  # an offset of 4 is the slack of two objects 20 wide
    ((47, 40, 67, 60), MIDDLE, set()),  # 7: 3 remain, less than half
    ((49, 40, 69, 60), MIDDLE, {"right of"}),  # 9: 5 remain
    ((0, 0, 100, 100), (20, 0, 120, 100), set()),  # 20 apart, but 100 wide
    ((60, 50, 80, 70), MIDDLE, {"right of"}),  # 20 across, 10 down: 16 and 6 remain of 22.4
])  # fmt: skip
def test_relations(a, b, expected):
    assert relations(a, b) == expected


BOX = st.tuples(*[st.integers(0, 50)] * 4).map(lambda c: (c[0], c[1], c[0] + c[2] + 1, c[1] + c[3] + 1))
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
TURNED = {"left of": "above", "right of": "below", "above": "left of", "below": "right of"}


@given(BOX, BOX)
def test_relations_have_symmetries(a, b):
    found = relations(a, b)
    assert relations(b, a) == {OPPOSITE[name] for name in found}
    across = [(y, x, bottom, right) for x, y, right, bottom in (a, b)]
    assert relations(*across) == {TURNED[name] for name in found}
    assert relations(*[tuple(c / 64 for c in box) for box in (a, b)]) == found


DETECTION = st.builds(
    Detection, st.sampled_from(["cat", "dog"]), st.floats(0, 1), BOX, st.sampled_from([None, "red", "blue"])
)


@given(st.lists(DETECTION, max_size=6, unique_by=lambda d: d.score), st.sampled_from([c[0] for c in CASES]))
def test_a_full_partial_score_is_strict_and_order_does_not_matter(detections, metadata):
    found = judge(detections, metadata)
    assert 0 <= found.partial <= 1 and (found.strict or found.partial < 1)
    assert judge(detections[::-1], metadata) == found


def test_the_most_confident_are_kept():
    detections = [cat(0.5 + i / 100) for i in range(20)] + [dog(0.3), dog(0.4)]
    objects = kept(detections, "single_object")
    assert [d.score for d in objects["cat"]] == [0.5 + i / 100 for i in range(19, 3, -1)]
    assert objects["dog"] == [dog(0.4)]
    assert kept(detections, "counting") == {} and list(kept([cat(0.91)], "counting")) == ["cat"]


def test_the_benchmarks_file_is_a_prompt_file(tmp_path):
    lines = [json.dumps(metadata | {"prompt": f"a photo {i}"}) for i, (metadata, *_) in enumerate(CASES)]
    (tmp_path / "evaluation_metadata.jsonl").write_text("\n".join(lines))
    prompts = load_prompts(str(tmp_path / "evaluation_metadata.jsonl"))
    check_geneval(prompts)
    assert [p.metadata for p in prompts] == [case[0] for case in CASES]


@pytest.mark.parametrize("metadata, message", [
    ({}, "not GenEval's"),
    ({"tag": "colors", "include": []}, 'no "include"'),
    ({"tag": 3, "include": [one("cat")]}, 'no "tag"'),
    ({"tag": "colors", "include": 3}, "not GenEval's"),
    ({"tag": "colors", "include": ["cat"]}, "not GenEval's"),
    ({"tag": "colors", "include": [{"class": "cat"}]}, "not GenEval's"),
    ({"tag": "colors", "include": [one("cat", 0)]}, "a count of at least 1"),
    ({"tag": "colors", "include": [one("cat", 1.0)]}, "a count of at least 1"),
    ({"tag": "colors", "include": [one(3)]}, "needs a class"),
    ({"tag": "colors", "include": [one("cat")], "exclude": [one("cat", -1)]}, "a count of at least 1"),
    ({"tag": "colors", "include": [one("cat", color="teal")]}, "'teal' is none of red, orange"),
    ({"tag": "position", "include": [one("cat", position=["left of", 0])]}, "an earlier object"),
    ({"tag": "position", "include": [one("cat"), one("dog", position=["left of", -1])]}, "an earlier object"),
    ({"tag": "position", "include": [one("cat"), one("dog", position=["near", 0])]}, "is not left of or"),
    ({"tag": "position", "include": [one("cat"), one("dog", position="left of")]}, "not GenEval's"),
])  # fmt: skip
def test_other_metadata_are_refused(metadata, message):
    fine = Prompt("fine", {"tag": "colors", "include": [one("cat", color=COLORS[-1])]})
    with pytest.raises(InputError, match="prompt 'a photo': .*" + message) as error:
        check_geneval([fine, Prompt("a\nphoto", metadata)])
    assert "\n" not in str(error.value)
