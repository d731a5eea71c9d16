"""Properties of the advantages and the surrogate, and of the policy gradient that they make."""

import math

import torch
from torch import Tensor

from oracle import gaussian
from oracle.calling import Functions
from oracle.checks import Measured
from oracle.definitions import group_advantages, surrogate_gradient
from oracle.measuring import GRID, LEVELS, check, draw, flat, gradient, numbers

ADVANTAGE = "A = (r - mean_group)/(std + eps), population std, clamped to +-clamp"
BATCH = "A = (r - mean_group)/(std + eps), std over all P G rewards"
EQUAL = "r - mean_group = 0 exactly"
SURROGATE = "mean of w max(-A ratio, -A clip(ratio, 1 - c, 1 + c)) (arXiv 1707.06347, Eq. 7)"
GRADIENT = "d/d log_prob_new = -w A ratio/count, 0 where the clip is active"
ALONE = "gradient flows through log_prob_new alone"
CLIP = 0.1875
POLICY = "grad of E[surrogate] at theta = old, leave-one-out baseline, no std: -grad E[r]/n"
REGIONS = {  # name: sign of the advantage, log-ratios
    "ratio inside the clip range": ((1, -1, 1, -1), (0.125, -0.125, -0.0625, 0.0625)),
    "A > 0, ratio above the clip range: none": ((1, 1, 1, 1), (0.25, 0.5, 0.375, 1.0)),
    "A > 0, ratio below the clip range: it flows": ((1, 1, 1, 1), (-0.25, -0.5, -0.375, -1.0)),
    "A < 0, ratio above the clip range: it flows": ((-1, -1, -1, -1), (0.25, 0.5, 2.0, 1.0)),
    "A < 0, ratio below the clip range: none": ((-1, -1, -1, -1), (-0.25, -0.5, -0.375, -1.0)),
}


# ---- group_advantages


def advantages(f: Functions, rewards: Tensor, scale: float = 5.0, **options) -> Measured:
    observed = flat((f.group_advantages(rewards, **options), rewards.shape))
    return Measured(observed, group_advantages(rewards, **options).flatten(), scale)


@check("group_advantages", "std = group, rewards (P, G)", ADVANTAGE)
def _(f):
    return advantages(f, draw(100, 3, 5) + numbers([[1.0], [-2.0], [0.5]]))


@check("group_advantages", "std = group, rewards (P, G, n)", ADVANTAGE + ", each step by itself")
def _(f):
    return advantages(f, draw(101, 3, 5, 4) * numbers([1.0, 0.25, 4.0, 0.5]))


@check("group_advantages", "std = batch, rewards (P, G)", BATCH)
def _(f):
    return advantages(f, draw(102, 3, 5) * numbers([[1.0], [0.25], [3.0]]), std="batch")


@check(
    "group_advantages", "std = batch, rewards (P, G, n)", ADVANTAGE + ", std over all P G rewards of a step"
)
def _(f):
    return advantages(f, draw(103, 3, 5, 2) * numbers([1.0, 4.0]), std="batch")


@check("group_advantages", "std = none", "A = r - mean_group")
def _(f):
    return advantages(f, draw(104, 3, 5) + 1, std="none")


@check("group_advantages", "std = group is the default", ADVANTAGE)
def _(f):
    rewards = draw(105, 4, 6) * numbers([[1.0], [0.25], [3.0], [2.0]])
    observed = flat((f.group_advantages(rewards), rewards.shape))
    return Measured(observed, group_advantages(rewards, std="group").flatten(), 5.0)


@check(
    "group_advantages",
    "eps = 1e-4 is added to a small std, std = {case}",
    ADVANTAGE,
    cases=("group", "batch"),
)
def _(f, case):
    return advantages(f, draw(106, 3, 5) * numbers([[2.0**-12], [2.0**-16], [2.0**-14]]), std=case)


@check("group_advantages", "eps as given", ADVANTAGE)
def _(f):
    return advantages(f, draw(107, 3, 5), eps=0.25)


@check("group_advantages", "outliers are clamped to +-5", ADVANTAGE)
def _(f):
    rewards = draw(108, 2, 60) / 1024
    rewards[0, 7], rewards[1, 11] = 1.0, -1.0  # A = +-sqrt(59) without the clamp
    return advantages(f, rewards, 50.0)


@check("group_advantages", "clamp as given", ADVANTAGE)
def _(f):
    return advantages(f, draw(109, 3, 6), clamp=0.75)


@check("group_advantages", "a group of equal rewards gets exactly 0, std = {case}", EQUAL,
       cases=("group", "batch", "none"), tolerance=0.0)  # fmt: skip
def _(f, case):
    """Many sizes and rewards, so that a mean that is off by a rounding is among them."""
    observed = []
    for size in range(3, 14):
        values = numbers([k / 10 for k in range(1, 12)])
        rewards = torch.cat([values[:, None].expand(11, size), numbers([range(size)])])
        observed.append(
            flat((f.group_advantages(rewards, std=case), rewards.shape)).view(12, size)[:11].flatten()
        )
    observed = torch.cat(observed)
    return Measured(observed, torch.zeros_like(observed))


@check("group_advantages", "a group of one gets 0", EQUAL, tolerance=0.0)
def _(f):
    return Measured(flat((f.group_advantages(draw(110, 3, 1)), (3, 1))), numbers([0.0] * 3))


@check("group_advantages", "permuting a group permutes its advantages", ADVANTAGE)
def _(f):
    rewards, order = draw(111, 3, 6), [3, 0, 5, 1, 4, 2]
    observed = flat((f.group_advantages(rewards[:, order]), (3, 6)))
    return Measured(observed, group_advantages(rewards)[:, order].flatten(), 5.0)


@check("group_advantages", "a prompt's advantages do not depend on the others", ADVANTAGE)
def _(f):
    rewards, other = draw(112, 3, 6), draw(113, 3, 6) * 8
    other[1] = rewards[1]
    observed = flat((f.group_advantages(other)[1], (6,)))
    return Measured(observed, group_advantages(rewards)[1], 5.0)


@check("group_advantages", "shift and scale of the rewards cancel at eps = 0", ADVANTAGE)
def _(f):
    rewards = draw(114, 3, 6)
    observed = flat((f.group_advantages(rewards * 8 + 2, eps=0.0), (3, 6)))
    return Measured(observed, group_advantages(rewards, eps=0.0).flatten(), 10.0)


# ---- clipped_surrogate


def samples(seed: int, *shape: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_prob_new, log_prob_old, advantages and weights: both signs on both sides of the clip range."""
    old, A = draw(seed, *shape) - 2, draw(seed + 1, *shape)
    return old + draw(seed + 2, *shape) / 2, old, A, draw(seed + 3, *shape).abs() + 0.25


def loss_of(f: Functions, *args, **kwargs) -> Tensor:
    loss, _ = f.clipped_surrogate(*args, **kwargs)
    flat((loss, ()))
    return loss


def exact_loss(new: Tensor, old: Tensor, A: Tensor, clip: float, weights: Tensor) -> Tensor:
    """The surrogate, sample by sample."""
    total, rows = 0.0, zip(*(t.flatten().tolist() for t in (new, old, A, weights)), strict=True)
    for log_new, log_old, a, w in rows:
        ratio = math.exp(log_new - log_old)
        total += w * max(-a * ratio, -a * min(max(ratio, 1 - clip), 1 + clip))
    return numbers([total / new.numel()])


@check("clipped_surrogate", "loss, off-policy, {case}", SURROGATE, cases=("(B,)", "(B, n)"))
def _(f, case):
    new, old, A, _ = samples(120, *((12,) if case == "(B,)" else (5, 4)))
    return Measured(
        loss_of(f, new, old, A, CLIP)[None].double(), exact_loss(new, old, A, CLIP, torch.ones_like(A))
    )


@check("clipped_surrogate", "loss, advantages of up to 40 and ratios of up to 20", SURROGATE)
def _(f):
    new, old, A, _ = samples(154, 12)
    new, A = old + (new - old).clamp(-0.5, 0.5) * 6, (A * 16).clamp(-40, 40)
    exact = exact_loss(new, old, A, CLIP, torch.ones_like(A))
    return Measured(loss_of(f, new, old, A, CLIP)[None].double(), exact, 500.0)


@check("clipped_surrogate", "loss with weights, {case}", SURROGATE, cases=("(B,)", "(B, n)"))
def _(f, case):
    new, old, A, w = samples(124, *((12,) if case == "(B,)" else (5, 4)))
    observed = loss_of(f, new, old, A, CLIP, weights=w)[None].double()
    return Measured(observed, exact_loss(new, old, A, CLIP, w))


@check("clipped_surrogate", "loss at a clip range of 2^-14", SURROGATE)
def _(f):
    old, A, steps = draw(128, 8) / 16, draw(129, 8), numbers([-4, -2, -1.5, -0.5, 0.5, 1.5, 2, 4])
    new = (old + steps * 2**-14).float().double()
    observed = loss_of(f, new, old, A, 2**-14)[None].double() - loss_of(f, old, old, A, 2**-14)[None].double()
    ones = torch.ones_like(A)
    exact = exact_loss(new, old, A, 2**-14, ones) - exact_loss(old, old, A, 2**-14, ones)
    return Measured(observed * 2**14, exact * 2**14, 2.0**12)


@check("clipped_surrogate", "gradient, off-policy, clipped for both signs of A, {case}", GRADIENT,
       cases=("(B,)", "(B, n)"))  # fmt: skip
def _(f, case):
    new, old, A, _ = samples(130, *((16,) if case == "(B,)" else (6, 4)))
    observed = gradient(loss_of(f, new.requires_grad_(), old, A, CLIP), new)
    return Measured(observed, surrogate_gradient(new, old, A, CLIP, torch.ones_like(A)).flatten())


@check("clipped_surrogate", "gradient with weights", GRADIENT)
def _(f):
    new, old, A, w = samples(134, 16)
    observed = gradient(loss_of(f, new.requires_grad_(), old, A, CLIP, weights=w), new)
    return Measured(observed, surrogate_gradient(new, old, A, CLIP, w).flatten())


@check("clipped_surrogate", "gradient at ratio 1", "d/d log_prob_new = -A/count at theta = old")
def _(f):
    old, A = draw(138, 6) - 2, draw(139, 6)
    new = old.clone().requires_grad_()
    return Measured(gradient(loss_of(f, new, old, A, CLIP), new), -A / 6)


@check("clipped_surrogate", "gradient, {case}", GRADIENT, cases=REGIONS)
def _(f, case):
    signs, steps = (numbers(values) for values in REGIONS[case])
    old, A = draw(140, 4) - 2, signs * (draw(141, 4).abs() + 0.25)
    new = (old + steps).requires_grad_()
    observed = gradient(loss_of(f, new, old, A, CLIP), new)
    return Measured(observed, surrogate_gradient(new, old, A, CLIP, torch.ones_like(A)))


@check("clipped_surrogate", "no gradient flows into {case}", ALONE,
       cases=("log_prob_old", "advantages", "weights"), tolerance=0.0)  # fmt: skip
def _(f, case):
    new, old, A, w = samples(142, 12)
    held = {"log_prob_old": old, "advantages": A, "weights": w}[case].requires_grad_()
    observed = gradient(loss_of(f, new.requires_grad_(), old, A, CLIP, weights=w), held)
    return Measured(observed, torch.zeros_like(observed))


@check("clipped_surrogate", "weights of 1 change nothing", SURROGATE)
def _(f):
    new, old, A, _ = samples(146, 12)
    observed = loss_of(f, new, old, A, CLIP, weights=torch.ones_like(A))[None].double()
    return Measured(observed, exact_loss(new, old, A, CLIP, torch.ones_like(A)))


@check("clipped_surrogate", "samples of advantage 0 count in the mean", SURROGATE)
def _(f):
    new, old, A, _ = samples(150, 12)
    A[3:8] = 0.0
    observed = gradient(loss_of(f, new.requires_grad_(), old, A, CLIP), new)
    return Measured(observed, surrogate_gradient(new, old, A, CLIP, torch.ones_like(A)))


# ---- the policy gradient


@check("clipped_surrogate", "{case}: policy gradient of whole trajectories", POLICY, cases=LEVELS,
       needs=("clipped_surrogate", "gaussian_log_prob", "transition"))  # fmt: skip
def _(f, case):
    """Groups of two trajectories, D = 1, two stochastic steps after a start that is fixed, by quadrature over
    the four noises. All is polynomial in them, of degree 5 at most, so that three nodes are exact."""
    A = (draw(160, 3, 1, 1) / 2).requires_grad_()
    b = (draw(161, 3, 1) / 2).requires_grad_()
    grid, start, a = numbers([*GRID[2:5], 0.0]), numbers([[0.75]]), LEVELS[case]
    reward = gaussian.Reward(numbers([1.25]), numbers([[-0.75]]))
    noise, mass = gaussian.quadrature(4, 3)
    noise = noise.reshape(-1, 2, 2).flatten(0, 1)  # (2 groups, steps): two trajectories of a group in turn
    states, log_probs = [start.expand(len(noise), 1)], []
    for k in range(2):
        x = states[-1]
        v = x @ A[k].T + b[k]
        rest = {"noise_level": a, "sigma_clip": float(grid[1]), "kind": case}
        mean, std = f.transition(x, v, float(grid[k]), float(grid[k + 1]), **rest)
        states.append((mean + numbers(std) * noise[:, k : k + 1]).detach().double())
        log_probs.append(f.gaussian_log_prob(states[-1], mean, std))
    last = states[-1] - grid[2] * (states[-1] @ A[2].detach().T + b[2].detach())
    r = reward(last).view(-1, 2)  # (groups, 2)
    centred = (r - r.flip(1)).flatten() * mass.repeat_interleave(2) * len(mass)  # the mean then weighs groups
    log_prob = torch.stack(log_probs, 1)  # (2 groups, steps)
    loss = loss_of(f, log_prob, log_prob.detach(), centred[:, None].expand(-1, 2).to(log_prob.dtype), 0.25)
    observed = gradient(loss, A, b)
    sampler = gaussian.Sampler(case, a, (0, 2))
    exact = gaussian.reward_gradient(gaussian.Policy(A, b, grid), sampler, reward, start[0], numbers([[0.0]]))
    for part in exact:
        part[2] = 0.0  # the last step is deterministic: no log-probability
    return Measured(observed, torch.cat([-part.flatten() / 2 for part in exact]), 5.0)
