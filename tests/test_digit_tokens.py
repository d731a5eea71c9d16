"""The embedded discrete model: the contract of a discrete policy in both tasks, on each of its paths."""

import json

import pytest
import torch
from torch.testing import assert_close

from shared.ctmc import MetricPath, MixturePath, sample_step, transition_log_prob
from shared.errors import InputError
from shared.policies import TOKEN_MODELS, make_policy
from shared.policies.digit_tokens import DigitTokensPolicy, carry_over, token_path
from shared.prompts import DIGIT_WORDS, Prompt, load_prompts

TASKS = ("generation", "understanding")


def prompts_of(task: str, n: int) -> list[Prompt]:
    """n prompts that a task can take."""
    prompts = load_prompts("digits" if task == "generation" else "digit-images-test")
    return [prompts[i % len(prompts)] for i in range(n)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", list(TOKEN_MODELS))
def test_contract(model, task):
    policy = make_policy(model, task=task)
    tokens, symbols = (64, 17) if task == "generation" else (1, 10)
    cond = policy.encode(prompts_of(task, 5))
    x = policy.source(5, torch.Generator().manual_seed(0))
    assert policy.task == task and policy.num_tokens == tokens and x.shape == (5, tokens)
    assert cond["mask"].shape == (5, tokens) and cond["mask"].all() and cond["mask"].dtype == torch.bool
    assert {len(value) for value in cond.values()} == {5} and x.dtype == torch.int64
    times = policy.times(8)
    assert times.tolist() == [k / 8 for k in range(9)] and times.dtype == torch.float64
    logits = policy.posterior_logits(x, times[3], cond)
    masked = isinstance(policy.path, MixturePath)
    assert policy.path.vocab_size == symbols + masked
    assert logits.shape == (5, tokens, policy.path.vocab_size) and logits.dtype == torch.float32
    assert torch.isfinite(logits[..., :symbols]).all()
    assert (
        torch.equal(x, torch.full_like(x, symbols))
        if masked
        else (x < symbols).all() and x.unique().numel() > 1
    )
    same = torch.equal(logits, policy.posterior_logits(x, 0.9, cond))
    assert same == (model != "digit-tokens-timed")


@pytest.mark.parametrize("task", TASKS)
def test_all_weights_but_those_of_the_other_head_are_trained(task):
    policy = make_policy("digit-tokens-timed", task=task)
    logits = policy.posterior_logits(
        policy.source(4, torch.Generator()), 0.3, policy.encode(prompts_of(task, 4))
    )
    logits.square().sum().backward()
    other = "label_head" if task == "generation" else "pixel_head"
    for name, p in policy.module.named_parameters():
        trained = not name.startswith(other)
        assert p.requires_grad == trained and (p.grad is not None and bool(p.grad.any())) == trained, name


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", list(TOKEN_MODELS))
def test_a_batch_is_its_samples_one_at_a_time(model, task):
    policy, prompts = make_policy(model, task=task), prompts_of(task, 6)
    cond, x = policy.encode(prompts), policy.source(6, torch.Generator().manual_seed(1))
    x[:, ::2] = 3  # for the masked path, some revealed
    logits = policy.posterior_logits(x, 0.4, cond)
    assert logits.flatten(1).unique(dim=0).shape[0] > 1 or (x == 3).all()  # conditions matter
    for i in range(6):
        row = policy.encode(prompts[i : i + 1])
        assert all(torch.equal(value[0], cond[name][i]) for name, value in row.items())
        assert_close(policy.posterior_logits(x[i : i + 1], 0.4, row)[0], logits[i], rtol=1e-4, atol=1e-4)


def test_sources_are_the_paths_law_and_repeat():
    policy = make_policy("digit-tokens", task="generation")
    x = policy.source(200, torch.Generator().manual_seed(3))
    assert torch.equal(x, policy.source(200, torch.Generator().manual_seed(3)))
    counts = x.flatten().bincount(minlength=17)  # 12,800 / 17 = 753 each, sd 27
    assert counts.shape == (17,) and (abs(counts - 12_800 / 17) < 6 * 27).all()


# ---- paths ----


def test_metric_paths_are_a_quarter_circle_and_labels_equally_far_apart():
    levels, labels = token_path("metric", "generation"), token_path("metric", "understanding")
    assert isinstance(levels, MetricPath) and (levels.c, levels.a) == (3.0, 0.9) == (labels.c, labels.a)
    gap = torch.arange(17.0, dtype=torch.float64)
    expected = (2 - 2 * ((gap[:, None] - gap) / 16 * torch.pi / 2).cos()) ** 2
    assert_close(levels.distance.tensor, expected, rtol=1e-9, atol=1e-12)
    assert_close(labels.distance.tensor, 4.0 * (1 - torch.eye(10, dtype=torch.float64)))


def test_masked_paths_have_a_mask_token_after_the_others():
    assert token_path("mask", "generation") == MixturePath(18, "mask", mask_id=17)
    assert token_path("mask", "understanding") == MixturePath(11, "mask", mask_id=10)


def test_carry_over_keeps_what_is_revealed_with_a_gradient_of_exactly_zero():
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    x, inf = torch.tensor([3, 1]), torch.inf
    result = carry_over(logits, x)
    assert result.tolist() == [[1, 2, 3, -inf], [-inf, 0, -inf, -inf]]
    log_prob = transition_log_prob(token_path_of_three(), result, x, torch.tensor([2, 1]), 0.5, 0.125)
    assert log_prob[0] < 0 and log_prob[1] == 0
    log_prob.sum().backward()
    expected = torch.tensor([0.0, 0.0, 1.0]) - torch.tensor([1.0, 2.0, 3.0]).softmax(0)
    assert_close(logits.grad, torch.stack([expected, torch.zeros(3)]))
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0]


def token_path_of_three() -> MixturePath:
    return MixturePath(4, "mask", mask_id=3)


@pytest.mark.parametrize("task", TASKS)
def test_a_masked_chain_reveals_every_token_once(task):
    policy = make_policy("digit-tokens-masked", task=task)
    cond, generator = policy.encode(prompts_of(task, 20)), torch.Generator().manual_seed(0)
    x = start = policy.source(20, generator)
    for k in range(8):
        logits = policy.posterior_logits(x, k / 8, cond)
        x_next, _ = sample_step(policy.path, logits, x, k / 8, 1 / 8, last=k == 7, generator=generator)
        log_prob = transition_log_prob(policy.path, logits, x, x_next, k / 8, 1 / 8, last=k == 7)
        (gradient,) = torch.autograd.grad(log_prob.sum(), policy.module.level.weight, allow_unused=False)
        assert torch.isfinite(log_prob).all() and torch.isfinite(gradient).all()
        assert torch.equal(x_next[x != start], x[x != start])
        x = x_next
    assert (x != start).all()


# ---- what goes in and comes out ----


def test_levels_are_grey_and_masks_are_mid_grey():
    policy = make_policy("digit-tokens-masked", task="generation")
    x = torch.arange(128).view(2, 64) % 18
    pixels = policy.decode(x, {})
    assert pixels.shape == (2, 3, 8, 8) and pixels.dtype == torch.float32
    expected = [0.5 if level == 17 else level / 16 for level in x[1].tolist()]
    for channel in range(3):
        assert pixels[1, channel].flatten().tolist() == expected


def test_labels_are_words_and_masks_are_question_marks():
    policy = make_policy("digit-tokens-masked", task="understanding")
    assert policy.decode(torch.arange(11)[:, None], {}) == [*DIGIT_WORDS, "?"]


def test_images_are_encoded_row_by_row():
    image = [[(8 * i + j) % 17 for j in range(8)] for i in range(8)]
    policy = make_policy("digit-tokens", task="understanding")
    cond = policy.encode([Prompt("which?", {"image": image, "answer": " Three "})])
    assert cond["pixels"].tolist() == [[i % 17 for i in range(64)]] and cond["pixels"].dtype == torch.int64
    assert make_policy("digit-tokens", task="generation").encode([Prompt("a 4", {})])["label"].tolist() == [4]


IMAGE = [[0] * 8] * 8


@pytest.mark.parametrize("metadata, message", [
    ({}, 'prompt "which." needs an "image": 8 rows of 8 integers, 0 to 16'),
    ({"image": "three.png", "answer": "three"}, "8 rows of 8"),
    ({"image": IMAGE[:7], "answer": "three"}, "8 rows of 8"),
    ({"image": [[0] * 9, [0] * 7] + IMAGE[:6], "answer": "three"}, "8 rows of 8"),
    ({"image": [[17] * 8] * 8, "answer": "three"}, "8 rows of 8"),
    ({"image": [[0.5] * 8] * 8, "answer": "three"}, "8 rows of 8"),
    ({"image": [0] * 64, "answer": "three"}, "8 rows of 8"),
    ({"image": IMAGE}, 'needs an "answer" out of zero, one, .*, not None'),
    ({"image": IMAGE, "answer": 3}, "not 3"),
    ({"image": IMAGE, "answer": "cat"}, "not 'cat'"),
])  # fmt: skip
def test_prompts_without_image_or_answer_are_refused(metadata, message):
    json.dumps(metadata)
    with pytest.raises(InputError, match=message) as error:
        make_policy("digit-tokens", task="understanding").encode([Prompt("which?", metadata)])
    assert "\n" not in str(error.value)


def test_generation_needs_a_prompt_that_names_a_digit():
    with pytest.raises(InputError, match="exactly one digit"):
        make_policy("digit-tokens", task="generation").encode([Prompt("a cat", {})])


@pytest.mark.parametrize("path, file", [("metric", "digit-tokens"), ("mask", "digit-tokens-masked")])
def test_reference_and_export(path, file, tmp_path):
    policy = make_policy(file, task="understanding")
    cond = policy.encode(prompts_of("understanding", 3))
    x = policy.source(3, torch.Generator().manual_seed(0))
    before = policy.posterior_logits(x, 0.5, cond)
    with torch.no_grad():
        policy.module.label_head.bias[4] += 1.0
    shifted = before + torch.nn.functional.one_hot(torch.tensor(4), before.shape[-1])
    assert_close(policy.posterior_logits(x, 0.5, cond), shifted)
    with policy.reference():
        assert torch.equal(policy.posterior_logits(x, 0.5, cond), before)
        assert not policy.posterior_logits(x, 0.5, cond).requires_grad
    exported = policy.export(tmp_path)
    reloaded = DigitTokensPolicy(weights=exported, path=path, task="understanding")
    assert torch.equal(reloaded.posterior_logits(x, 0.5, cond), policy.posterior_logits(x, 0.5, cond))


@pytest.mark.parametrize("model", list(TOKEN_MODELS))
def test_base_models_follow_their_prompts_about_half_the_time(model):
    """Both tasks, from the source in eight steps."""
    from shared.rewards import make_rewards, score

    for task, reward in [("generation", "label"), ("understanding", "answer")]:
        policy, generator = make_policy(model, task=task), torch.Generator().manual_seed(0)
        prompts = prompts_of(task, 250)
        cond, x = policy.encode(prompts), policy.source(250, generator)
        with torch.no_grad():
            for k in range(8):
                logits = policy.posterior_logits(x, k / 8, cond)
                x, _ = sample_step(policy.path, logits, x, k / 8, 1 / 8, last=k == 7, generator=generator)
        rewards = score(make_rewards(reward, task=task), policy.decode(x, cond), prompts).total
        assert 0.25 < rewards.mean() < 0.7
