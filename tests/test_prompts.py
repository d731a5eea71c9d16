"""Prompts, the group sampler, rewards and their contract, and the embedded digits model."""

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shared.errors import InputError
from shared.policies import make_policy
from shared.policies.digit_tokens import DigitTokensPolicy
from shared.policies.digits import DigitsPolicy
from shared.prompts import DIGIT_WORDS, Prompt, digit_of, load_prompts, sample_groups
from shared.rollout import ode_sample, sample_noise


def test_digits_are_ten_prompts_in_words():
    prompts = load_prompts("digits")
    assert [digit_of(p.text) for p in prompts] == list(range(10))
    assert prompts[3].text == "a handwritten three"


def test_digit_images_are_the_real_digits():
    """In the order of scripts/pretrain_toys.py, whose last 360 no model was trained to name."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0)).numpy()
    prompts = load_prompts("digit-images") + load_prompts("digit-images-test")
    assert len(prompts) == 1797 and len(load_prompts("digit-images")) == int(0.8 * 1797)
    assert [p.metadata["image"] for p in prompts] == data.images[order].astype(int).tolist()
    assert [p.metadata["answer"] for p in prompts] == [DIGIT_WORDS[label] for label in data.target[order]]
    assert {p.text for p in prompts} == {"which digit is this?"}
    assert json.loads(json.dumps(prompts[0].metadata)) == prompts[0].metadata


def test_a_missing_file_names_the_built_in_sets():
    with pytest.raises(InputError, match="digits.*digit-images.*digit-images-test") as error:
        load_prompts("missing.txt")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text, digit", [("Draw a SEVEN!", 7), ("the figure 4", 4), ("a 4, a four", 4)])
def test_digit_of(text, digit):
    assert digit_of(text) == digit


@pytest.mark.parametrize("text", ["a cat", "three or four", "41", "a fourteen", ""])
def test_digit_of_refuses(text):
    with pytest.raises(InputError, match="exactly one digit"):
        digit_of(text)


def test_prompts_in_files():
    with tempfile.TemporaryDirectory() as folder:
        check_prompt_files(Path(folder))


def check_prompt_files(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("\ufeffa handwritten four\r\n\n  a nine  \n", encoding="utf-8")
    assert load_prompts(str(text)) == [Prompt("a handwritten four", {}), Prompt("a nine", {})]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a one\u2028or so"}\n', encoding="utf-8")
    assert load_prompts(str(lines)) == [Prompt("a one\u2028or so", {})]
    lines.write_text('{"prompt": "a sign \\"HI\\"", "target": "HI"}\n\n{"prompt": "two"}\n')
    assert load_prompts(str(lines)) == [Prompt('a sign "HI"', {"target": "HI"}), Prompt("two", {})]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5), st.integers(0, 50))
def test_groups_are_distinct_and_pass_over_all_prompts(num_prompts, num_groups, seed, iteration):
    if num_groups > num_prompts:
        with pytest.raises(InputError):
            sample_groups(num_prompts, num_groups, seed, iteration)
        return
    per_pass = num_prompts // num_groups
    first = iteration // per_pass * per_pass
    passed = [
        i for k in range(first, first + per_pass) for i in sample_groups(num_prompts, num_groups, seed, k)
    ]
    assert len(passed) == len(set(passed)) == per_pass * num_groups and set(passed) <= set(range(num_prompts))
    groups = sample_groups(num_prompts, num_groups, seed, iteration)
    assert groups == passed[(iteration - first) * num_groups :][:num_groups]


def test_groups_differ_between_passes_and_seeds():
    passes = {(seed, k): tuple(sample_groups(30, 30, seed, k)) for seed in range(3) for k in range(3)}
    assert len(set(passes.values())) == 9
    counts = np.zeros(10)
    for k in range(400):
        counts[sample_groups(10, 8, 0, k)] += 1  # which two of ten are left out is even: 320 each, sd < 8
    assert (abs(counts - 320) < 5 * 8).all()


# ---- the digits ----


def test_base_model_follows_its_prompt_about_half_the_time():
    from shared.rewards import make_rewards, score

    policy, prompts = DigitsPolicy(), [p for p in load_prompts("digits") for _ in range(20)]
    noise = sample_noise(policy, 0, 0, range(200), 1)[:, 0]
    images = policy.decode(ode_sample(policy, noise, policy.encode(prompts), policy.sigmas(10)))
    assert images.shape == (200, 3, 8, 8) and images.min() >= 0 and images.max() <= 1
    assert 0.35 < score(make_rewards("label"), images, prompts).total.mean() < 0.6


def test_judge_knows_the_held_out_digits():
    from sklearn.datasets import load_digits

    from shared.rewards import make_rewards, score

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))[
        -360:
    ]  # pretrain_toys.py
    pixels = torch.tensor(data.images / 16, dtype=torch.float32)[order, None].expand(-1, 3, -1, -1)
    words = load_prompts("digits")
    prompts = [words[t] for t in data.target[order]]
    assert score(make_rewards("label"), pixels, prompts).total.mean() > 0.93
    wrong = prompts[1:] + prompts[:1]
    assert score(make_rewards("label"), pixels, wrong).total.mean() < 0.25


def test_policy_contract_and_export(tmp_path):
    policy = make_policy("digits")
    cond = policy.encode([Prompt("a one", {}), Prompt("a two", {})])
    x = policy.noise(2, torch.Generator().manual_seed(0))
    before = policy.velocity(x, 0.5, cond)
    assert before.dtype == torch.float32 and policy.decode(x).shape == (2, 3, 8, 8)
    assert not torch.allclose(before, policy.velocity(x, 0.5, policy.encode([Prompt("a two", {})] * 2)))
    with torch.no_grad():
        policy.module.outputs[1].bias += 1.0
    assert torch.allclose(policy.velocity(x, 0.5, cond), before + 1.0, atol=1e-5)
    with policy.reference():
        assert torch.equal(policy.velocity(x, 0.5, cond), before)
    assert torch.allclose(policy.velocity(x, 0.5, cond), before + 1.0, atol=1e-5)
    reloaded = DigitsPolicy(weights=policy.export(tmp_path))
    assert torch.equal(reloaded.velocity(x, 0.5, cond), policy.velocity(x, 0.5, cond))


def test_unknown_models_are_refused():
    assert isinstance(make_policy("digits"), DigitsPolicy)
    with pytest.raises(InputError, match="unknown model 'sd9': known are digits"):
        make_policy("sd9")
    assert isinstance(make_policy("digit-tokens", task="understanding"), DigitTokensPolicy)
    with pytest.raises(InputError, match="unknown model 'sd9': known are digit-tokens"):
        make_policy("sd9", task="generation")


@pytest.mark.parametrize("model, task, message", [
    ("digit-tokens", None, "'digit-tokens' is discrete: train it with algos/dflow_grpo.py, or use digits"),
    ("digits", "generation", "'digits' is continuous: train it with algos/flow_grpo.py, algos/tp_grpo.py"),
    ("digits", "understanding", "algos/op_grpo.py, or use digit-tokens"),
])  # fmt: skip
def test_models_of_the_other_kind_are_refused(model, task, message):
    with pytest.raises(InputError, match=message) as error:
        make_policy(model, task=task)
    assert "\n" not in str(error.value)


def test_jpeg_is_the_size_in_kilobytes():
    from shared.rewards import make_rewards, score

    pixels = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    pixels[0] = 0.5
    rewards = score(make_rewards("jpeg"), pixels, [Prompt("", {})] * 3).total
    for image, reward in zip(pixels, rewards, strict=True):
        buffer = io.BytesIO()
        array = (image.permute(1, 2, 0) * 255).round().byte().numpy()
        Image.fromarray(array).save(buffer, format="JPEG", quality=95)
        assert float(reward) == pytest.approx(-len(buffer.getvalue()) / 1000)
    assert rewards[0] > rewards[1:].max()  # a plain image is smaller than noise


def test_ink_is_label_times_brightness():
    from shared.rewards import make_rewards, score

    pixels = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    parts = score(make_rewards("label,ink"), pixels, load_prompts("digits")[:4]).parts
    assert torch.allclose(parts["ink"], parts["label"] * pixels.mean((1, 2, 3)))
