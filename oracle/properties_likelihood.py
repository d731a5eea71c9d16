"""Properties of the log-probability, the KL, the change of measure and the weights of replayed samples."""

import math

import torch
from torch import Tensor

from oracle import gaussian
from oracle.checks import Measured
from oracle.measuring import (
    GRID,
    LEVELS,
    SINGLE,
    check,
    draw,
    exact_moments,
    flat,
    gradient,
    numbers,
    random_policy,
)

LOG_PROB = "log N = -|x_next - mean|^2/(2 step_std^2) - E/2 log(2 pi step_std^2) for E entries"
KL = "KL = |mean - mean_ref|^2/(2 step_std^2) with step_std = g sqrt(dt)"
MEASURE = "E_old[p_new/p_old f] = E_new[f]"
WEIGHT = "w = prod over the prefix of p_old/p_off (arXiv 2604.04142)"


def isotropic(x_next: Tensor, mean: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """log N(x_next; mean, std^2 I) (B,), and the size of the terms that its rounding comes from (B,)."""
    off = (x_next - mean).flatten(1)
    value = gaussian.log_density(off, torch.zeros_like(off[0]), std**2 * torch.eye(off.shape[1]).double())
    size = ((x_next.abs() + mean.abs()).flatten(1) * off.abs() / std**2).sum(1)
    return value, 1 + size + off.shape[1] * (1 + abs(math.log(std)))


# ---- gaussian_log_prob


@check("gaussian_log_prob", "value, step_std = {case}", LOG_PROB, cases=(0.375, 1.5))
def _(f, case):
    mean, z = draw(40, 5, 3), draw(41, 5, 3)
    x_next = (mean + case * z).float().double()
    value, size = isotropic(x_next, mean, case)
    return Measured(flat((f.gaussian_log_prob(x_next, mean, case), (5,))), value, size)


@check("gaussian_log_prob", "latents of {case} dimensions", LOG_PROB, cases=(3, 4, 5))
def _(f, case):
    shape = (2, 3, 2, 4, 2)[:case]
    x_next, mean = draw(42, *shape), draw(43, *shape)
    value, size = isotropic(x_next, mean, 0.75)
    return Measured(flat((f.gaussian_log_prob(x_next, mean, 0.75), (2,))), value, size)


@check("gaussian_log_prob", "gradient in the mean", "d log N/d mean = (x_next - mean)/step_std^2")
def _(f):
    x_next, mean, u = draw(44, 3, 4), draw(45, 3, 4).requires_grad_(), draw(46, 3)
    observed = gradient(f.gaussian_log_prob(x_next, mean, 0.625) * u, mean)
    expected = u[:, None] * (x_next - mean.detach()) / 0.625**2
    return Measured(observed, expected.flatten(), expected.abs().max().clamp(min=1))


@check(
    "gaussian_log_prob", "it integrates to 1, with its mean and variance, D = {case}", LOG_PROB, cases=(1, 2)
)
def _(f, case):
    axis, width = torch.linspace(-9, 9, 73, dtype=torch.float64), 0.25  # equidistant: exact for a Gaussian
    off = torch.cartesian_prod(*[axis] * case).reshape(-1, case)
    mean, std = numbers([0.5, -0.25][:case]).expand_as(off), 0.75
    density = f.gaussian_log_prob(mean + std * off, mean, std)
    mass = flat((density, (len(off),))).exp() * (width * std) ** case
    observed = torch.cat([mass.sum()[None], mass @ off, mass @ off**2])
    return Measured(observed, numbers([1.0, *[0.0] * case, *[1.0] * case]), 5.0)


@check("gaussian_log_prob", "its expectation is minus the entropy", "E[log N] = -D/2 log(2 pi e step_std^2)")
def _(f):
    z, mass = gaussian.quadrature(2, 4)
    mean = numbers([0.75, -1.5]).expand_as(z)
    observed = (mass * flat((f.gaussian_log_prob(mean + 0.3125 * z, mean, 0.3125), (16,)))).sum()
    return Measured(observed, numbers(-math.log(2 * math.pi * math.e * 0.3125**2)), 10.0)


@check("gaussian_log_prob", "a late step, step_std = 0.0078125", LOG_PROB)
def _(f):
    mean = draw(47, 4, 6)
    x_next = (mean + 2**-7 * draw(48, 4, 6)).float().double()
    value, size = isotropic(x_next, mean, 2**-7)
    return Measured(flat((f.gaussian_log_prob(x_next, mean, 2**-7), (4,))), value, size)


@check("gaussian_log_prob", "65,536 entries in float32", LOG_PROB, tolerance=SINGLE)
def _(f):
    mean, z = draw(49, 2, 16, 64, 64).float(), draw(50, 2, 16, 64, 64).float()
    x_next = mean + 0.5 * z
    off = (x_next.double() - mean.double()).flatten(1)
    value = -(off**2).sum(1) / 0.5 - 32768 * math.log(2 * math.pi * 0.25)
    return Measured(flat((f.gaussian_log_prob(x_next, mean, 0.5), (2,))), value, 1e5)


@check("gaussian_log_prob", "a state stored in 16 bits is computed in float32", LOG_PROB, tolerance=SINGLE)
def _(f):
    x_next, mean = draw(51, 3, 5).half(), draw(52, 3, 5).float()
    value, size = isotropic(x_next.double(), mean.double(), 0.625)
    return Measured(flat((f.gaussian_log_prob(x_next, mean, 0.625), (3,))), value, size)


@check("gaussian_log_prob", "log-density of {case} trajectories of a linear policy", "chain rule: the sum of "
       "the steps' log-densities", cases=LEVELS, needs=("gaussian_log_prob", "transition"))  # fmt: skip
def _(f, case):
    policy, sampler = random_policy(53, 2), gaussian.Sampler(case, LEVELS[case], (1, 4))
    steps = gaussian.chain(policy, sampler)
    states = gaussian.trajectories(steps, draw(55, 4, 2), draw(56, 4, 3, 2)).float().double()
    total, size = torch.zeros(4, dtype=torch.float64), 1.0
    for k in range(1, 4):
        v = states[:, k] @ policy.A[k].T + policy.b[k]
        mean, std = f.transition(
            states[:, k], v, GRID[k], GRID[k + 1], noise_level=LEVELS[case], sigma_clip=GRID[1], kind=case
        )
        total = total + flat((f.gaussian_log_prob(states[:, k + 1], mean, std), (4,)))
        terms = states[:, k + 1].abs() + states[:, k].abs() @ steps.M[k].abs().T + steps.c[k].abs() + 1
        size = size + float((terms**2).sum(1).max() / steps.std[k] ** 2)
    return Measured(total, gaussian.step_log_densities(steps, states).sum(1), size)


# ---- gaussian_kl


@check("gaussian_kl", "value, step_std = {case}", KL, cases=(0.0078125, 0.375, 1.5))
def _(f, case):
    mean, ref = draw(60, 5, 3), draw(61, 5, 3)
    expected = ((mean - ref) ** 2 / (2 * case**2)).sum(1)
    return Measured(flat((f.gaussian_kl(mean, ref, case), (5,))), expected, expected.max().clamp(min=1))


@check("gaussian_kl", "latents of {case} dimensions", KL, cases=(3, 4, 5))
def _(f, case):
    shape = (2, 3, 2, 4, 2)[:case]
    mean, ref = draw(62, *shape), draw(63, *shape)
    expected = ((mean - ref) ** 2).flatten(1).sum(1) / 1.125
    return Measured(flat((f.gaussian_kl(mean, ref, 0.75), (2,))), expected, expected.max())


@check("gaussian_kl", "gradient in the mean", "d KL/d mean = (mean - mean_ref)/step_std^2")
def _(f):
    mean, ref, u = draw(64, 3, 4).requires_grad_(), draw(65, 3, 4), draw(66, 3)
    observed = gradient(f.gaussian_kl(mean, ref, 0.625) * u, mean)
    expected = u[:, None] * (mean.detach() - ref) / 0.625**2
    return Measured(observed, expected.flatten(), expected.abs().max())


@check("gaussian_kl", "equal means give 0", KL)
def _(f):
    mean = draw(67, 3, 4)
    return Measured(flat((f.gaussian_kl(mean, mean, 0.5), (3,))), torch.zeros(3, dtype=torch.float64))


@check("gaussian_kl", "it is E[log p - log p_ref]", "KL = E_p[log p - log p_ref], by quadrature")
def _(f):
    z, mass = gaussian.quadrature(2, 3)
    mean, ref, std = numbers([0.5, -0.75]), numbers([1.25, 0.25]), 0.625
    cov = std**2 * torch.eye(2, dtype=torch.float64)
    x = mean + std * z
    expected = mass @ (gaussian.log_density(x, mean, cov) - gaussian.log_density(x, ref, cov))
    return Measured(flat((f.gaussian_kl(mean[None], ref[None], std), (1,))), expected[None], 10.0)


@check("gaussian_kl", "{case}: KL of a step of two policies", KL, cases=LEVELS,
       needs=("gaussian_kl", "transition"))  # fmt: skip
def _(f, case):
    x, v, v_ref, a = draw(68, 3, 4), draw(69, 3, 4), draw(70, 3, 4), LEVELS[case]
    rest = {"noise_level": a, "sigma_clip": GRID[1], "kind": case}
    observed, expected = [], []
    for sigma, after in zip(GRID[1:5], GRID[2:6], strict=True):
        mean_ref, _ = f.transition(x, v_ref, sigma, after, **rest)
        mean, std = f.transition(x, v, sigma, after, **rest)
        observed.append(flat((f.gaussian_kl(mean, mean_ref, std), (3,))))
        exact, exact_ref = (exact_moments(x, u, sigma, after, a, GRID[1], case) for u in (v, v_ref))
        expected.append((((exact - exact_ref)[0] / exact[1]) ** 2).sum(1) / 2)
    both = torch.cat(observed), torch.cat(expected)
    return Measured(*both, (1 + both[1]) * 10)


# ---- change of measure


@check("gaussian_log_prob", "{case}: change of measure", MEASURE, cases=LEVELS,
       needs=("gaussian_log_prob", "transition"))  # fmt: skip
def _(f, case):
    """Two stochastic steps in D = 1, by quadrature over both noises; f = x - x^2/2 at the end of the ODE."""
    old, new = random_policy(71, 1, 0.25), random_policy(73, 1, 0.25)
    reward = gaussian.Reward(numbers([1.0]), numbers([[-0.5]]))
    sampler = gaussian.Sampler(case, LEVELS[case], (1, 3))
    noise, mass = gaussian.quadrature(2, 60)
    x, log_ratio = numbers([[0.75]]).expand(len(noise), 1), 0.0
    for k in (1, 2):
        rest = {"noise_level": LEVELS[case], "sigma_clip": GRID[1], "kind": case}
        mean, std = f.transition(x, x * old.A[k] + old.b[k], GRID[k], GRID[k + 1], **rest)
        mean_new, std_new = f.transition(x, x * new.A[k] + new.b[k], GRID[k], GRID[k + 1], **rest)
        x_next = mean.double() + numbers(std) * noise[:, k - 1 : k]
        ratio = f.gaussian_log_prob(x_next, mean_new, std_new) - f.gaussian_log_prob(x_next, mean, std)
        x, log_ratio = x_next, log_ratio + flat((ratio, (len(noise),)))
    P, p = gaussian.completion(new, 3)
    observed = mass @ (log_ratio.exp() * reward(x @ P.T + p))
    start, still = numbers([0.75]), numbers([[0.0]])
    steps = gaussian.Chain(*(part[1:] for part in gaussian.chain(new, sampler)))
    means, covs = gaussian.moments(steps, start, still)
    return Measured(observed, gaussian.expected_reward(reward, means[-1], covs[-1]), 10.0)


# ---- sequence_weight


@check("sequence_weight", "value", WEIGHT)
def _(f):
    old, off = draw(80, 6, 4) / 2, draw(81, 6, 4) / 2
    expected = numbers([math.prod(math.exp(d) for d in row) for row in (old - off).tolist()])
    return Measured(flat((f.sequence_weight(old, off), (6,))), expected, expected.clamp(min=1))


@check("sequence_weight", "large and small weights are kept", WEIGHT)
def _(f):
    off = -4.0 - draw(82, 3, 2).abs()
    old = off + numbers([[9.0, 7.0], [-2.5, -7.0], [9.0, -8.0]])
    expected = numbers([16.0, -9.5, 1.0])
    return Measured(flat((f.sequence_weight(old, off), (3,))).log(), expected, 10.0)


@check("sequence_weight", "equal policies give exactly 1", WEIGHT, tolerance=0.0)
def _(f):
    log_prob = draw(83, 5, 3) * 8
    return Measured(flat((f.sequence_weight(log_prob, log_prob), (5,))), numbers([1.0] * 5))


@check("sequence_weight", "a prefix of one step", WEIGHT)
def _(f):
    old, off = draw(84, 4, 1), draw(85, 4, 1)
    expected = (old[:, 0] - off[:, 0]).exp()
    return Measured(flat((f.sequence_weight(old, off), (4,))), expected, expected.clamp(min=1))


@check("sequence_weight", "exact off-policy expectation, {case}", "E_off[w f] = E_old[f] (arXiv 2604.04142)",
       cases=("whole trajectory", "prefix of 2 of 3 steps", "prefix of 1 of 3 steps"))  # fmt: skip
def _(f, case):
    """D = 1, three stochastic steps, by quadrature; after the prefix the old policy samples."""
    off, old = (
        gaussian.chain(random_policy(s, 1, 0.2), gaussian.Sampler("flow", 0.75, (0, 3))) for s in (86, 88)
    )
    prefix = 3 if case == "whole trajectory" else int(case.split()[2])
    reward = gaussian.Reward(numbers([1.0]), numbers([[-0.5]]))
    start = numbers([0.5])
    mixed = gaussian.Chain(*(torch.cat([a[:prefix], b[prefix:]]) for a, b in zip(off, old, strict=True)))
    noise, mass = gaussian.quadrature(3, 30)
    states = gaussian.trajectories(mixed, start.expand(len(noise), 1), noise[..., None])
    log_old, log_off = (gaussian.step_log_densities(c, states)[:, :prefix] for c in (old, off))
    weights = flat((f.sequence_weight(log_old, log_off), (len(noise),)))
    means, covs = gaussian.moments(old, start, numbers([[0.0]]))
    observed = mass @ (weights * reward(states[:, -1]))
    return Measured(observed, gaussian.expected_reward(reward, means[-1], covs[-1]), 10.0)
