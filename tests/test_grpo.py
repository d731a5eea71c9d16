"""Advantages against numpy and their invariances; the clipped surrogate by its gradient, off-policy, both
signs clipped."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from shared.grpo import clipped_surrogate, group_advantages, weight_metrics

REWARDS = torch.tensor(
    [[0.1, 0.4, 0.9, 0.2], [2.0, 2.5, 2.1, 2.0], [0.1, 0.1, 0.1, 0.1]], dtype=torch.float64
)


def numpy_advantages(rewards, std, eps=1e-4, clamp=5.0):
    r = rewards.numpy()
    centred = r - r.mean(1, keepdims=True)
    scale = {"group": r.std(1, keepdims=True) + eps, "batch": r.std((0, 1)) + eps, "none": 1.0}[std]
    return torch.from_numpy(np.clip(centred / scale, -clamp, clamp))


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_advantages_are_the_formula(std):
    assert_close(group_advantages(REWARDS, std), numpy_advantages(REWARDS, std), rtol=1e-12, atol=1e-12)
    steps = torch.stack([REWARDS, REWARDS**2 - 1, -3 * REWARDS], dim=2)  # (P, G, n)
    per_step = torch.stack([numpy_advantages(steps[..., j], std) for j in range(3)], dim=2)
    assert_close(group_advantages(steps, std), per_step, rtol=1e-12, atol=1e-12)


def test_equal_rewards_give_exactly_zero():
    equal = torch.tensor([0.1, 0.7, 0.3], dtype=torch.float64)[:, None].expand(3, 7)
    assert (equal.mean(1) != equal[:, 0]).any()  # the mean of equal numbers is rounded
    rewards = torch.cat([equal, torch.linspace(0, 1, 7, dtype=torch.float64)[None]])
    for std in ("group", "batch", "none"):
        advantages = group_advantages(rewards, std)
        assert (advantages[:3] == 0).all() and (advantages[3].abs() > 0.1).sum() == 6
        per_step = group_advantages(torch.stack([rewards, rewards.flip(0)], dim=2), std)
        assert (per_step[:3, :, 0] == 0).all() and (per_step[1:, :, 1] == 0).all() and per_step[0, 0, 1] != 0


def test_advantages_are_clamped():
    rewards = torch.zeros(1, 101)
    rewards[0, 0] = 1.0  # 10 standard deviations above the mean
    assert group_advantages(rewards)[0, 0] == 5.0
    assert group_advantages(-rewards)[0, 0] == -5.0
    assert group_advantages(rewards, clamp=2.0)[0, 0] == 2.0


def test_advantages_refuse_bad_input():
    for rewards, std, message in [
        (torch.zeros(4), "group", r"^rewards must be \(P, G\) or \(P, G, n\), not \(4,\)$"),
        (torch.zeros(2, 2, 2, 2), "group", "^rewards must be"),
        (torch.zeros(2, 2), "global", """^std must be "group", "batch" or "none", not 'global'$"""),
        (torch.tensor([[0.0, torch.nan]]), "group", "^rewards must be finite$"),
    ]:
        with pytest.raises(ValueError, match=message):
            group_advantages(rewards, std)


def test_advantages_keep_the_dtype_of_the_rewards():
    assert group_advantages(REWARDS.float()).dtype == torch.float32
    assert group_advantages(REWARDS).dtype == torch.float64


@given(st.integers(0, 2**31), st.floats(-50, 50), st.floats(0.1, 10))
def test_advantage_invariances(seed, shift, scale):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand((3, 5), generator=generator, dtype=torch.float64)
    advantages = group_advantages(rewards, eps=0.0)
    assert_close(group_advantages(rewards + shift, eps=0.0), advantages, rtol=1e-6, atol=1e-9)
    assert_close(group_advantages(rewards * scale, eps=0.0), advantages, rtol=1e-6, atol=1e-9)
    order = torch.randperm(5, generator=generator)
    assert_close(group_advantages(rewards[:, order], eps=0.0), advantages[:, order], rtol=1e-9, atol=1e-12)
    other = rewards.clone()
    other[1] = torch.rand(
        5, generator=generator, dtype=torch.float64
    )  # another prompt's rewards change nothing here
    assert_close(group_advantages(other, eps=0.0)[[0, 2]], advantages[[0, 2]], rtol=0, atol=0)
    assert_close(advantages.sum(1), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-9)


# Ratios below, within and above the clip range, each with an advantage of either sign.
LOG_OLD = torch.tensor([-3.0, -2.0, -1.5, -4.0, -2.5, -0.5], dtype=torch.float64)
RATIO = torch.tensor([0.5, 1.1, 1.7, 0.6, 0.95, 1.4], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.3, 0.7, 2.0, -1.1, -0.4, -0.9], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 0.3, 2.0, 0.5, 1.5, 0.7], dtype=torch.float64)


def numpy_surrogate(log_new, weights):
    """The loss and its gradient as PPO's paper states it: gradient -w A ratio / B unless the clip binds, else
    0."""
    ratio = np.exp(log_new - LOG_OLD.numpy())
    a, eps = ADVANTAGES.numpy(), 0.2
    objective = np.minimum(ratio * a, np.clip(ratio, 1 - eps, 1 + eps) * a)
    binds = ((a > 0) & (ratio > 1 + eps)) | ((a < 0) & (ratio < 1 - eps))
    return -(weights * objective).mean(), np.where(binds, 0, -weights * a * ratio) / len(a)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_surrogate_value_and_gradient_off_policy(weights):
    log_new = (LOG_OLD + RATIO.log()).requires_grad_()
    old, advantages = LOG_OLD.clone().requires_grad_(), ADVANTAGES.clone().requires_grad_()
    given_weights = None if weights is None else weights.clone().requires_grad_()
    loss, metrics = clipped_surrogate(log_new, old, advantages, 0.2, given_weights)
    loss.backward()
    w = np.ones(6) if weights is None else weights.numpy()
    expected_loss, expected_gradient = numpy_surrogate(log_new.detach().numpy(), w)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    assert_close(log_new.grad, torch.from_numpy(expected_gradient), rtol=1e-12, atol=1e-15)
    assert (log_new.grad[[2, 3]] == 0).all() and (
        log_new.grad[[0, 1, 4, 5]] != 0
    ).all()  # each clip binds on one side only
    assert old.grad is None and advantages.grad is None and (weights is None or given_weights.grad is None)
    assert metrics["ratio_mean"] == pytest.approx(float(RATIO.mean()), rel=1e-6)
    assert metrics["ratio_deviation"] == pytest.approx(0.7, rel=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(4 / 6, rel=1e-6)


def test_surrogate_on_policy_has_the_policy_gradient():
    """At ratio 1 the loss of centred advantages is 0 for any code; the gradient is not."""
    log_new = LOG_OLD.clone().requires_grad_()
    loss, metrics = clipped_surrogate(log_new, LOG_OLD, ADVANTAGES, 0.2)
    loss.backward()
    assert_close(log_new.grad, -ADVANTAGES / 6, rtol=1e-12, atol=0)
    assert metrics == {"ratio_mean": 1.0, "ratio_deviation": 0.0, "clip_fraction": 0.0}


def test_a_ratio_on_the_edge_of_the_clip_range_is_not_clipped():
    assert clipped_surrogate(LOG_OLD, LOG_OLD, ADVANTAGES, 0.0)[1]["clip_fraction"] == 0.0


def test_surrogate_refuses_shapes_that_would_broadcast():
    for shapes in [((4,), (4, 1), (4,)), ((4, 2), (4, 2), (4,)), ((4,), (1,), (4,))]:
        with pytest.raises(ValueError, match="^shapes must be equal"):
            clipped_surrogate(*(torch.zeros(shape) for shape in shapes), 0.2)
    with pytest.raises(ValueError, match="^shapes must be equal"):
        clipped_surrogate(torch.zeros(4), torch.zeros(4), torch.zeros(4), 0.2, torch.ones(1))


def test_weight_metrics():
    weights = torch.tensor([0.5, 4.0, 0.25, 1.0], dtype=torch.float64)
    metrics = weight_metrics(weights, weights.clamp(max=1.0))
    assert metrics["weight_mean"] == 0.6875 and metrics["weight_max"] == 1.0
    assert metrics["weight_ess"] == pytest.approx(2.75**2 / (4 * 2.3125))
    assert metrics["log_weight_mean"] == pytest.approx(np.log([0.5, 4.0, 0.25, 1.0]).mean())
    assert weight_metrics(torch.ones(3), torch.ones(3))["weight_ess"] == 1.0
    vanished = weight_metrics(torch.tensor([0.0, torch.inf]).double(), torch.zeros(2).double())
    assert vanished["weight_ess"] == 0.0 and abs(vanished["log_weight_mean"]) < 1.0  # -708 and 710 stand in
    assert set(weight_metrics(weights[:0], weights[:0]).values()) == {None} and len(metrics) == 4
