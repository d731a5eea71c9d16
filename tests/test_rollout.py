"""Rollouts: replayed noise, one-at-a-time completions, evaluation counts, bitwise ratios."""

import pytest
import torch
from conftest import LinearPolicy
from torch.testing import assert_close

from shared.policies.digits import DigitsPolicy
from shared.prompts import load_prompts
from shared.rollout import (
    all_moments,
    log_weight_variance,
    ode_sample,
    rollout,
    sample_noise,
    step_moments,
)
from shared.sde import SAMPLERS, gaussian_log_prob, ode_step, shifted_sigmas, transition

SIGMAS = shifted_sigmas(6, 2.0)
COND = {"label": torch.tensor([0, 1, 1, 0])}
PINNED_NOISE = [-0.2872794, -1.5094985, -1.9689022]  # of sample 3 in iteration 2 of seed 1


def linear_rollout(policy, window=(1, 4), **options):
    noise = sample_noise(policy, 3, 5, range(4), window[1] - window[0] + 1)
    return noise, rollout(
        policy, noise, COND, SIGMAS, window, **{"noise_level": 0.5, "with_completions": True} | options
    )


@pytest.mark.parametrize("kind", SAMPLERS)
def test_rollout_replays_its_noise(linear_policy, kind):
    """States, log-probabilities and end, recomputed sample by sample from the noise that was handed in."""
    noise, result = linear_rollout(linear_policy, kind=kind, with_completions=False)
    for i in range(4):
        x, cond = noise[i : i + 1, 0], {"label": COND["label"][i : i + 1]}
        states, log_probs = [], []
        for k in range(6):
            v = linear_policy.velocity(x, SIGMAS[k], cond)
            if 1 <= k < 4:
                states.append(x)
                step = {"noise_level": 0.5, "sigma_clip": SIGMAS[1], "kind": kind}
                mean, std = transition(x, v, SIGMAS[k], SIGMAS[k + 1], **step)
                x = mean + std * noise[i, k]  # noise 0 started the trajectory; step k = 1 takes noise 1
                log_probs.append(gaussian_log_prob(x, mean, std))
            else:
                if k == 4:
                    states.append(x)
                x = x - v * (SIGMAS[k] - SIGMAS[k + 1])
        assert_close(result.latents[i], torch.cat(states))
        assert_close(result.log_prob[i], torch.cat(log_probs))
        assert_close(result.final[i : i + 1], x)
    assert (
        result.latents.shape == (4, 4, 3) and result.log_prob.shape == (4, 3) and result.completions is None
    )
    assert not result.latents.requires_grad


@pytest.mark.parametrize("window", [(0, 5), (1, 4), (2, 3)])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_wavefront_is_one_at_a_time(linear_policy, window, batch_size):
    _, result = linear_rollout(linear_policy, window, completion_batch_size=batch_size)
    for j in range(window[1] - window[0] + 1):
        alone = ode_sample(linear_policy, result.latents[:, j], COND, SIGMAS[window[0] + j :])
        assert_close(result.completions[:, j], alone, rtol=1e-10, atol=1e-12)
    assert torch.equal(result.completions[:, -1], result.final)


def test_baseline_shares_the_initial_noise(linear_policy):
    noise, result = linear_rollout(linear_policy, (0, 5))
    assert torch.equal(result.latents[:, 0], noise[:, 0])
    assert_close(result.completions[:, 0], ode_sample(linear_policy, noise[:, 0], COND, SIGMAS))


def test_noise_level_zero_makes_all_completions_equal(linear_policy):
    _, result = linear_rollout(linear_policy, (0, 5), noise_level=0.0)
    for j in range(6):
        assert_close(result.completions[:, j], result.final, rtol=1e-12, atol=1e-12)
    assert (result.log_prob == torch.inf).all()


def test_wavefront_counts():
    """T = 10, 9 trained steps: 10 evaluations a trajectory, 9 + .. + 1 for completions, in 10 + 9 calls."""
    policy = LinearPolicy()
    noise = sample_noise(policy, 0, 1, range(4), 10)
    plain = rollout(policy, noise, COND, shifted_sigmas(10), (0, 9), noise_level=0.7)
    assert (plain.nfe_rows, plain.nfe_calls) == (4 * 10, 10)
    policy.rows_per_call.clear()
    result = rollout(policy, noise, COND, shifted_sigmas(10), (0, 9), noise_level=0.7, with_completions=True)
    assert (result.nfe_rows, result.nfe_calls) == (4 * 55, 19)
    assert (sum(policy.rows_per_call), len(policy.rows_per_call)) == (4 * 55, 19)
    assert torch.equal(result.latents, plain.latents) and torch.equal(result.log_prob, plain.log_prob)
    policy.rows_per_call.clear()
    capped = rollout(
        policy,
        noise,
        COND,
        shifted_sigmas(10),
        (0, 9),
        noise_level=0.7,
        with_completions=True,
        completion_batch_size=8,
    )
    assert max(policy.rows_per_call) == 8 and capped.nfe_calls == len(policy.rows_per_call)
    assert_close(capped.completions, result.completions, rtol=1e-12, atol=1e-12)


def test_sample_noise_depends_on_the_sample_alone(linear_policy):
    noise = sample_noise(linear_policy, 1, 2, range(6), 3)
    assert torch.equal(sample_noise(linear_policy, 1, 2, [4, 1], 3), noise[[4, 1]])
    for other in [(2, 2, range(6)), (1, 3, range(6)), (1, 2, range(6, 12))]:
        assert not torch.isclose(sample_noise(linear_policy, *other, 3), noise).any()
    pinned = sample_noise(
        LinearPolicy(torch.float32), 1, 2, [3], 1
    )  # a resumed run draws what it would have drawn
    assert_close(pinned[0, 0], torch.tensor(PINNED_NOISE), rtol=0, atol=1e-6)
    many = sample_noise(
        linear_policy, 0, 0, range(2000), 2
    )  # 12,000 standard normals: |mean| < 5 / sqrt(12,000)
    assert abs(float(many.mean())) < 0.046 and abs(float(many.var()) - 1) < 0.065  # 5 standard errors each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_ratio_is_one_before_the_first_update(kind, dtype):
    """Bitwise: the stored state, read back, has the stored log-prob, for every sampler and storage dtype."""
    policy, sigmas = DigitsPolicy(), shifted_sigmas(10)
    prompts = load_prompts("digits")
    cond, noise = policy.encode(prompts), sample_noise(policy, 0, 1, range(10), 10)
    options = {"noise_level": 0.7, "kind": kind}
    result = rollout(
        policy, noise, cond, sigmas, (0, 9), storage_dtype=dtype, with_completions=True, **options
    )
    assert result.latents.dtype == dtype
    for j in range(9):
        x, x_next = result.latents[:, j], result.latents[:, j + 1]
        v = policy.velocity(x, sigmas[j], cond)  # with gradient, as in training
        mean, std = transition(x, v, sigmas[j], sigmas[j + 1], sigma_clip=sigmas[1], **options)
        assert torch.equal(gaussian_log_prob(x_next, mean, std), result.log_prob[:, j])
    unrounded = rollout(policy, noise, cond, sigmas, (0, 9), **options)
    assert (dtype == torch.float32) == torch.equal(unrounded.log_prob, result.log_prob)


def test_every_state_is_kept_in_the_storage_dtype():
    """Also those of ODE steps before and after the window, and of completions: rounded after each step."""
    policy = LinearPolicy(torch.float32)
    noise = sample_noise(policy, 3, 5, range(4), 4)
    options = {"noise_level": 0.5, "with_completions": True, "storage_dtype": torch.bfloat16}
    result = rollout(policy, noise, COND, SIGMAS, (1, 4), **options)
    assert {t.dtype for t in (result.latents, result.completions, result.final)} == {torch.bfloat16}
    x = noise[:, 0].bfloat16()
    for k in range(6):
        if k == 1:
            assert torch.equal(result.latents[:, 0], x)
        x = ode_step(x, policy.velocity(x, SIGMAS[k], COND), SIGMAS[k], SIGMAS[k + 1]).bfloat16()
    assert torch.equal(result.completions[:, 0], x)


@pytest.mark.parametrize("window", [(0, 5), (2, 5)])
@pytest.mark.parametrize("given", [0, 1, 2, 3])
def test_replayed_rows_follow_their_states(linear_policy, window, given):
    """Rows 3 and 1 go through given states; their ends are sampled with their own noise, and nothing else
    changes."""
    noise, plain = linear_rollout(linear_policy, window)
    states = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows, n = torch.tensor([3, 1]), window[1] - window[0]
    _, result = linear_rollout(linear_policy, window, replayed=(rows, states[:, : given + 1]))
    assert torch.equal(result.latents[rows, : given + 1], states[:, : given + 1])
    for a, b in zip(result[:4], plain[:4], strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    for j in range(n):
        x, x_next = result.latents[:, j], result.latents[:, j + 1]
        options = {"noise_level": 0.5, "kind": "flow"}
        mean, std = step_moments(linear_policy, x, window[0] + j, COND, SIGMAS, **options)
        assert_close(gaussian_log_prob(x_next, mean, std), result.log_prob[:, j], rtol=1e-12, atol=1e-12)
        if j >= given:
            assert_close(x_next, mean + std * noise[:, 1 + j], rtol=1e-12, atol=1e-12)
    assert (result.nfe_rows, result.nfe_calls) == (plain.nfe_rows, plain.nfe_calls)
    _, whole = linear_rollout(linear_policy, window, replayed=(rows, states[:, : n + 1]))
    x = whole.latents[:, -1]  # without truncation: the end is the ODE's from the last given state
    assert torch.equal(x[rows], states[:, n])
    for k in range(window[1], 6):
        x = ode_step(x, linear_policy.velocity(x, SIGMAS[k], COND), SIGMAS[k], SIGMAS[k + 1])
    assert_close(whole.final, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [(0, 5), (1, 4)])
def test_log_weight_variance_is_the_closed_form(linear_policy, window):
    """E |dv|^2 dt (1 + a^2/2)^2 (1 - sigma) / (a^2 sigma) below sigma = 1."""
    _, result = linear_rollout(linear_policy, window)
    options = {"noise_level": 0.7, "kind": "flow"}
    off = all_moments(linear_policy, result.latents, COND, SIGMAS, window, **options)
    change = 0.1 * torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        linear_policy.module.weight += change
    new = all_moments(linear_policy, result.latents, COND, SIGMAS, window, **options)
    n, a2 = window[1] - window[0], 0.49
    measured, expected = log_weight_variance(result.latents, off, new)
    assert off[0].shape == (4, n, 3) and off[1].shape == (n,) and not new[0].requires_grad
    for j, k in enumerate(range(*window)):
        x, x_next = result.latents[:, j], result.latents[:, j + 1]
        sigma, dt = float(SIGMAS[k]), float(SIGMAS[k] - SIGMAS[k + 1])
        dv2 = float(((x @ change.T * (0.5 + sigma)) ** 2).sum(1).mean())
        if sigma < 1:
            by_hand = dv2 * dt * (1 + a2 / 2) ** 2 * (1 - sigma) / (a2 * sigma)
        else:  # the score does not depend on v there, and g uses sigma_1
            by_hand = dv2 * dt * (1 - float(SIGMAS[1])) / a2
        assert float(expected[j]) == pytest.approx(by_hand, rel=1e-9)
        after, before = (torch.distributions.Normal(m[0][:, j], m[1][j]) for m in (new, off))
        log_w = (after.log_prob(x_next) - before.log_prob(x_next)).sum(1)
        V = ((after.mean - before.mean) ** 2).sum(1) / off[1][j] ** 2
        assert float(measured[j]) == pytest.approx(float(((log_w + V / 2) ** 2).mean()), rel=1e-6)


def test_measured_and_expected_variance_agree(linear_policy):
    """20,000 trajectories: each ratio within 10 %. Its standard error is below sqrt(6 / 20,000) = 1.7 % while
    E[V^2] < 3 E[V]^2, asserted: a false alarm in 10^8."""
    noise = sample_noise(linear_policy, 0, 0, range(20_000), 4)
    cond = {"label": torch.arange(20_000) % 2}
    options = {"noise_level": 0.7, "kind": "flow"}
    latents = rollout(linear_policy, noise, cond, SIGMAS, (0, 3), **options).latents
    off = all_moments(linear_policy, latents, cond, SIGMAS, (0, 3), **options)
    with torch.no_grad():
        linear_policy.module.weight += 0.3 * torch.eye(3, dtype=torch.float64)
    new = all_moments(linear_policy, latents, cond, SIGMAS, (0, 3), **options)
    measured, expected = log_weight_variance(latents, off, new)
    V = ((new[0] - off[0]) ** 2).sum(2) / off[1] ** 2  # (B, n)
    assert ((V**2).mean(0) < 3 * V.mean(0) ** 2).all()
    assert ((measured / expected - 1).abs() < 0.1).all()


def test_ode_sample_follows_the_grid(linear_policy):
    x = sample_noise(linear_policy, 0, 0, range(4), 1)[:, 0]
    expected = x
    for k in range(6):
        expected = ode_step(
            expected, linear_policy.velocity(expected, SIGMAS[k], COND), SIGMAS[k], SIGMAS[k + 1]
        )
    assert torch.equal(ode_sample(linear_policy, x, COND, SIGMAS), expected)
    assert not ode_sample(linear_policy, x, COND, SIGMAS).requires_grad


@pytest.mark.parametrize("window", [(0, 6), (2, 2), (-1, 3)])
def test_windows_that_do_not_fit_are_refused(linear_policy, window):
    noise = torch.zeros(4, max(window[1] - window[0] + 1, 1), 3)
    with pytest.raises(ValueError, match="^window .* does not fit 6 steps and noise"):
        rollout(linear_policy, noise, COND, SIGMAS, window, noise_level=0.5)


def test_noise_that_does_not_fit_the_window_is_refused(linear_policy):
    with pytest.raises(ValueError):
        rollout(linear_policy, torch.zeros(4, 4, 3), COND, SIGMAS, (0, 2), noise_level=0.5)
