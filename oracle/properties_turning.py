"""Properties of the incremental rewards, the turning points, balancing and the step rewards."""

import itertools

import torch
from torch import Tensor

from oracle import definitions, gaussian
from oracle.calling import Functions
from oracle.checks import Measured
from oracle.measuring import GRID, LEVELS, check, draw, flat, numbers, random_policy

INCREMENT = "d[j] = R[j] - R[j-1] (arXiv 2602.06422, Eq. 7)"
TREND = "s[j-1] < 0 and s[j] > 0; j = 1: s[1] > 0 (arXiv 2602.06422, Def. 4.1)"
CONSISTENT = "Def. 4.1 and sign(d[j]) sign(R[n] - R[j]) > 0; j = 1: the latter (arXiv 2602.06422, Def. 5.1)"
TOLERANT = "sign(d) = 0 for |d| <= tolerance"
COMPLETED = "R[j] = r(P x[k] + p), the ODE completion after j stochastic steps"
RULES = {"consistent": CONSISTENT, "trend": TREND}
BALANCE = "as many turning points of r_agg > 0 as of r_agg < 0; the smallest go (arXiv 2602.06422, App. D)"
AWARD = "R[n] - R[j-1] at turning points, R[j] - R[j-1] elsewhere (arXiv 2602.06422, Eq. 7, 8)"


def patterns(n: int) -> Tensor:
    """All rewards R[0 .. n] of -1, 0 and 1: (3^(n+1), n+1)."""
    return numbers(list(itertools.product((-1, 0, 1), repeat=n + 1)))


def walks(seed: int, *shape: int) -> Tensor:
    """Rewards that wander, in steps of 1/64 so that float32 holds all differences, mostly upwards."""
    return (draw(seed, *shape).mul(64).round() / 64).cumsum(-1) + 0.25 * torch.arange(shape[-1])


# ---- incremental_rewards


@check("incremental_rewards", "value, R of {case} dimensions", INCREMENT, cases=(1, 2, 3))
def _(f, case):
    R = walks(200, *(3, 4, 6)[3 - case :])
    expected = torch.cat([(R[..., j] - R[..., j - 1])[..., None] for j in range(1, 6)], dim=-1)
    return Measured(flat((f.incremental_rewards(R), expected.shape)), expected.flatten(), 10.0)


@check("incremental_rewards", "they add up to R[n] - R[0]", INCREMENT)
def _(f):
    R = walks(201, 5, 7)
    result = f.incremental_rewards(R)
    flat((result, (5, 6)))
    return Measured(result.double().sum(-1), R[:, -1] - R[:, 0], 10.0)


@check("incremental_rewards", "one step", INCREMENT)
def _(f):
    R = walks(202, 4, 2)
    return Measured(flat((f.incremental_rewards(R), (4, 1))), R[:, 1] - R[:, 0], 10.0)


# ---- turning_points


def points(f: Functions, R: Tensor, rule: str, **options) -> Measured:
    observed = flat((f.turning_points(R, rule=rule, **options), (*R.shape[:-1], R.shape[-1] - 1)))
    return Measured(observed, lambda: definitions.turning_points(R, rule, **options).double().flatten())


@check("turning_points", "{case}: all rewards of -1, 0, 1, n up to 6", RULES, cases=RULES, tolerance=0.0)
def _(f, case):
    parts = [points(f, patterns(n), case) for n in range(1, 7)]
    return Measured(torch.cat([p.observed for p in parts]), lambda: torch.cat([p.expected() for p in parts]))


@check("turning_points", "{case}: rewards that wander, (P, G, n+1)", RULES, cases=RULES, tolerance=0.0)
def _(f, case):
    return points(f, walks(210, 4, 6, 9), case)


@check("turning_points", "{case}: one trajectory, (n+1)", RULES, cases=RULES, tolerance=0.0)
def _(f, case):
    return points(f, numbers([0.0, -1.0, 0.5, 0.25, 2.0, 1.5, 3.0]), case)


@check("turning_points", "{case}: the first step", RULES, cases=RULES, tolerance=0.0)
def _(f, case):
    result = points(f, torch.cat([patterns(3), walks(211, 40, 4)]), case)
    return Measured(result.observed.view(-1, 3)[:, 0], lambda: result.expected().view(-1, 3)[:, 0])


@check("turning_points", "{case}: the last step", RULES, cases=RULES, tolerance=0.0)
def _(f, case):
    result = points(f, torch.cat([patterns(3), walks(212, 40, 4)]), case)
    return Measured(result.observed.view(-1, 3)[:, -1], lambda: result.expected().view(-1, 3)[:, -1])


@check(
    "turning_points", "{case}: differences up to the tolerance are 0", TOLERANT, cases=RULES, tolerance=0.0
)
def _(f, case):
    return points(f, (draw(213, 60, 6) * 4).round() / 8, case, tolerance=0.25)


@check("turning_points", "{case}: R + 4, 2.5 R and -R have the same", RULES, cases=RULES, tolerance=0.0)
def _(f, case):
    R = walks(214, 30, 6)
    exact = definitions.turning_points(R, case).double().flatten()
    parts = [flat((f.turning_points(moved, rule=case), (30, 5))) for moved in (R + 4, R * 2.5, -R)]
    return Measured(torch.cat(parts), exact.repeat(3))


@check("turning_points", "equal rewards have none, {case}", "sign(0) = 0", cases=RULES, tolerance=0.0)
def _(f, case):
    return points(f, numbers([[0.5] * 5, [-2.0] * 5]), case)


@check("turning_points", "consistent and tolerance 0 are the defaults", CONSISTENT, tolerance=0.0)
def _(f):
    R = walks(215, 30, 6)
    observed = flat((f.turning_points(R), (30, 5)))
    return Measured(observed, definitions.turning_points(R, "consistent").double().flatten())


# ---- balance


def balanced(f: Functions, mask: Tensor, r_agg: Tensor) -> Measured:
    observed = flat((f.balance(mask, r_agg), mask.shape))
    return Measured(observed, definitions.balance(mask, r_agg).double().flatten())


@check("balance", "more {case} ones, (P, G, n)", BALANCE, cases=("positive", "negative"), tolerance=0.0)
def _(f, case):
    mask, r_agg = draw(220, 3, 4, 5) > -0.5, draw(221, 3, 4, 5) + (0.75 if case == "positive" else -0.75)
    return balanced(f, mask, r_agg)


@check("balance", "one side empty: all stay, {case}", BALANCE, cases=("positive", "negative"), tolerance=0.0)
def _(f, case):
    mask, size = draw(222, 3, 6) > 0, draw(223, 3, 6).abs() + 0.125
    return balanced(f, mask, torch.where(mask, 1, -1) * size * (1 if case == "positive" else -1))


@check("balance", "equally many: all stay", BALANCE, tolerance=0.0)
def _(f):
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    return balanced(f, mask, numbers([[1.0, 4.0, -2.0, 0.25], [3.0, -0.5, -8.0, 7.0]]))


@check("balance", "no turning point: none", BALANCE, tolerance=0.0)
def _(f):
    return balanced(f, torch.zeros(3, 4, dtype=torch.bool), draw(224, 3, 4))


@check("balance", "the largest of the larger side stay", BALANCE, tolerance=0.0)
def _(f):
    awards = [[0.5, -3.0, 4.0, 0.25], [8.0, 1.0, -0.125, 2.0], [3.0, 0.75, 6.0, 5.0]]
    return balanced(f, torch.ones(3, 4, dtype=torch.bool), numbers(awards))


@check("balance", "the batch is balanced as a whole, not row by row", BALANCE, tolerance=0.0)
def _(f):
    awards = [[1.0, 2.0, 3.0, 4.0], [-5.0, -6.0, -7.0, -8.0], [9.0, -0.5, 0.25, -10.0]]
    return balanced(f, torch.ones(3, 4, dtype=torch.bool), numbers(awards))


@check("balance", "of equal awards the later ones are dropped", BALANCE, tolerance=0.0)
def _(f):
    few = numbers([[1.0, 1.0, -2.0, 1.0], [2.0, -1.0, 1.0, 1.0], [1.0, -1.0, 1.0, 1.0]])
    many = (draw(225, 6, 40) + 0.5).sign() * draw(226, 6, 40).abs().ceil()
    parts = [balanced(f, torch.ones_like(awards) > 0, awards) for awards in (few, many)]
    return Measured(torch.cat([p.observed for p in parts]), torch.cat([p.expected for p in parts]))


# ---- step_rewards


def awarded(f: Functions, R: Tensor, **options) -> Measured:
    observed = flat((f.step_rewards(R, **options), (*R.shape[:-1], R.shape[-1] - 1)))
    return Measured(observed, lambda: definitions.step_rewards(R, **options).flatten(), 10.0)


@check("step_rewards", "{case}: not balanced, all rewards of -1, 0, 1", AWARD, cases=RULES, quick=False)
def _(f, case):
    return awarded(f, patterns(5), rule=case, balanced=False)


@check("step_rewards", "{case}: rewards that wander, not balanced", AWARD, cases=RULES)
def _(f, case):
    return awarded(f, walks(230, 3, 8, 8), rule=case, balanced=False)


@check("step_rewards", "{case}: rewards that wander, balanced", AWARD + ", balanced", cases=RULES)
def _(f, case):
    return awarded(f, walks(231, 3, 8, 8), rule=case, balanced=True)


@check("step_rewards", "{case}: rewards that fall, balanced", AWARD + ", balanced", cases=RULES)
def _(f, case):
    return awarded(f, -walks(232, 24, 7), rule=case, balanced=True)


@check("step_rewards", "consistent and balanced are the defaults", AWARD + ", balanced")
def _(f):
    R = walks(233, 24, 7)
    observed = flat((f.step_rewards(R), (24, 6)))
    return Measured(observed, definitions.step_rewards(R, "consistent", True).flatten(), 10.0)


@check("step_rewards", "tolerance, {case}", AWARD + "; " + TOLERANT, cases=RULES)
def _(f, case):
    return awarded(f, (draw(234, 40, 7) * 4).round() / 8, rule=case, balanced=False, tolerance=0.25)


@check("step_rewards", "a dropped turning point gets R[j] - R[j-1]", AWARD + ", balanced")
def _(f):
    """Three rising trajectories and one falling: the two smaller positive awards are dropped."""
    rises = [[0.0, 1.0, 3.0], [0.0, 0.5, 1.5], [1.0, 2.0, 6.0]]
    return awarded(f, numbers([*rises, [4.0, 3.0, 1.0]]), rule="consistent", balanced=True)


@check("step_rewards", "balancing ranks by the award R[n] - R[j-1]", AWARD + ", balanced")
def _(f):
    """The award 3 of the first trajectory (R[n] - R[0] = 2) outranks the award 2.5 of the second."""
    return awarded(
        f, numbers([[0.0, -1.0, 1.0, 2.0], [0.0, 0.5, 1.0, 2.5], [1.0, 0.0, -1.0, -4.0]]), balanced=True
    )


@check("step_rewards", "of equal awards the later ones are dropped", AWARD + ", balanced")
def _(f):
    rises = [[0.0, 1.0, 3.0], [0.0, 0.5, 3.0], [1.0, 2.0, 4.0], [0.0, 2.0, 2.5]]
    return awarded(f, numbers([*rises, [4.0, 3.0, 1.0], [4.0, 3.0, -1.0]]), balanced=True)


@check("step_rewards", "one side without turning points: all others stay", AWARD + ", balanced")
def _(f):
    return awarded(f, numbers([[0.0, 1.0, 3.0], [0.0, 0.5, 3.0], [1.0, 0.0, 4.0]]), balanced=True)


@check("step_rewards", "a constant cancels, a factor and the sign pass through", AWARD)
def _(f):
    R = walks(235, 20, 6)
    exact = definitions.step_rewards(R).flatten()
    parts = [flat((f.step_rewards(moved), (20, 5))) for moved in (R + 4, R * 2.5, -R)]
    return Measured(torch.cat(parts), torch.cat([exact, 2.5 * exact, -exact]), 30.0)


@check("step_rewards", "equal rewards give 0", AWARD)
def _(f):
    return awarded(f, numbers([[0.5] * 5, [-2.0] * 5]))


@check("step_rewards", "{case}: trajectories of a linear policy", COMPLETED, cases=LEVELS,
       needs=("step_rewards", "transition", "ode_step"))  # fmt: skip
def _(f, case):
    """Eight trajectories, D = 2, with the completions of their states, against the affine closed form."""
    policy, sampler = random_policy(236, 2), gaussian.Sampler(case, LEVELS[case], (1, 4))
    reward = gaussian.Reward(numbers([1.0, -0.5]), numbers([[0.5, 0.25], [0.0, -0.75]]))
    start, noise = draw(238, 8, 2), draw(239, 8, 3, 2)
    rest = {"noise_level": LEVELS[case], "sigma_clip": GRID[1], "kind": case}

    def velocity(x: Tensor, k: int) -> Tensor:
        return x.double() @ policy.A[k].T + policy.b[k]

    states = [f.ode_step(start, velocity(start, 0), GRID[0], GRID[1])]
    for k in range(*sampler.window):
        mean, std = f.transition(states[-1], velocity(states[-1], k), GRID[k], GRID[k + 1], **rest)
        states.append(mean.double() + numbers(std) * noise[:, k - 1])
    columns = []
    for k, x in enumerate(states, start=sampler.window[0]):
        for j in range(k, len(GRID) - 1):
            x = f.ode_step(x, velocity(x, j), GRID[j], GRID[j + 1])
        columns.append(reward(x.double()))
    observed = flat((f.step_rewards(torch.stack(columns, 1)), (8, 3)))
    exact = gaussian.trajectories(gaussian.chain(policy, sampler), start, noise)
    R = gaussian.completion_rewards(policy, exact, sampler.window, reward)
    return Measured(observed, numbers(gaussian.awarded_rewards(R.tolist())).flatten(), 10.0)
