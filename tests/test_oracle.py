"""The oracle against independent means: sampling, torch.distributions, finite differences, quadrature, and
closed forms worked out by hand. A sampling test raises a false alarm with probability 1e-6, at any seed."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import definitions, gaussian
from oracle.gaussian import Chain, Policy, Reward, Sampler

torch.set_num_threads(1)
GRID = (1.0, 0.9, 0.72, 0.5, 0.27, 0.1, 0.0)
KINDS = {"flow": 0.7, "dance": 0.4, "cps": 0.6}
FALSE_ALARM = 1e-6


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def policy_of(seed, dims):
    """A linear policy without symmetries."""
    eye = 0.5 * torch.eye(dims, dtype=torch.float64)
    return Policy(0.4 * draw(seed, 6, dims, dims) + eye, 0.4 * draw(seed + 1, 6, dims), f64(GRID))


def textbook_step(x, v, sigma, sigma_next, kind, a, sigma_clip):
    """Moments of a step, written otherwise: flow and dance as dx = (v - g^2/2 score) dsigma with the score
    -(x + (1 - sigma) v)/sigma of a flow of velocity v; cps as a rotation from old noise to fresh noise."""
    if kind == "cps":
        data, noise = x - sigma * v, x + (1 - sigma) * v
        angle = a * math.pi / 2
        return (1 - sigma_next) * data + sigma_next * math.cos(angle) * noise, sigma_next * math.sin(angle)
    beside = 1 - sigma_clip if sigma > sigma_clip else 1 - sigma
    g = a * math.sqrt(sigma / beside) if kind == "flow" else a
    score = -(x + (1 - sigma) * v) / sigma
    return x + (v - g**2 / 2 * score) * (sigma_next - sigma), g * math.sqrt(sigma - sigma_next)


# ---- the sampler steps and their moments


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", range(5))
def test_step_coefficients_are_the_sde_with_its_score(kind, k):
    x, v = draw(0, 5), draw(1, 5)
    mean, std = textbook_step(x, v, GRID[k], GRID[k + 1], kind, KINDS[kind], GRID[1])
    on_x, on_v, exact = gaussian.step_coefficients(GRID[k], GRID[k + 1], kind, KINDS[kind], GRID[1])
    torch.testing.assert_close(on_x * x + on_v * v, mean, rtol=0, atol=1e-13)
    assert exact == pytest.approx(std, abs=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_no_noise_is_the_ode(kind):
    for sigma, after in zip(GRID[:-1], GRID[1:], strict=True):
        assert gaussian.step_coefficients(sigma, after, kind, 0.0, GRID[1]) == pytest.approx(
            (1.0, after - sigma, 0.0), abs=1e-15
        )


def test_first_step_has_the_noise_level_as_its_std():
    for sigma in (1.0, 0.999999, 0.999):
        std = gaussian.step_coefficients(sigma, 0.9, "flow", 0.7, 0.9)[2]
        assert std == pytest.approx(0.7 * math.sqrt(sigma / 0.1 * (sigma - 0.9)), rel=1e-12)
    assert gaussian.step_coefficients(1.0, 0.9, "flow", 0.7, 0.9)[2] == pytest.approx(0.7, rel=1e-12)


def test_data_policy_is_the_regression_of_the_velocity():
    """A and b from the exact second moments of (eps - x0, x), by quadrature over x0 and eps in D = 2."""
    mean, root = f64([1.0, -0.5]), f64([[0.6, 0.0], [0.3, 0.4]])
    policy = gaussian.data_policy(mean, root @ root.T, f64(GRID))
    z, mass = gaussian.quadrature(4, 3)
    x0, eps = mean + z[:, :2] @ root.T, z[:, 2:]
    for k, sigma in enumerate(GRID[:-1]):
        x, target = (1 - sigma) * x0 + sigma * eps, eps - x0
        ones = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        normal = (ones * mass[:, None]).T
        slope = torch.linalg.solve(normal @ ones, normal @ target)
        torch.testing.assert_close(policy.A[k], slope[:2].T, rtol=0, atol=1e-10)
        torch.testing.assert_close(policy.b[k], slope[2], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [(0, 5), (1, 4)])
def test_moments_against_sampling(kind, window):
    """All means, variances and covariances of 100,000 trajectories, as z-scores with a Bonferroni bound."""
    policy, mean, cov = policy_of(10, 2), f64([0.5, -1.0]), f64([[1.0, 0.3], [0.3, 0.6]])
    count = 100_000
    x = mean + draw(12, count, 2) @ torch.linalg.cholesky(cov).T
    means, covs = gaussian.moments(gaussian.chain(policy, Sampler(kind, KINDS[kind], window)), mean, cov)
    bound = -NormalDist().inv_cdf(FALSE_ALARM / 2 / (7 * 6))
    for k in range(7):
        error = (covs[k].diag() / count).sqrt()
        assert (((x.mean(0) - means[k]) / error).abs() < bound).all()
        off = x - means[k]
        spread = ((torch.outer(covs[k].diag(), covs[k].diag()) + covs[k] ** 2) / count).sqrt()
        assert (((off.T @ off / count - covs[k]) / spread).abs() < bound).all()
        if k < 6:
            v = x @ policy.A[k].T + policy.b[k]
            if window[0] <= k < window[1]:
                step, std = textbook_step(x, v, GRID[k], GRID[k + 1], kind, KINDS[kind], GRID[1])
                x = step + std * draw(13 + k, count, 2)
            else:
                x = x + v * (GRID[k + 1] - GRID[k])


def scalar_variance(kind, a, num_steps, shift=1.0, start=0):
    """Variance of x[N] for N(1, 0.25) data, in plain floats; stochastic steps from index start to N - 2."""
    s = [1 - k / num_steps for k in range(num_steps + 1)]
    s = [shift * x / (1 + (shift - 1) * x) for x in s]
    variance = 1.0
    for k in range(num_steps):
        slope = (s[k] - (1 - s[k]) * 0.25) / (s[k] ** 2 + (1 - s[k]) ** 2 * 0.25)
        used = kind if start <= k < num_steps - 1 else "ode"
        if used == "ode":
            scale, std = 1 + slope * (s[k + 1] - s[k]), 0.0
        else:
            scale, std = textbook_step(1.0, slope, s[k], s[k + 1], kind, a, s[1])
        variance = scale**2 * variance + std**2
    return variance


@pytest.mark.parametrize(
    ("kind", "a", "variance"), [("flow", 0.7, 0.2486), ("dance", 0.3, 0.2468), ("cps", 0.7, 0.1760)]
)
def test_variance_of_normal_data_after_400_steps(kind, a, variance):
    """On the grid of shift 3, all but the last step stochastic."""
    sigmas = definitions.shifted_sigmas(400, 3.0)
    policy = gaussian.data_policy(f64([1.0]), f64([[0.25]]), sigmas)
    means, covs = gaussian.moments(
        gaussian.chain(policy, Sampler(kind, a, (0, 399))), f64([0.0]), f64([[1.0]])
    )
    assert covs[-1].item() == pytest.approx(variance, abs=5e-5)
    assert covs[-1].item() == pytest.approx(scalar_variance(kind, a, 400, shift=3.0), rel=1e-11)
    assert means[-1].item() == pytest.approx(1.0, abs=1e-12)


def slopes(kind, a, num_steps, start):
    errors = [
        abs(scalar_variance(kind, a, N, start=int(start * N)) - 0.25)
        for N in (num_steps, 2 * num_steps, 4 * num_steps)
    ]
    return [math.log2(errors[i] / errors[i + 1]) for i in (0, 1)]


def test_flow_and_dance_keep_the_marginals():
    """The error falls like dt: for dance from any start, for flow if stochastic steps start below 1."""
    assert slopes("dance", 0.7, 400, 0) == pytest.approx([1, 1], abs=0.01)
    assert slopes("flow", 0.7, 400, 0.5) == pytest.approx([1, 1], abs=0.02)
    assert max(slopes("cps", 0.7, 400, 0)) < 0.05  # it tends to 0.181, not to 0.25
    assert scalar_variance("cps", 0.7, 20_000) == pytest.approx(0.1814, abs=1e-3)


def test_flow_from_sigma_1_converges_like_a_power_a_squared():
    """The guarded first step has std a on any grid, and adds a^4/4 to the variance 1; what follows reduces
    this by dt^(a^2). So below a = 1 the order is a^2, not 1."""
    for num_steps in (10, 1000):
        dt = 1 / num_steps
        on_x, on_v, std = gaussian.step_coefficients(1.0, 1 - dt, "flow", 0.5, 1 - dt)
        assert (on_x + on_v) ** 2 + std**2 == pytest.approx(1 + 0.5**4 / 4, abs=3 * dt)  # A = 1 at sigma = 1
    assert slopes("flow", 0.5, 25_600, 0) == pytest.approx([0.25, 0.25], abs=0.02)
    assert slopes("flow", 0.7, 25_600, 0) == pytest.approx([0.49, 0.49], abs=0.03)


# ---- densities, rewards and gradients


def test_log_density_against_torch():
    mean, cov, x = (
        f64([0.5, -1.0, 2.0]),
        f64([[2.0, 0.3, 0.1], [0.3, 1.0, -0.2], [0.1, -0.2, 0.5]]),
        draw(20, 7, 3),
    )
    exact = torch.distributions.MultivariateNormal(mean, cov).log_prob(x)
    torch.testing.assert_close(gaussian.log_density(x, mean, cov), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_step_log_densities_against_torch(kind):
    policy, a = policy_of(21, 3), KINDS[kind]
    steps = gaussian.chain(policy, Sampler(kind, a, (1, 4)))
    states = gaussian.trajectories(steps, draw(23, 5, 3), draw(24, 5, 3, 3))
    found = gaussian.step_log_densities(steps, states)
    assert found.shape == (5, 3)
    for column, k in enumerate(range(1, 4)):
        x = states[:, k]
        v = x @ policy.A[k].T + policy.b[k]
        mean, std = textbook_step(x, v, GRID[k], GRID[k + 1], kind, a, GRID[1])
        exact = torch.distributions.Normal(mean, std).log_prob(states[:, k + 1]).sum(1)
        torch.testing.assert_close(found[:, column], exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["flow", "dance"])
def test_density_of_the_end_is_the_marginal_of_the_chain(kind):
    """log p(x[N]), D = 1: the last transition integrated over the state before."""
    steps = gaussian.chain(policy_of(25, 1), Sampler(kind, KINDS[kind], (0, 6)))
    start, cov, x = f64([0.5]), f64([[0.8]]), f64([[-0.5], [0.2], [1.0]])
    means, covs = gaussian.moments(steps, start, cov)
    z = torch.linspace(-9, 9, 6001, dtype=torch.float64)[:, None]  # equidistant: exact for a Gaussian
    mass = torch.distributions.Normal(0, 1).log_prob(z[:, 0]).exp() * (18 / 6000)
    before = means[-2] + z * covs[-2, 0].sqrt()
    last = Chain(*(part[-1:] for part in steps))
    for value, exact in zip(x, gaussian.log_density(x, means[-1], covs[-1]).tolist(), strict=True):
        states = torch.stack([before, value.expand_as(before)], dim=1)
        density = mass @ gaussian.step_log_densities(last, states)[:, 0].exp()
        assert density.log().item() == pytest.approx(exact, abs=1e-9)


def test_quadrature_moments():
    z, mass = gaussian.quadrature(2, 4)
    assert mass.sum().item() == pytest.approx(1, abs=1e-14)
    assert (mass * z[:, 0] ** 6 * z[:, 1] ** 4).sum().item() == pytest.approx(15 * 3, rel=1e-12)
    assert (mass * z[:, 0] ** 3 * z[:, 1]).sum().item() == pytest.approx(0, abs=1e-12)


REWARD = Reward(f64([1.0, -0.5]), f64([[0.5, 0.25], [0.0, -0.75]]))


@pytest.mark.parametrize("kind", KINDS)
def test_expected_reward_and_its_gradient(kind):
    """Against quadrature over all noise, and central differences of that, in every entry of A and b."""
    policy, sampler = policy_of(30, 2), Sampler(kind, KINDS[kind], (1, 3))
    mean, cov = f64([0.5, -1.0]), f64([[1.0, 0.3], [0.3, 0.6]])
    z, mass = gaussian.quadrature(6, 2)  # degree 2 in each: exact
    start, noise = mean + z[:, :2] @ torch.linalg.cholesky(cov).T, z[:, 2:].unflatten(1, (2, 2))

    def average(A, b):
        states = gaussian.trajectories(gaussian.chain(Policy(A, b, f64(GRID)), sampler), start, noise)
        return (mass @ REWARD(states[:, -1])).item()

    means, covs = gaussian.moments(gaussian.chain(policy, sampler), mean, cov)
    expected = gaussian.expected_reward(REWARD, means[-1], covs[-1]).item()
    assert expected == pytest.approx(average(policy.A, policy.b), abs=1e-11)
    for part, exact in zip((0, 1), gaussian.reward_gradient(policy, sampler, REWARD, mean, cov), strict=True):
        for place in itertools.product(*map(range, exact.shape)):
            sides = []
            for sign in (1, -1):
                moved = [policy.A.clone(), policy.b.clone()]
                moved[part][place] += sign * 1e-4
                sides.append(average(*moved))
            assert (sides[0] - sides[1]) / 2e-4 == pytest.approx(exact[place].item(), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [1, 2])
def test_reweighting_is_exact_with_and_without_truncation(kind, dims):
    """E_off[w f] = E_old[f] for every prefix, and not without the weight."""
    n = 3 if dims == 1 else 2
    sampler = Sampler(kind, KINDS[kind], (0, n))
    old, off = (gaussian.chain(policy_of(seed, dims), sampler) for seed in (40, 42))
    off = Chain(
        *(0.8 * a + 0.2 * b if name == "M" else a for name, a, b in zip(off._fields, old, off, strict=True))
    )
    reward = Reward(REWARD.linear[:dims], REWARD.quadratic[:dims, :dims])
    start = f64([0.5, -1.0][:dims])
    means, covs = gaussian.moments(old, start, torch.zeros(dims, dims, dtype=torch.float64))
    exact = gaussian.expected_reward(reward, means[-1], covs[-1]).item()
    nodes = 30 if dims == 1 else 16
    for prefix in range(n + 1):
        found = gaussian.reweighted(lambda s: reward(s[:, -1]), off, old, prefix, start, nodes).item()
        assert found == pytest.approx(exact, abs=1e-7)
    means, covs = gaussian.moments(off, start, torch.zeros(dims, dims, dtype=torch.float64))
    assert abs(gaussian.expected_reward(reward, means[-1], covs[-1]).item() - exact) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_log_weight_variance_against_quadrature(kind):
    sampler = Sampler(kind, KINDS[kind], (0, 3))
    old, off = (gaussian.chain(policy_of(seed, 1), sampler) for seed in (44, 46))
    found = gaussian.log_weight_variance(off, old, f64([0.5]), f64([[0.8]]))
    z, mass = gaussian.quadrature(4, 5)  # a polynomial of degree 4 in each noise, squared
    states = gaussian.trajectories(off, 0.5 + z[:, :1] * math.sqrt(0.8), z[:, 1:, None])
    log_w = gaussian.step_log_densities(old, states) - gaussian.step_log_densities(off, states)
    exact = mass @ log_w**2 - (mass @ log_w) ** 2
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_log_weight_variance_grows_without_bound_towards_the_data():
    """Two policies that differ by a constant in v: (dt/std)^2 at each step, 1/sigma for flow."""
    sigmas = torch.linspace(1, 0, 1001, dtype=torch.float64)
    one = gaussian.data_policy(f64([1.0]), f64([[0.25]]), sigmas)
    chains = [
        gaussian.chain(Policy(one.A, one.b + shift, sigmas), Sampler("flow", 0.7, (0, 999)))
        for shift in (0, 0.1)
    ]
    variance = gaussian.log_weight_variance(*chains, f64([0.0]), f64([[1.0]]))
    assert (variance[200:].diff() > 0).all()
    assert variance[998] / variance[500] > 100


@pytest.mark.parametrize("kind", KINDS)
def test_completions_and_their_rewards(kind):
    """Against one ODE step after the other; R[n] is the reward of the trajectory's own end."""
    policy, window = policy_of(50, 2), (1, 4)
    steps = gaussian.chain(policy, Sampler(kind, KINDS[kind], window))
    states = gaussian.trajectories(steps, draw(52, 6, 2), draw(53, 6, 3, 2))
    R = gaussian.completion_rewards(policy, states, window, REWARD)
    assert R.shape == (6, 4)
    for j, k in enumerate(range(1, 5)):
        x = states[:, k]
        for i in range(k, 6):
            x = x + (x @ policy.A[i].T + policy.b[i]) * (GRID[i + 1] - GRID[i])
        exact = x @ REWARD.linear + ((x @ REWARD.quadratic) * x).sum(1)
        torch.testing.assert_close(R[:, j], exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(R[:, -1], REWARD(states[:, -1]), rtol=0, atol=1e-12)


# ---- turning points and the other definitions


def test_turning_points_by_hand():
    """Worked out from the definitions, step by step."""
    cases = [  # R, trend, consistent
        ([0, -1, 1, 0.5, 2], [0, 1, 0, 1], [0, 1, 0, 0]),  # trend +: -, +, -, +; nothing follows the last
        ([0, 1, 2], [1, 0], [1, 0]),  # the first step starts the trend and goes on
        ([0, 3, 2], [1, 0], [0, 0]),  # the first step overshoots: what follows turns back
        ([0, -1, 3, 2], [0, 1, 0], [0, 0, 0]),  # the turn overshoots
        ([0, 1, -2], [0, 1], [0, 0]),  # a falling trend
        ([2, 3, 1, 0], [0, 1, 0], [0, 1, 0]),
        ([0, -1, -1, 1], [0, 0, 0], [0, 0, 0]),  # a flat step between: no turn
        ([1, 0, 2, 1], [0, 0, 0], [0, 0, 0]),  # no trend under either rule after the first step
        ([1, 0, -1, 1], [0, 0, 0], [0, 0, 0]),
        ([1, 2, 3, 1], [0, 0, 0], [0, 0, 0]),
        ([0.5, 0.5], [0], [0]),
    ]
    for R, trend, consistent in cases:
        for rule, exact in (("trend", trend), ("consistent", consistent)):
            found = [gaussian.is_turning_point(R, j, rule) for j in range(1, len(R))]
            assert found == [bool(e) for e in exact], (R, rule)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-8, 8), min_size=2, max_size=9), st.sampled_from(["consistent", "trend"]))
def test_turning_point_invariances(R, rule):
    n = len(R) - 1
    points = [gaussian.is_turning_point(R, j, rule) for j in range(1, n + 1)]
    for moved in ([r + 5 for r in R], [3 * r for r in R], [-r for r in R]):
        assert points == [gaussian.is_turning_point(moved, j, rule) for j in range(1, n + 1)]
    rewards = gaussian.awarded_rewards([R], rule, balanced=False)[0]
    for j in range(1, n + 1):
        assert rewards[j - 1] == (R[n] - R[j - 1] if points[j - 1] else R[j] - R[j - 1])
        if rule == "consistent" and points[j - 1]:
            assert j < n and abs(R[n] - R[j - 1]) > abs(R[j] - R[j - 1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(-4, 4).filter(bool)), min_size=1, max_size=12))
def test_balancing(entries):
    """As many of each sign, none larger dropped than kept, all kept where one side is empty."""
    points, awards = [p for p, _ in entries], [a for _, a in entries]
    kept = gaussian.balanced_points(points, awards)
    sides = [
        [i for i, a in enumerate(awards) if points[i] and (a > 0) == positive] for positive in (True, False)
    ]
    counts = [sum(kept[i] for i in side) for side in sides]
    assert not any(k and not p for k, p in zip(kept, points, strict=True))
    assert counts == ([min(map(len, sides))] * 2 if all(sides) else list(map(len, sides)))
    for side in sides:
        for dropped, stays in itertools.product(side, side):
            if not kept[dropped] and kept[stays]:
                assert (abs(awards[stays]), -stays) > (abs(awards[dropped]), -dropped)


def test_definitions_against_numpy_and_torch():
    rewards = draw(60, 3, 7)
    r = rewards.numpy()
    exact = (r - r.mean(1, keepdims=True)) / (np.std(r, axis=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(definitions.group_advantages(rewards), np.clip(exact, -5, 5), atol=1e-12)
    exact = (r - r.mean(1, keepdims=True)) / (np.std(r) + 1e-4)
    np.testing.assert_allclose(definitions.group_advantages(rewards, std="batch"), exact, atol=1e-12)
    x, mean, ref = draw(61, 4, 2, 3), draw(62, 4, 2, 3), draw(63, 4, 2, 3)
    p, q = torch.distributions.Normal(mean, 0.6), torch.distributions.Normal(ref, 0.6)
    exact = p.log_prob(x).sum((1, 2))
    torch.testing.assert_close(definitions.gaussian_log_prob(x, mean, 0.6), exact, rtol=0, atol=1e-12)
    exact = torch.distributions.kl_divergence(p, q).sum((1, 2))
    torch.testing.assert_close(definitions.gaussian_kl(mean, ref, 0.6), exact, rtol=0, atol=1e-12)
    old, off = draw(64, 5, 3), draw(65, 5, 3)
    np.testing.assert_allclose(
        definitions.sequence_weight(old, off), np.exp((old - off).numpy().sum(1)), rtol=1e-12
    )


def test_surrogate_gradient_against_finite_differences():
    """Of the loss as PPO writes it, min(A ratio, A clip(ratio)), with clipping active for both signs."""
    old, A, w = draw(70, 40), draw(71, 40), draw(72, 40).abs() + 0.2
    new = old + 0.5 * draw(73, 40)
    ratio = (new - old).exp()
    assert all(((A * s > 0) & ((ratio - 1) * t > 0.2)).any() for s in (1, -1) for t in (1, -1))

    def loss(values):
        r = (values - old).exp()
        return -(w * torch.minimum(A * r, A * r.clamp(0.8, 1.2))).mean()

    gradient = definitions.surrogate_gradient(new, old, A, 0.2, w)
    for i in range(40):
        change = torch.zeros(40, dtype=torch.float64)
        change[i] = 1e-6
        assert (loss(new + change) - loss(new - change)).item() / 2e-6 == pytest.approx(
            gradient[i].item(), abs=1e-8
        )
    leaf = new.clone().requires_grad_()
    value, _ = definitions.clipped_surrogate(leaf, old, A, 0.2, w)
    torch.testing.assert_close(torch.autograd.grad(value, leaf)[0], gradient, rtol=0, atol=1e-13)
    assert value.item() == pytest.approx(loss(new).item(), abs=1e-13)
