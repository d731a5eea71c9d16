"""The reward on text in images: its score exactly, and real reading of rendered text."""

import functools
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from algos import flow_grpo
from shared.errors import InputError, RewardError
from shared.prompts import Prompt
from shared.rewards import Reward, check_prompts, make_rewards, score
from shared.rewards.ocr import check_ocr, edit_distance, similarity, target_of
from shared.training import set_up


@pytest.mark.parametrize("text, target", [
    ('a sign that says "Open late"', "Open late"),
    ('"A" and then "B"', "A"),
    ("a poster: “Grüße”", "Grüße"),
    ('it\'s a "dog\'s" life', "dog's"),
])  # fmt: skip
def test_the_target_is_the_first_quoted_text(text, target):
    assert target_of(text) == target


@pytest.mark.parametrize("text", ["a sign", 'a "sign', 'a sign ""', 'a\nsign " "', "a 'sign'", "“a sign", ""])
def test_prompts_without_quoted_text_are_refused(text):
    prompts = [Prompt('a "b"', {}), Prompt(text, {})]
    check_ocr(prompts[:1])
    with pytest.raises(InputError, match="has no text in double quotes") as error:
        check_prompts([Reward("ocr", 1.0, None)], prompts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("a, b, distance", [
    ("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2),
    ("abc", "abc", 0), ("ab", "ba", 2), ("intention", "execution", 5), ("a", "aaaa", 3),
])  # fmt: skip
def test_edit_distances(a, b, distance):
    assert edit_distance(a, b) == distance


@functools.cache
def by_definition(a, b):
    if not a or not b:
        return len(a) + len(b)
    replaced = by_definition(a[1:], b[1:]) + (a[0] != b[0])
    return min(replaced, by_definition(a[1:], b) + 1, by_definition(a, b[1:]) + 1)


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_is_its_definition(a, b):
    assert edit_distance(a, b) == by_definition(a, b) == edit_distance(b, a)


@pytest.mark.parametrize("read, target, expected", [
    ("OPENLATE", "Open late", 1.0),
    ("open\nlate", "Open late", 1.0),
    ("opem", "open", 0.75),
    ("open", "op", 0.0),
    ("opens", "open", 0.75),
    ("xxxxxxxxxxxx", "open", 0.0),
    ("", "open", 0.0),
])  # fmt: skip
def test_similarity(read, target, expected):
    assert similarity(read, target) == expected


def rendered(text, size=128, font_size=24, ink=(0, 0, 0), paper=(255, 255, 255)):
    """An image (3, size, size) in [0, 1] with a text."""
    image = Image.new("RGB", (size, size), paper)
    font = ImageFont.load_default(font_size)
    ImageDraw.Draw(image).multiline_text((8, size // 4), text, fill=ink, font=font)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def test_rendered_text_is_read():
    pytest.importorskip("rapidocr")
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(3, 128, 128, generator=generator)
    pixels = [
        rendered("Coffee"),
        rendered("Coffee"),
        rendered("open\nlate", ink=(250, 240, 60), paper=(20, 30, 120)),
        rendered("STOP") + 0.05 * torch.randn(3, 128, 128, generator=generator),
        noise,
        torch.ones(3, 128, 128),
    ]
    texts = ["Coffee", "Coffin", "Open late", "stop", "stop", "stop"]
    prompts = [Prompt(f'a sign that says "{text}", at night', {}) for text in texts]
    (reward,) = make_rewards("ocr")
    check_prompts([reward], prompts)
    expected = pytest.approx([1.0, 1 - 2 / 6, 1.0, 1.0, 0.0, 0.0])
    for batch_size in (None, 4):
        assert score([reward], torch.stack(pixels), prompts, batch_size).total.tolist() == expected
    small = torch.rand(1, 3, 8, 8, generator=generator)
    assert score([reward], small, prompts[:1]).total.tolist() == [0.0]
    with pytest.raises(RewardError, match="'ocr' failed: InputError: prompt 'a sign' has no text in double"):
        score([reward], small, [Prompt("a sign", {})])


def test_prompts_are_checked_before_training():
    pytest.importorskip("rapidocr")
    with pytest.raises(InputError, match="'a handwritten zero' has no text in double quotes"):
        set_up(flow_grpo.Args(reward="label,ocr:0.5"))


def test_a_missing_package_is_named():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rapidocr", None)
        with pytest.raises(InputError, match="pip install -c scripts/constraints.txt rapidocr") as error:
            make_rewards("ocr")
    assert "\n" not in str(error.value)
