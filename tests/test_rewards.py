"""The contract of rewards: order, weights, batches, and failures that never become a number."""

import pytest
import torch

from shared.errors import InputError, RewardError
from shared.prompts import Prompt, load_prompts
from shared.rewards import Reward, make_rewards, score

PROMPTS = [Prompt(str(i), {}) for i in range(5)]
PIXELS = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 2, 2)


def brightness(pixels, prompts):
    return pixels.mean((1, 2, 3)) + torch.tensor([10.0 * int(p.text) for p in prompts])


@pytest.mark.parametrize("batch_size, calls", [(None, 1), (2, 3), (5, 1)])
def test_scores_keep_the_order_in_any_batches(batch_size, calls):
    scores = score([Reward("b", 1.0, brightness)], PIXELS, PROMPTS, batch_size)
    assert scores.total.tolist() == [0.0, 11.0, 22.0, 33.0, 44.0] and scores.calls == calls
    assert scores.total.dtype == torch.float32


def test_weighted_sum_keeps_its_parts():
    ones = Reward("ones", -2.0, lambda pixels, prompts: torch.ones(len(prompts)))
    scores = score([Reward("b", 0.5, brightness), ones], PIXELS, PROMPTS)
    assert scores.total.tolist() == [-2.0, 3.5, 9.0, 14.5, 20.0] and scores.calls == 2
    assert (
        scores.parts["b"].tolist() == [0.0, 11.0, 22.0, 33.0, 44.0]
        and scores.parts["ones"].tolist() == [1.0] * 5
    )


def raises(pixels, prompts):
    raise OSError("disk on fire")


@pytest.mark.parametrize("function, message", [
    (lambda pixels, prompts: torch.tensor([0.0, 1.0, torch.nan, 2.0, 3.0]), "1 values that are not finite"),
    (lambda pixels, prompts: torch.full((5,), -torch.inf), "5 values that are not finite"),
    (lambda pixels, prompts: torch.zeros(4), "shape"),
    (lambda pixels, prompts: torch.zeros(5, 1), "shape"),
    (lambda pixels, prompts: None, "failed"),
    (raises, "OSError: disk on fire"),
])  # fmt: skip
def test_failures_are_errors_that_name_the_reward(function, message):
    with pytest.raises(RewardError, match="'broken'") as error:
        score([Reward("fine", 1.0, brightness), Reward("broken", 1.0, function)], PIXELS, PROMPTS)
    assert message in str(error.value)


def test_images_that_are_not_finite_are_not_scored():
    for reward in ("jpeg", "label"):
        with pytest.raises(FloatingPointError, match="images that are not finite"):
            score(make_rewards(reward), PIXELS * torch.nan, [Prompt("a one", {})] * 5)


def test_specifications():
    assert [(r.name, r.weight) for r in make_rewards("label")] == [("label", 1.0)]
    assert [(r.name, r.weight) for r in make_rewards("label:2, jpeg:-0.5")] == [
        ("label", 2.0),
        ("jpeg", -0.5),
    ]


@pytest.mark.parametrize(
    "spec", ["", "nope", "label,", "label:x", "label:", "label:nan", "label:inf", "label:0", "ink,ink:2"]
)
def test_bad_specifications_are_refused(spec):
    with pytest.raises(InputError):
        make_rewards(spec)


@pytest.mark.parametrize("spec, task, message", [
    ("label", "understanding", "'label' scores images, and --task understanding makes answers: use answer"),
    ("answer,ink", "generation", "'answer' scores answers, and --task generation makes images: use label, "),
    ("nope", "understanding", "unknown reward 'nope': known are answer"),
    ("nope", "generation", "unknown reward 'nope': known are label, ink, next, jpeg"),
])  # fmt: skip
def test_rewards_of_the_other_task_are_refused(spec, task, message):
    with pytest.raises(InputError, match=message) as error:
        make_rewards(spec, task=task)
    assert "\n" not in str(error.value)


ANSWERS = [Prompt("which?", {"answer": word}) for word in ("three", " Four", "five", "six", "six")]


@pytest.mark.parametrize("batch_size, calls", [(None, 1), (2, 3)])
def test_answers_are_right_whatever_their_case_and_blanks(batch_size, calls):
    given = ["three", "four\n", "FIVE ", "?", "sixth"]
    scores = score(make_rewards("answer:2", task="understanding"), given, ANSWERS, batch_size)
    assert scores.parts["answer"].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0] and scores.calls == calls
    assert scores.total.tolist() == [2.0, 2.0, 2.0, 0.0, 0.0] and scores.total.dtype == torch.float32


def test_failures_count_answers():
    with pytest.raises(RewardError, match=r"returned shape \(4,\) for 5 answers"):
        score([Reward("broken", 1.0, lambda *args: torch.zeros(4))], ["three"] * 5, ANSWERS)
    with pytest.raises(RewardError, match="'answer' failed: KeyError: 'answer'"):
        score(make_rewards("answer", task="understanding"), ["three"] * 5, PROMPTS)


def test_next_is_one_where_the_judge_sees_the_digit_after_the_prompted_one():
    """Real images of known digits: the mean of each class, which the judge is sure of."""
    sklearn = pytest.importorskip("sklearn.datasets").load_digits()
    means = torch.stack([torch.tensor(sklearn.images[sklearn.target == d].mean(0) / 16) for d in range(10)])
    pixels = means.float()[:, None].expand(-1, 3, -1, -1)
    (reward,) = make_rewards("next")
    for shift in range(10):  # image d is shown with the prompt d + shift
        prompts = [load_prompts("digits")[(d + shift) % 10] for d in range(10)]
        values = reward.function(pixels, prompts)
        assert values.tolist() == [float(shift == 9)] * 10 and values.dtype == torch.float32
