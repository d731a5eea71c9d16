"""Properties of replayed samples: the gradient that weights and surrogate make together, and the log-weight.

`off` sampled the stored trajectory, of which a prefix is replayed; `old`, the policy at the start of the
iteration, samples the rest anew; `theta` is optimised.
"""

import math
from functools import cache

import torch
from torch import Tensor

from oracle import gaussian
from oracle.calling import Functions
from oracle.checks import Measured
from oracle.definitions import Replay, clipped_surrogate, surrogate_gradient
from oracle.measuring import GRID, LEVELS, check, draw, exact_moments, flat, gradient, numbers

AT_OLD = "-grad E_off[w surrogate] at theta = old is grad E_old[f]/n (arXiv 2604.04142)"
AWAY = "-grad E_off[w surrogate] = grad E_old[sum over steps of p_theta/p_old f]/n where nothing is clipped"
CLIPPED = "E_off[w max(-A ratio, -A clip(ratio))] = E_old[the same], ratio = p_theta/p_old"
SPREAD = "Var[log p_old - log p_off | x] = |dv|^2 "
VARIANCE = {
    "flow": SPREAD
    + "dt (1 + a^2 (1 - s)/(2 r))^2 r/(a^2 s), r = 1 - s, or 1 - sigma_clip where s > sigma_clip; "
    "the mean is -Var/2",
    "dance": SPREAD + "dt (1 + a^2 (1 - s)/(2 s))^2/a^2; the mean is -Var/2",
    "cps": SPREAD + "(s (1 - s') - (1 - s) s' cos(a pi/2))^2/(s' sin(a pi/2))^2; the mean is -Var/2",
}
PREFIXES = {"whole trajectory": 3, "prefix of 2 of 3 steps": 2, "prefix of 1 of 3 steps": 1}
WIDE = 2.0**40  # a clip range that no ratio leaves
NODES = 10
REWARD = gaussian.Reward(numbers([1.25]), numbers([[-0.75]]))
START = numbers([0.5])


def near(policy: gaussian.Policy, seed: int) -> gaussian.Policy:
    """Another policy, near enough for the weights' expectations to converge at NODES nodes."""
    return policy._replace(
        A=policy.A + draw(seed, *policy.A.shape) / 16, b=policy.b + draw(seed + 1, *policy.b.shape) / 2
    )


def policy_on(sigmas: list[float], seed: int) -> gaussian.Policy:
    N = len(sigmas) - 1
    return gaussian.Policy(draw(seed, N, 1, 1) / 4 + 0.5, draw(seed + 1, N, 1) / 2, numbers(sigmas))


SIGMAS = [GRID[0], *GRID[2:5], 0.0]
SAMPLER = gaussian.Sampler("flow", 0.75, (0, 3))
OLD = policy_on(SIGMAS, 170)
OFF, THETA = near(OLD, 172), near(OLD, 174)


def loss_of(f: Functions, replay: Replay) -> Tensor:
    loss = f.composed(f, replay)
    flat((loss, ()))
    return loss


def policy_gradient(policy: gaussian.Policy, sampler: gaussian.Sampler) -> Tensor:
    """The exact gradient of E[REWARD] in A and b, 0 for the last step: it is deterministic, not trained."""
    parts = gaussian.reward_gradient(policy, sampler, REWARD, START, numbers([[0.0]]))
    return torch.cat([torch.cat([part[:-1], 0 * part[-1:]]).flatten() for part in parts])


@cache
def replayed(away: bool, prefix: int) -> tuple[Replay, list[Tensor]]:
    """Samples of three stochastic steps in D = 1 from a fixed start, with quadrature over their noise: theta
    is away from the old policy or equal to it. Also returns theta's A and b, which log_new depends on."""
    theta = THETA if away else OLD
    theta = theta._replace(A=theta.A.clone().requires_grad_(), b=theta.b.clone().requires_grad_())
    new, old, off = (gaussian.chain(policy, SAMPLER) for policy in (theta, OLD, OFF))
    mixed = gaussian.Chain(*(torch.cat([a[:prefix], b[prefix:]]) for a, b in zip(off, old, strict=True)))
    noise, mass = gaussian.quadrature(3, NODES)
    states = gaussian.trajectories(mixed, START.expand(len(noise), 1), noise[..., None])
    logs = [gaussian.step_log_densities(steps, states) for steps in (new, old, off)]
    A = REWARD(states[:, -1]) * mass * len(mass)  # the mean over the samples then is the expectation
    return Replay(*logs, prefix, A, WIDE), [theta.A, theta.b]


def replayed_gradient(f: Functions, away: bool, prefix: int) -> Tensor:
    """Minus the gradient of the `replayed` samples' loss in theta's A and b, times the number of steps."""
    replay, leaves = replayed(away, prefix)
    log_new = replay.log_new.detach().requires_grad_()
    slope = gradient(loss_of(f, replay._replace(log_new=log_new)), log_new).view_as(log_new)
    parts = torch.autograd.grad(replay.log_new, leaves, slope, retain_graph=True)
    return -3 * torch.cat([part.flatten() for part in parts])


@check("sequence_weight", "policy gradient of replayed samples, {case}", AT_OLD, cases=PREFIXES,
       needs=("sequence_weight", "clipped_surrogate"))  # fmt: skip
def _(f, case):
    return Measured(replayed_gradient(f, False, PREFIXES[case]), lambda: policy_gradient(OLD, SAMPLER), 10.0)


@check("sequence_weight", "gradient away from the old policy, {case}", AWAY, cases=PREFIXES,
       needs=("sequence_weight", "clipped_surrogate"))  # fmt: skip
def _(f, case):
    def exact() -> Tensor:
        parts = gaussian.ratio_gradient(THETA, OLD, SAMPLER, REWARD, START, numbers([[0.0]]))
        return torch.cat([part.flatten() for part in parts])

    return Measured(replayed_gradient(f, True, PREFIXES[case]), exact, 10.0)


@check("sequence_weight", "loss and gradient where the clip bites, {case}", CLIPPED, cases=PREFIXES,
       needs=("sequence_weight", "clipped_surrogate"))  # fmt: skip
def _(f, case):
    """All 27 trajectories of three steps with three outcomes each, that depend on the outcome before."""
    prefix, clip, paths = PREFIXES[case], 0.1875, torch.cartesian_prod(*[torch.arange(3)] * 3)
    before = torch.cat([torch.zeros_like(paths[:, :1]), paths[:, :-1]], 1)

    def log_probs(table: Tensor) -> Tensor:
        return table.log_softmax(-1)[torch.arange(3), before, paths]

    logits, A = draw(176, 3, 3, 3) / 2, draw(178, 27)
    theta = (logits + draw(177, 3, 3, 3) / 2).requires_grad_()
    old, off = log_probs(logits), log_probs(logits + draw(179, 3, 3, 3) / 2)
    mass = torch.cat([off[:, :prefix], old[:, prefix:]], 1).sum(1).exp()
    loss = loss_of(f, Replay(log_probs(theta), old, off, prefix, A * mass * 27, clip))
    observed = torch.cat([loss.detach()[None].double(), gradient(loss, theta)])
    new, A = log_probs(theta), (A * old.sum(1).exp() * 27)[:, None].expand(27, 3)
    slope = surrogate_gradient(new, old, A, clip, torch.ones_like(A))
    exact, _ = clipped_surrogate(new.detach(), old, A, clip)
    return Measured(observed, torch.cat([exact[None], gradient(new * slope, theta)]), 5.0)


@check("sequence_weight", "{case}: policy gradient of samples replayed for 1 of 2 steps", AT_OLD,
       cases=LEVELS,
       needs=("sequence_weight", "clipped_surrogate", "gaussian_log_prob", "transition"))  # fmt: skip
def _(f, case):
    """D = 1, two stochastic steps after a fixed start; the implementation samples and scores them."""
    sigmas = [*GRID[2:5], 0.0]
    old = policy_on(sigmas, 180)
    off, A, b = near(old, 182), old.A.clone().requires_grad_(), old.b.clone().requires_grad_()
    rest = {"noise_level": LEVELS[case], "sigma_clip": sigmas[1], "kind": case}
    noise, mass = gaussian.quadrature(2, NODES)
    x, new, stored = START.expand(len(noise), 1), [], []
    for k in (0, 1):
        mean, std = f.transition(x, x @ A[k].T + b[k], sigmas[k], sigmas[k + 1], **rest)
        mean_off, _ = f.transition(x, x @ off.A[k].T + off.b[k], sigmas[k], sigmas[k + 1], **rest)
        drawn = mean_off if k == 0 else mean
        x = (drawn.detach() + numbers(std) * noise[:, k : k + 1]).double()
        for logs, at in ((new, mean), (stored, mean_off)):
            logs.append(flat((f.gaussian_log_prob(x, at, std), (len(x),))))
    new, stored = torch.stack(new, 1), torch.stack(stored, 1)
    value = REWARD(x - sigmas[2] * (x @ old.A[2].T + old.b[2])) * mass * len(mass)
    observed = -2 * gradient(loss_of(f, Replay(new, new.detach(), stored, 1, value, 0.25)), A, b)
    sampler = gaussian.Sampler(case, LEVELS[case], (0, 2))
    return Measured(observed, lambda: policy_gradient(old, sampler), 10.0)


# ---- the variance of the log-weight


def log_weight_variance(kind: str, a: float, sigma: float, after: float, clip: float) -> float:
    """Var[log p_old(x'|x) - log p_off(x'|x)] at a given x, x' drawn by off, for velocities with |dv| = 1.

    The two means differ by c dv and the std is the same, so the log-weight is z (c dv)/std - |c dv|^2/(2
    std^2) with z ~ N(0, I): variance (c |dv|/std)^2, mean minus half of it. With G = g^2/(2 s), c is -dt (1 +
    G (1 - s)) and std g sqrt(dt) for flow and dance. For flow that is |dv|^2 dt (1 + a^2/2)^2 (1 - s)/(a^2 s)
    at an unguarded step, and |dv|^2 dt (1 - sigma_clip)/a^2 at s = 1, where v alone moves the mean.
    """
    if kind == "cps":
        turn = a * math.pi / 2
        return ((sigma * (1 - after) - (1 - sigma) * after * math.cos(turn)) / (after * math.sin(turn))) ** 2
    beside = 1 - min(sigma, clip)
    g2 = a**2 * (sigma / beside if kind == "flow" else 1.0)
    return (sigma - after) * (1 + g2 * (1 - sigma) / (2 * sigma)) ** 2 / g2


@check("gaussian_log_prob", "{case}: mean and variance of a step's log-weight", VARIANCE, cases=LEVELS,
       needs=("gaussian_log_prob", "transition"))  # fmt: skip
def _(f, case):
    """D = 2, from sigma = 1 to the last but one step, by quadrature over the noise."""
    a, clip = LEVELS[case], GRID[1]
    x, v, dv = draw(184, 2), draw(185, 2), draw(186, 2)
    rest = {"noise_level": a, "sigma_clip": clip, "kind": case}
    z, mass = gaussian.quadrature(2, 3)  # the log-weight is linear in the noise: exact
    observed, expected = [], []
    for sigma, after in zip(GRID[:5], GRID[1:6], strict=True):
        at = x.expand_as(z)
        mean, std = f.transition(at, (v + dv).expand_as(z), sigma, after, **rest)
        mean_off, _ = f.transition(at, v.expand_as(z), sigma, after, **rest)
        exact = exact_moments(at, v.expand_as(z), sigma, after, a, clip, case)
        x_next = exact[0] + exact[1] * z
        log_old, log_off = (flat((f.gaussian_log_prob(x_next, m, std), (9,))) for m in (mean, mean_off))
        log_w = log_old - log_off
        average = mass @ log_w
        observed += [average, mass @ log_w**2 - average**2]
        variance = float(dv @ dv) * log_weight_variance(case, a, sigma, after, clip)
        expected += [-variance / 2, variance]
    expected = numbers(expected)
    return Measured(torch.stack(observed), expected, 10 * (1 + expected.abs()))
