"""The samplers against closed forms, torch.distributions, and the numbers of an outside implementation."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence
from torch.testing import assert_close

from shared.sde import SAMPLERS, gaussian_kl, gaussian_log_prob, ode_step, shifted_sigmas, transition

GOLDEN = json.loads((Path(__file__).parent / "data" / "flow_grpo_step_golden.json").read_text())["cases"]
LEVELS = {"flow": 0.7, "dance": 0.3, "cps": 0.6}


def example(shape=(2, 3), dtype=torch.float64, seed=0):
    """x, v, x_next and a second velocity, of one shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4)]


def textbook_moments(x, v, sigma, sigma_next, level, clip, kind):
    """The samplers as their papers write them (math: drift from the score; cps: from x0_hat and eps_hat)."""
    dt = sigma - sigma_next
    if kind == "cps":
        std = sigma_next * math.sin(level * math.pi / 2)
        x0_hat, eps_hat = x - sigma * v, x + (1 - sigma) * v
        return (1 - sigma_next) * x0_hat + math.sqrt(sigma_next**2 - std**2) * eps_hat, std
    g = level if kind == "dance" else level * math.sqrt(sigma / (1 - (clip if sigma > clip else sigma)))
    score = -(x + (1 - sigma) * v) / sigma  # of the marginal at sigma
    return x - (v - 0.5 * g**2 * score) * dt, g * math.sqrt(dt)


def test_shifted_sigmas_closed_form():
    assert_close(
        shifted_sigmas(4), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0], dtype=torch.float64), rtol=0, atol=0
    )
    expected = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0], dtype=torch.float64)  # 3 s / (1 + 2 s)
    assert_close(shifted_sigmas(4, 3.0), expected, rtol=1e-15, atol=0)
    assert shifted_sigmas(1).tolist() == [1.0, 0.0]
    for bad in [(0, 1.0), (4, 0.0), (4, -1.0)]:
        with pytest.raises(ValueError, match="^a sigma grid needs num_steps >= 1 and shift > 0"):
            shifted_sigmas(*bad)


def test_ode_step_moves_towards_data():
    x, v, *_ = example()
    assert_close(ode_step(x, v, 0.75, 0.5), x - 0.25 * v)
    x0, eps = example()[
        :2
    ]  # on the straight path the ODE is exact: from sigma to sigma_next of the same path
    assert_close(ode_step(0.25 * x0 + 0.75 * eps, eps - x0, 0.75, 0.5), 0.5 * x0 + 0.5 * eps)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_moments_are_the_papers(kind):
    x, v, *_ = example()
    sigmas = shifted_sigmas(5, 3.0)
    for k in range(5):
        sigma, sigma_next, clip = (float(sigmas[i]) for i in (k, k + 1, 1))
        mean, std = transition(
            x, v, sigmas[k], sigmas[k + 1], noise_level=LEVELS[kind], sigma_clip=sigmas[1], kind=kind
        )
        expected_mean, expected_std = textbook_moments(x, v, sigma, sigma_next, LEVELS[kind], clip, kind)
        assert_close(mean, expected_mean, rtol=1e-12, atol=1e-12)
        assert std.shape == () and float(std) == pytest.approx(expected_std, rel=1e-12)


@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_moments_and_log_prob_are_the_outside_implementations(case):
    case = GOLDEN[case]
    x, v, x_next, mean_expected = (torch.tensor([case[name]]) for name in ("x", "v", "x_next", "mean"))
    mean, std = transition(
        x, v, case["sigma"], case["sigma_next"], noise_level=case["noise_level"],
        sigma_clip=case["sigma_clip"], kind=case["kind"],
    )  # fmt: skip
    assert_close(mean, mean_expected, rtol=1e-5, atol=1e-5)
    assert float(std) == pytest.approx(case["step_std"], rel=1e-5)
    if "log_prob_per_dim" in case:
        per_dim = gaussian_log_prob(x_next, mean, std) / x.numel()
        assert float(per_dim) == pytest.approx(case["log_prob_per_dim"], rel=1e-5)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_noise_level_zero_is_the_ode_exactly(kind):
    for dtype in (torch.float32, torch.float64):
        x, v, *_ = example(dtype=dtype)
        for sigma, sigma_next in [(1.0, 0.9), (0.6, 0.35), (0.2, 0.0)]:
            mean, std = transition(x, v, sigma, sigma_next, noise_level=0.0, sigma_clip=0.9, kind=kind)
            assert torch.equal(mean, ode_step(x, v, sigma, sigma_next)) and std == 0


@pytest.mark.parametrize("start", [1.0, 0.999999, 0.999])
def test_first_step_std_is_the_noise_level(start):
    x, v, *_ = example()
    _, std = transition(x, v, start, 0.9, noise_level=0.7, sigma_clip=0.9)
    assert float(std) == pytest.approx(0.7, rel=0.01)
    _, later = transition(x, v, 0.9, 0.8, noise_level=0.7, sigma_clip=0.9)  # no longer clipped
    assert float(later) == pytest.approx(0.7 * math.sqrt(0.9 / 0.1 * 0.1), rel=1e-12)


def exact_final_variance(kind, level, sigmas, sigma_clip):
    """Variance of the end of the chain for data N(1, 0.25) with the exact velocity, by the recursion of
    affine maps."""
    variance = 1.0
    for k in range(len(sigmas) - 1):
        s = float(sigmas[k])
        total = (1 - s) ** 2 * 0.25 + s**2  # Var x_sigma
        gain = (s - (1 - s) * 0.25) / total  # d v / d x for v = E[eps - x0 | x]
        x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        a = level if k < len(sigmas) - 2 else 0.0  # the last step is an ODE step
        mean, std = transition(x, gain * x, s, sigmas[k + 1], noise_level=a, sigma_clip=sigma_clip, kind=kind)
        variance = float(mean[1] - mean[0]) ** 2 * variance + float(std) ** 2
    return variance


def test_marginals_at_fixed_and_growing_numbers_of_steps():
    """flow and dance tend to the data's variance 0.25 like O(dt); cps does not tend to it."""
    for kind, level, expected in [("flow", 0.7, 0.2486), ("dance", 0.3, 0.2468), ("cps", 0.7, 0.1760)]:
        sigmas = shifted_sigmas(400, 3.0)
        assert exact_final_variance(kind, level, sigmas, sigmas[1]) == pytest.approx(expected, abs=7e-5)
    for kind, level in [("flow", 0.7), ("dance", 0.3)]:
        errors = [0.25 - exact_final_variance(kind, level, shifted_sigmas(n), 0.9) for n in (100, 200, 400)]
        assert all(0.9 < math.log2(a / b) < 1.1 for a, b in itertools.pairwise(errors)), errors
    assert all(exact_final_variance("cps", 0.7, shifted_sigmas(n), 0.9) < 0.19 for n in (100, 400, 1600))


def test_flow_first_step_from_pure_noise_adds_variance_on_any_grid():
    """With sigma_clip = sigma[1] the first std is a, however small dt: a^4 / 4 + O(dt) too much variance."""
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for n in (100, 10_000):
        sigmas = shifted_sigmas(n)
        mean, std = transition(x, x, 1.0, sigmas[1], noise_level=0.7, sigma_clip=sigmas[1])  # v = x - E[x0]
        variance = float(mean[1] - mean[0]) ** 2 + float(std) ** 2
        assert variance - (1 - 1 / n) ** 2 == pytest.approx(0.7**4 / 4 + 0.7**2 / n, rel=1e-6)


@pytest.mark.parametrize("shape", [(2, 5), (2, 4, 3), (2, 1, 3, 2), (2, 2, 1, 3, 2)])
def test_log_prob_is_the_density(shape):
    x, mean, x_next, _ = example(shape)
    expected = Independent(Normal(mean, 0.37), len(shape) - 1).log_prob(x_next)
    assert_close(
        gaussian_log_prob(x_next, mean, torch.tensor(0.37, dtype=torch.float64)), expected, rtol=1e-12, atol=0
    )
    assert_close(gaussian_log_prob(x_next, mean, 0.37), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 3, 2), (2, 2, 1, 3, 2)])
def test_kl_is_the_divergence(shape):
    """With the step's own std, sqrt(dt) included: the divergence of the two transitions, whatever the
    sampler."""
    x, v, _, v_ref = example(shape)
    for kind in SAMPLERS:
        mean, std = transition(x, v, 0.6, 0.35, noise_level=LEVELS[kind], sigma_clip=0.9, kind=kind)
        mean_ref, _ = transition(x, v_ref, 0.6, 0.35, noise_level=LEVELS[kind], sigma_clip=0.9, kind=kind)
        expected_mean, expected_std = textbook_moments(x, v, 0.6, 0.35, LEVELS[kind], 0.9, kind)
        expected_ref, _ = textbook_moments(x, v_ref, 0.6, 0.35, LEVELS[kind], 0.9, kind)
        step, step_ref = Normal(expected_mean, expected_std), Normal(expected_ref, expected_std)
        expected = kl_divergence(step, step_ref).flatten(1).sum(1)
        assert_close(gaussian_kl(mean, mean_ref, std), expected, rtol=1e-10, atol=0)
        assert (expected > 0).all()


def test_gradients_reach_the_velocity_only_through_the_mean():
    x, v, x_next, v_ref = example((2, 3))
    v.requires_grad_()

    def log_prob(v):
        mean, std = transition(x, v, 0.6, 0.35, noise_level=0.7, sigma_clip=0.9)
        return gaussian_log_prob(x_next, mean, std)

    def kl(v):
        mean, std = transition(x, v, 0.6, 0.35, noise_level=0.7, sigma_clip=0.9)
        return gaussian_kl(mean, transition(x, v_ref, 0.6, 0.35, noise_level=0.7, sigma_clip=0.9)[0], std)

    assert torch.autograd.gradcheck(log_prob, (v,)) and torch.autograd.gradcheck(kl, (v,))
    (gradient,) = torch.autograd.grad(log_prob(v).sum(), v)
    mean, std = textbook_moments(x, v.detach(), 0.6, 0.35, 0.7, 0.9, "flow")
    d_mean = -(0.25 + std**2 / (2 * 0.6) * (1 - 0.6))  # d mean / d v
    assert_close(gradient, (x_next - mean) / std**2 * d_mean, rtol=1e-10, atol=1e-12)


def test_sixteen_bit_latents_are_computed_in_float32():
    x, v, x_next, _ = example(dtype=torch.float32)
    x, x_next = x.bfloat16(), x_next.bfloat16()
    mean, std = transition(x, v, 0.6, 0.35, noise_level=0.7, sigma_clip=0.9)
    assert mean.dtype == std.dtype == torch.float32
    assert_close(
        mean, transition(x.float(), v, 0.6, 0.35, noise_level=0.7, sigma_clip=0.9)[0], rtol=0, atol=0
    )
    assert transition(x, v.bfloat16(), 0.6, 0.35, noise_level=0.7, sigma_clip=0.9)[0].dtype == torch.float32
    assert ode_step(x, v.bfloat16(), 0.6, 0.35).dtype == torch.float32
    log_prob = gaussian_log_prob(x_next, mean, std)
    assert log_prob.dtype == torch.float32
    assert_close(log_prob, gaussian_log_prob(x_next.float(), mean, std), rtol=0, atol=0)


@given(
    sigma=st.floats(0.01, 1),
    share=st.floats(0, 0.99),
    level=st.floats(0.01, 1),
    kind=st.sampled_from(SAMPLERS),
)
def test_moments_stay_finite_and_positive(sigma, share, level, kind):
    x, v, *_ = example()
    mean, std = transition(x, v, sigma, sigma * share, noise_level=level, sigma_clip=0.9, kind=kind)
    assert torch.isfinite(mean).all() and (std > 0 or (kind == "cps" and share == 0))


def test_bad_steps_are_refused():
    x, v, *_ = example()
    for sigma, sigma_next, level, clip, kind, message in [
        (0.5, 0.5, 0.7, 0.9, "flow", "^sigma_next must be below sigma"),
        (0.3, 0.5, 0.7, 0.9, "flow", "^sigma_next must be below sigma"),
        (1.1, 0.5, 0.7, 0.9, "flow", "^sigma_next must be below sigma"),
        (0.5, -0.1, 0.7, 0.9, "flow", "^sigma_next must be below sigma"),
        (0.5, 0.3, -0.1, 0.9, "flow", "^noise_level must be >= 0"),
        (0.5, 0.3, 1.5, 0.9, "cps", "^noise_level must be >= 0, and <= 1 for cps, not 1.5 for cps"),
        (1.0, 0.9, 0.7, 1.0, "flow", "^flow at sigma = 1 needs sigma_clip < 1, the grid's second sigma$"),
        (0.5, 0.3, 0.7, 0.9, "sde", "^unknown sampler 'sde'; known: flow, dance, cps$"),
    ]:
        with pytest.raises(ValueError, match=message):
            transition(x, v, sigma, sigma_next, noise_level=level, sigma_clip=clip, kind=kind)
    for std in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="^a log-probability needs step_std > 0"):
            gaussian_log_prob(x, x, std)
        with pytest.raises(ValueError, match="^a KL needs step_std > 0"):
            gaussian_kl(x, x, std)


def test_extreme_noise_levels_are_taken():
    x, v, *_ = example()
    for level, kind in [(1.0, "cps"), (3.0, "flow"), (3.0, "dance")]:
        mean, std = transition(x, v, 0.6, 0.35, noise_level=level, sigma_clip=0.9, kind=kind)
        expected_mean, expected_std = textbook_moments(x, v, 0.6, 0.35, level, 0.9, kind)
        assert_close(mean, expected_mean, rtol=1e-10, atol=1e-8)
        assert float(std) == pytest.approx(expected_std, rel=1e-12)
