"""Properties of the Monte Carlo ratio, of the aggregation over tokens, and of the KL of posteriors. Draws are
enumerated: all of them, with their probabilities.
"""

import itertools
from functools import cache

import torch
from torch import Tensor

from oracle import chain
from oracle.calling import Functions
from oracle.chain import Step
from oracle.checks import Measured, Mismatch
from oracle.definitions_discrete import posterior_kl
from oracle.measuring import check, draw, flat, gradient, numbers
from oracle.properties_paths import SHORT, H, T, build
from oracle.properties_transition import CASES, LENT, SLOPE, joint, logits_of, table

ESTIMATE = "r = sum_j q_j p_new(X_j)/p_old(X_j) / sum_j q_j, q_j = q(y | x, X_j)"
UNBIASED = "E[r | x, y] = p_new(y | x)/p_old(y | x), X_1 ~ p_old(v | x, y), others ~ p_old(v | x)"
AGGREGATED = {
    "product": "sum over the tokens inside the mask",
    "geometric": "mean over the tokens inside the mask",
    "token": "every token's own inside the mask, 0 outside",
}
KL = "sum_v p(v) log(p(v)/p_ref(v))"


# ---- mc_log_ratio

UP_TO = {f"n = {n}": n for n in (1, 2, 3, 4)}


class Draws:
    """All sets of n draws after which a transition x -> y of a path can have happened, and their chances."""

    def __init__(self, case: str, n: int, step: Step, seeds: tuple[int, int] = (340, 341)):
        old, new = (logits_of(case, seed)[:, 0] for seed in seeds)
        kernel = table(case, step)
        rows = []
        for x, y in itertools.product(range(len(old)), repeat=2):
            p, column = old[x].softmax(-1), kernel[x, :, y]
            first = p * column
            if first.sum() > 0:
                first = first / first.sum()
                for draws in itertools.product(range(len(p)), repeat=n):
                    chance = float(first[draws[0]] * p[list(draws[1:])].prod())
                    rows += [(x, y, chance, *draws)] if chance > 0 else []
        listed = torch.tensor(rows, dtype=torch.float64)
        self.x, self.y, self.chance, self.draws = (
            *listed[:, :2].long().T,
            listed[:, 2],
            listed[:, 3:].long().T,
        )
        self.log_new, self.log_old = new.log_softmax(-1)[self.x], old.log_softmax(-1)[self.x]
        self.columns = kernel[self.x, :, self.y]
        self.pair = self.x * len(old) + self.y
        self.num_pairs = len(old) ** 2

    def per_pair(self, values: Tensor) -> Tensor:
        """E[values | x, y] for all pairs: (V^2, ...); 0 for pairs that cannot be."""
        weighted = self.chance.view(-1, *[1] * (values.dim() - 1)) * values.double()
        return torch.zeros(self.num_pairs, *values.shape[1:]).double().index_add(0, self.pair, weighted)


@cache
def enumerated(case: str, n: int, step: Step) -> Draws:
    return Draws(case, n, step)


def estimates(f: Functions, case: str, d: Draws, step: Step, log_new: Tensor | None = None) -> Tensor:
    log_new = d.log_new if log_new is None else log_new
    found = f.mc_log_ratio(
        build(f, case), log_new, d.log_old, d.x, d.y, d.draws, step.t, step.h, jump=step.jump
    )
    if tuple(found.shape) != tuple(d.x.shape):
        raise Mismatch(f"the result has shape {tuple(found.shape)}, not {tuple(d.x.shape)}")
    return found


def mc(name: str, equation: str, **rest):
    return check("mc_log_ratio", name, equation, lent=LENT, **rest)


@mc("{case}: the self-normalised mean over the draws, jump = exp", ESTIMATE, cases=CASES)
def _(f, case):
    return estimate(f, CASES[case], Step(T, H, False, "exp"))


@mc("{case}: the self-normalised mean over the draws, jump = euler", ESTIMATE, cases=CASES)
def _(f, case):
    return estimate(f, CASES[case], Step(T, SHORT["euler"], False, "euler"))


def estimate(f: Functions, case: str, step: Step) -> Measured:
    d = enumerated(case, 3, step)
    at = torch.arange(len(d.x))
    q = torch.stack([d.columns[at, v] for v in d.draws])
    ratios = torch.stack([(d.log_new[at, v] - d.log_old[at, v]).exp() for v in d.draws])
    return Measured(
        flat((estimates(f, case, d, step), d.x.shape)), ((q * ratios).sum(0) / q.sum(0)).log(), 3.0
    )


@mc("mixture path with a corrector: unbiased for {case}", UNBIASED, cases=UP_TO)
def _(f, case):
    return unbiased(f, "uniform source, corrector", UP_TO[case])


@mc("metric path: unbiased for {case}", UNBIASED, cases=UP_TO)
def _(f, case):
    return unbiased(f, "metric path", UP_TO[case])


def unbiased(f: Functions, case: str, n: int) -> Measured:
    """By enumeration of all draws; a draw that cannot lead to y has weight 0."""
    step = Step(T, SHORT["exp"])
    d = enumerated(case, n, step)
    observed = d.per_pair(estimates(f, case, d, step).exp())
    new, old = (joint(case, logits_of(case, seed), step).sum(-1).flatten() for seed in (341, 340))
    expected = torch.where(old > 0, new / old, 0.0)
    return Measured(observed, expected, 1 + expected)


@mc("n = 1 is the ratio of the posteriors at the used X1", "r = p_new(X1)/p_old(X1)")
def _(f):
    d = enumerated("metric path", 1, Step(T, H))
    at = torch.arange(len(d.x))
    expected = d.log_new[at, d.draws[0]] - d.log_old[at, d.draws[0]]
    return Measured(flat((estimates(f, "metric path", d, Step(T, H)), d.x.shape)), expected, 3.0)


@mc("equal posteriors give exactly 0", "r = 1", tolerance=1e-6)
def _(f):
    d = enumerated("metric path", 2, Step(T, H))
    observed = flat((estimates(f, "metric path", d, Step(T, H), d.log_old), d.x.shape))
    return Measured(observed, torch.zeros_like(observed))


@mc("{case}: its mean gradient at the old policy is exact, n = 3", SLOPE, cases=CASES)
def _(f, case):
    """Before the softmax: E[d log r/d log p_new(v)] is the responsibility of v."""
    name, step = CASES[case], Step(T, SHORT["exp"])
    d = enumerated(name, 3, step)
    leaf = d.log_old.clone().requires_grad_()
    slope = gradient(estimates(f, name, d, step, leaf), leaf).view(leaf.shape)
    both = joint(name, logits_of(name, 340), step)
    total = both.sum(-1, keepdim=True)
    expected = torch.where(total > 0, both / total, 0.0)
    return Measured(d.per_pair(slope).flatten(), expected.flatten())


@mc("tokens of shape (B, D)", ESTIMATE)
def _(f):
    step, observed = Step(T, H), []
    d = enumerated("uniform source", 2, step)
    B = len(d.x) // 2
    pairs_of = [t[: 2 * B].view(B, 2, *t.shape[1:]) for t in (d.log_new, d.log_old, d.x, d.y)]
    found = f.mc_log_ratio(build(f, "uniform source"), *pairs_of, d.draws[:, : 2 * B].reshape(2, B, 2), T, H)
    observed = flat((found, (B, 2)))
    at = torch.arange(2 * B)
    q = torch.stack([d.columns[at, v[: 2 * B]] for v in d.draws])
    ratios = torch.stack([(d.log_new - d.log_old)[at, v[: 2 * B]].exp() for v in d.draws])
    return Measured(observed, ((q * ratios).sum(0) / q.sum(0)).log(), 3.0)


# ---- aggregate

MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [1, 1, 0, 0, 0]]).bool()


def shape_of(how: str) -> tuple[int, ...]:
    return (4, 5) if how == "token" else (4,)


def aggregated(values: Tensor, mask: Tensor, how: str) -> Tensor:
    rows = zip(values.tolist(), mask.tolist(), strict=True)
    return numbers([chain.aggregate(row, kept, how) for row, kept in rows]).flatten()


@check("aggregate", "{case}: masks of several lengths", AGGREGATED, cases=AGGREGATED)
def _(f, case):
    values = draw(350, 4, 5)
    observed = flat((f.aggregate(values, MASK, case), shape_of(case)))
    return Measured(observed, aggregated(values, MASK, case), 5.0)


@check("aggregate", "{case}: no padding", AGGREGATED, cases=AGGREGATED)
def _(f, case):
    values, mask = draw(351, 4, 5), torch.ones(4, 5).bool()
    observed = flat((f.aggregate(values, mask, case), shape_of(case)))
    return Measured(observed, aggregated(values, mask, case), 5.0)


@check("aggregate", "{case}: what stands at padding does not matter", AGGREGATED, cases=AGGREGATED)
def _(f, case):
    values = torch.where(MASK, draw(352, 4, 5), 2.0**20)
    observed = flat((f.aggregate(values, MASK, case), shape_of(case)))
    return Measured(observed, aggregated(values, MASK, case), 5.0)


@check("aggregate", "{case}: gradient", AGGREGATED, cases=AGGREGATED)
def _(f, case):
    leaf = draw(353, 4, 5).requires_grad_()
    found = f.aggregate(leaf, MASK, case)
    flat((found.detach(), shape_of(case)))
    weights = (1 + torch.arange(found.numel()) % 7).view(found.shape).double()
    spread = weights if case == "token" else weights[:, None].expand(4, 5)
    count = MASK.sum(1, keepdim=True) if case == "geometric" else 1
    return Measured(gradient(found * weights, leaf), (spread * MASK / count).flatten(), 7.0)


# ---- posterior_kl


@check("posterior_kl", "value", KL)
def _(f):
    logits, ref = draw(360, 5, 4), draw(361, 5, 4)
    observed = flat((f.posterior_kl(logits, ref), (5,)))
    return Measured(observed, posterior_kl(logits, ref), 5.0)


@check("posterior_kl", "posteriors far from each other", KL)
def _(f):
    logits, ref = 16 * draw(362, 6, 5), 16 * draw(363, 6, 5)
    observed = flat((f.posterior_kl(logits, ref), (6,)))
    return Measured(observed, posterior_kl(logits, ref), 50.0)


@check("posterior_kl", "logits of any shape, one value a token", KL)
def _(f):
    parts = [(draw(364, *shape, 3), draw(365, *shape, 3), shape) for shape in ((), (2, 3), (3, 1, 2))]
    observed = flat(*((f.posterior_kl(one, two), shape) for one, two, shape in parts))
    return Measured(observed, torch.cat([posterior_kl(one, two).flatten() for one, two, _ in parts]), 5.0)


@check("posterior_kl", "constants added to the logits change nothing", KL)
def _(f):
    logits, ref = draw(366, 3, 4), draw(367, 3, 4)
    observed = flat((f.posterior_kl(logits + 4, ref - 8), (3,)))
    return Measured(observed, posterior_kl(logits, ref), 5.0)


@check("posterior_kl", "equal posteriors give 0", KL)
def _(f):
    observed = flat((f.posterior_kl(draw(368, 4, 6), draw(368, 4, 6)), (4,)))
    return Measured(observed, torch.zeros_like(observed))


@check("posterior_kl", "gradient", "d KL/d logits = p (log(p/p_ref) - KL)")
def _(f):
    leaf, ref = draw(369, 4, 5).requires_grad_(), draw(370, 4, 5)
    weights = numbers([1.0, 2.0, 3.0, 4.0])
    found = f.posterior_kl(leaf, ref)
    flat((found.detach(), (4,)))
    gap = leaf.detach().log_softmax(-1) - ref.log_softmax(-1)
    p = leaf.detach().softmax(-1)
    expected = p * (gap - (p * gap).sum(-1, keepdim=True)) * weights[:, None]
    return Measured(gradient(found * weights, leaf), expected.flatten(), 5.0)


@check("posterior_kl", "symbols that neither posterior can give count 0", "0 log(0/0) = 0")
def _(f):
    """As the mask's, whose logit is -inf: in the value and the gradient."""
    logits, ref = draw(371, 3, 4), draw(372, 3, 4)
    logits[:, 2] = ref[:, 2] = -torch.inf
    leaf = logits.clone().requires_grad_()
    found = f.posterior_kl(leaf, ref)
    rest = [0, 1, 3]
    gap = logits[:, rest].log_softmax(-1) - ref[:, rest].log_softmax(-1)
    p = logits[:, rest].softmax(-1)
    slope = torch.zeros(3, 4).double()
    slope[:, rest] = p * (gap - (p * gap).sum(-1, keepdim=True))
    observed = torch.cat([flat((found.detach(), (3,))), gradient(found, leaf)])
    return Measured(observed, torch.cat([(p * gap).sum(-1), slope.flatten()]), 5.0)
