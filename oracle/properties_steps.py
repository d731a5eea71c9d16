"""Properties of the grid, the ODE step and the stochastic steps."""

from functools import cache

import torch

from oracle import gaussian
from oracle.calling import Functions
from oracle.checks import Measured
from oracle.measuring import (
    EQUATIONS,
    GRID,
    LEVELS,
    check,
    draw,
    exact_moments,
    flat,
    gradient,
    moments_of,
    numbers,
    random_policy,
)  # fmt: skip

GUARD = "g = a sqrt(sigma/(1 - sigma)), with 1 - sigma_clip for 1 - sigma where sigma > sigma_clip"


def inner_steps(f: Functions, kind: str) -> Measured:
    """Moments at the steps between the first and the last: (steps, 2, B, E)."""
    x, v, a = draw(1, 3, 4), draw(2, 3, 4), LEVELS[kind]
    observed, expected = [], []
    for sigma, after in zip(GRID[1:5], GRID[2:6], strict=True):
        observed.append(moments_of(f, x, v, sigma, after, noise_level=a, sigma_clip=GRID[1], kind=kind))
        expected.append(exact_moments(x, v, sigma, after, a, GRID[1], kind))
    return Measured(torch.stack(observed), torch.stack(expected))


def chain_of(f: Functions, policy: gaussian.Policy, sampler: gaussian.Sampler) -> gaussian.Chain:
    """The chain that an implementation's `transition` makes of a linear policy; ODE steps are exact."""
    steps = gaussian.chain(policy, gaussian.Sampler("ode", 0.0, (0, 0)))
    M, c, std = (part.clone() for part in steps)
    sigmas = policy.sigmas.tolist()
    ones, zeros = numbers([[1.0], [0.0]]), numbers([[0.0], [1.0]])
    for k in range(*sampler.window):
        mean, deviation = f.transition(
            ones, zeros, sigmas[k], sigmas[k + 1], noise_level=sampler.noise_level, sigma_clip=sigmas[1],
            kind=sampler.kind,
        )  # fmt: skip
        on_x, on_v = mean.double().flatten().tolist()
        M[k] = on_x * torch.eye(len(M[k]), dtype=torch.float64) + on_v * policy.A[k]
        c[k] = on_v * policy.b[k]
        std[k] = numbers(deviation).flatten()[0]
    return gaussian.Chain(M, c, std)


@cache
def normal_data(num_steps: int, shift: float = 1.0) -> gaussian.Policy:
    """The exact policy for data N(1, 0.25) on the shifted grid."""
    s = torch.arange(num_steps, -1, -1, dtype=torch.float64) / num_steps
    return gaussian.data_policy(numbers([1.0]), numbers([[0.25]]), (
        shift * s / (1 + (shift - 1) * s)))  # fmt: skip


# ---- shifted_sigmas


@check("shifted_sigmas", "grid of {case}", "sigma = shift s/(1 + (shift - 1) s) (arXiv 2403.03206)",
       cases=("7 steps, no shift", "10 steps, shift 3", "6 steps, shift 0.5", "1 step, shift 3"))  # fmt: skip
def _(f, case):
    words = case.replace(",", "").split()
    num_steps, shift = int(words[0]), 1.0 if words[2] == "no" else float(words[3])
    grid = f.shifted_sigmas(num_steps, shift)
    s = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return Measured(flat((grid, (num_steps + 1,))), 1 / (1 + (1 / s.clamp(min=1e-300) - 1) / shift))


@check("shifted_sigmas", "without shift it is linear", "sigma = 1 - k/N")
def _(f):
    return Measured(flat((f.shifted_sigmas(4), (5,))), numbers([1, 0.75, 0.5, 0.25, 0]))


@check("shifted_sigmas", "it starts at 1, ends at 0 and falls", "1 = sigma[0] > ... > sigma[N] = 0")
def _(f):
    grid = f.shifted_sigmas(9, 2.5)
    observed = flat((grid[0], ()), (grid[-1], ()), ((grid[1:] < grid[:-1]).all(), ()))
    return Measured(observed, numbers([1.0, 0.0, 1.0]))


# ---- ode_step


@check("ode_step", "value", "x_next = x - v dt")
def _(f):
    x, v = draw(3, 3, 4), draw(4, 3, 4)
    return Measured(flat((f.ode_step(x, v, 0.8125, 0.625), x.shape)), (x - 0.1875 * v).flatten())


@check("ode_step", "latents of {case} dimensions", "x_next = x - v dt", cases=(3, 4, 5))
def _(f, case):
    shape = (2, 3, 2, 4, 2)[:case]
    x, v = draw(5, *shape), draw(6, *shape)
    return Measured(flat((f.ode_step(x, v, 0.5, 0.375), shape)), (x - 0.125 * v).flatten())


@check("ode_step", "gradients in x and v", "d x_next/dx = 1, d x_next/dv = -dt")
def _(f):
    x, v, u = draw(7, 2, 3).requires_grad_(), draw(8, 2, 3).requires_grad_(), draw(9, 2, 3)
    observed = gradient(f.ode_step(x, v, 0.75, 0.375) * u, x, v)
    return Measured(observed, torch.cat([u.flatten(), -0.375 * u.flatten()]))


@check("ode_step", "a straight flow arrives at its data in any grid", "v = (x - x0)/sigma leads to x0")
def _(f):
    x, x0 = draw(10, 3, 2), draw(11, 3, 2)
    for sigma, after in zip(GRID[:-1], GRID[1:], strict=True):
        x = f.ode_step(x, ((x - x0) / sigma).to(x.dtype), sigma, after)
    return Measured(flat((x, x0.shape)), x0.flatten())


@check("ode_step", "completions of a linear policy, D = {case}", "x[N] = P x[k] + p", cases=(1, 2, 4))
def _(f, case):
    policy = random_policy(12, case)
    observed, expected = [], []
    for k in (0, 2, 4):
        P, p = gaussian.completion(policy, k)
        x = start = draw(13, 3, case)
        for j in range(k, len(GRID) - 1):
            x = f.ode_step(x, x.double() @ policy.A[j].T + policy.b[j], GRID[j], GRID[j + 1])
        observed.append(flat((x, start.shape)))
        expected.append((start @ P.T + p).flatten())
    return Measured(torch.cat(observed), torch.cat(expected))


# ---- transition


@check("transition", "{case}: step_std at inner steps", EQUATIONS, cases=LEVELS)
def _(f, case):
    observed, expected, _ = inner_steps(f, case)
    return Measured(observed[:, 1], expected[:, 1])


@check("transition", "{case}: mean at inner steps", EQUATIONS, cases=LEVELS)
def _(f, case):
    observed, expected, _ = inner_steps(f, case)
    return Measured(observed[:, 0], expected[:, 0])


@check("transition", "flow: first step from sigma = {case}", GUARD, cases=(1.0, 0.999999, 0.999))
def _(f, case):
    x, v, rest = draw(16, 3, 4), draw(17, 3, 4), {"noise_level": 0.75, "sigma_clip": GRID[1], "kind": "flow"}
    expected = exact_moments(x, v, case, GRID[1], *rest.values())
    return Measured(moments_of(f, x, v, case, GRID[1], **rest), expected)


@check("transition", "{case}: first step from sigma = 1", EQUATIONS, cases=("dance", "cps"))
def _(f, case):
    x, v, a = draw(16, 3, 4), draw(17, 3, 4), LEVELS[case]
    observed = moments_of(f, x, v, 1.0, GRID[1], noise_level=a, sigma_clip=GRID[1], kind=case)
    return Measured(observed, exact_moments(x, v, 1.0, GRID[1], a, GRID[1], case))


@check("transition", "flow: step_std is noise_level at sigma = 1", "g sqrt(dt) = a sqrt(1/dt) sqrt(dt) = a")
def _(f):
    x, v, levels = draw(18, 2, 3), draw(19, 2, 3), (0.25, 0.75, 1.25)
    stds = [moments_of(f, x, v, 1.0, 0.875, noise_level=a, sigma_clip=0.875)[1, 0, 0] for a in levels]
    return Measured(torch.stack(stds), numbers(levels))


@check("transition", "{case}: noise_level = 0 is the ODE step", "mean = x - v dt and step_std = 0 at a = 0",
       cases=("flow", "dance", "cps"))  # fmt: skip
def _(f, case):
    x, v = draw(20, 3, 4), draw(21, 3, 4)
    pairs = list(zip(GRID[:5], GRID[1:6], strict=True))
    rest = {"noise_level": 0.0, "sigma_clip": GRID[1], "kind": case}
    observed = torch.stack([moments_of(f, x, v, s, after, **rest) for s, after in pairs])
    expected = torch.stack([torch.stack([x - v * (s - after), torch.zeros_like(x)]) for s, after in pairs])
    return Measured(observed, expected)


@check("transition", "cps: the step to sigma = 0 is x0_hat, without noise", EQUATIONS["cps"])
def _(f):
    x, v = draw(22, 3, 4), draw(23, 3, 4)
    observed = moments_of(f, x, v, 0.25, 0.0, noise_level=0.625, sigma_clip=GRID[1], kind="cps")
    return Measured(observed, torch.stack([x - 0.25 * v, torch.zeros_like(x)]))


@check("transition", "cps: noise_level = 1 keeps nothing of eps_hat", EQUATIONS["cps"])
def _(f):
    x, v = draw(24, 3, 4), draw(25, 3, 4)
    observed = moments_of(f, x, v, 0.5625, 0.375, noise_level=1.0, sigma_clip=GRID[1], kind="cps")
    return Measured(observed, torch.stack([0.625 * (x - 0.5625 * v), torch.full_like(x, 0.375)]), 10.0)


@check("transition", "the default kind is flow", EQUATIONS["flow"])
def _(f):
    x, v = draw(26, 3, 4), draw(27, 3, 4)
    observed = moments_of(f, x, v, 0.5625, 0.3125, noise_level=0.75, sigma_clip=GRID[1])
    return Measured(observed, exact_moments(x, v, 0.5625, 0.3125, 0.75, GRID[1], "flow"))


@check("transition", "latents of {case} dimensions", EQUATIONS["flow"], cases=(3, 4, 5))
def _(f, case):
    shape = (2, 3, 2, 4, 2)[:case]
    x, v, rest = (
        draw(28, *shape),
        draw(29, *shape),
        {"noise_level": 0.75, "sigma_clip": 0.875, "kind": "flow"},
    )
    observed = moments_of(f, x, v, 0.5, 0.375, **rest)
    return Measured(observed, exact_moments(x, v, 0.5, 0.375, *rest.values()))


@check("transition", "{case}: gradients of the mean in x and v", EQUATIONS, cases=LEVELS)
def _(f, case):
    x, v, u = draw(30, 2, 3).requires_grad_(), draw(31, 2, 3).requires_grad_(), draw(32, 2, 3)
    a = LEVELS[case]
    mean, _ = f.transition(x, v, 0.78125, 0.5625, noise_level=a, sigma_clip=GRID[1], kind=case)
    on_x, on_v, _ = gaussian.step_coefficients(0.78125, 0.5625, case, a, GRID[1])
    return Measured(gradient(mean * u, x, v), torch.cat([on_x * u.flatten(), on_v * u.flatten()]))


@check("transition", "{case}: moments of every state of a linear policy, D = 2", EQUATIONS, cases=LEVELS)
def _(f, case):
    policy, sampler = random_policy(33, 2), gaussian.Sampler(case, LEVELS[case], (1, 4))
    start = numbers([0.5, -1.0]), numbers([[1.0, 0.25], [0.25, 0.75]])
    observed = gaussian.moments(chain_of(f, policy, sampler), *start)
    expected = gaussian.moments(gaussian.chain(policy, sampler), *start)
    both = [torch.cat([part.flatten() for part in moments]) for moments in (observed, expected)]
    return Measured(*both, both[1].abs().max().clamp(min=1))


@check(
    "transition",
    "{case}: variance of N(1, 0.25) data after 400 steps",
    EQUATIONS,
    cases=LEVELS,
    quick=False,
)
def _(f, case):
    policy, level = normal_data(400, shift=3.0), 0.3 if case == "dance" else 0.7
    sampler = gaussian.Sampler(case, level, (0, 399))
    start = numbers([0.0]), numbers([[1.0]])
    observed = gaussian.moments(chain_of(f, policy, sampler), *start)[1][-1]
    expected = gaussian.moments(gaussian.chain(policy, sampler), *start)[1][-1]
    return Measured(observed, expected, 10.0)  # rounding adds up over 400 steps


@check("transition", "{case}: the error of the variance falls like dt", EQUATIONS, cases=("flow", "dance"),
       tolerance=0.15, quick=False)  # fmt: skip
def _(f, case):
    """log2 of the ratio of errors at N and 2 N steps. Stochastic steps from sigma = 1/2: `flow` has its
    singularity at 1, where the first step's error falls like dt^(a^2) only."""
    errors = []
    for num_steps in (32, 64, 128):
        sampler = gaussian.Sampler(case, 0.7, (num_steps // 2, num_steps - 1))
        start = numbers([0.0]), numbers([[1.0]])
        variance = gaussian.moments(chain_of(f, normal_data(num_steps), sampler), *start)[1][-1]
        errors.append((variance - 0.25).abs().flatten())
    errors = torch.cat(errors).clamp(min=1e-300)
    return Measured((errors[:-1] / errors[1:]).log2(), torch.ones(2, dtype=torch.float64))
