"""Properties of a token's transition: its log-probability and gradient, whole chains, and the sampled step.

Functions that take a path get the file's own; a file without one is lent the oracle's.
"""

from functools import cache

import torch
from torch import Tensor

from oracle import chain
from oracle.calling import Functions
from oracle.chain import Step
from oracle.checks import Measured, Mismatch
from oracle.definitions_discrete import PATHS
from oracle.measuring import check, draw, flat, gradient, numbers
from oracle.properties_paths import JUMPS, SHORT, H, T, build, exact, pairs

MARGINAL = "p(y | x) = sum_v p(v) q(y | x, v)"
SLOPE = "d log p(y | x)/d logits = p(v) q(y | x, v)/p(y | x) - p(v)"
RATIO = "p_new(y | x)/p_old(y | x) = E[p_new(X1)/p_old(X1) | x, y]"
REWARD = "E[A sum_k grad log p(x_{k+1} | x_k)] = grad E[A(x_K)]"
MEASURE = "E_old[prod_k p_new/p_old A] = E_new[A]"
CASES = {  # paths that between them have every kind of term
    "uniform source": "uniform source",
    "masked source": "masked source",
    "corrector": "uniform source, corrector",
    "metric path": "metric path",
}
LENT = tuple(PATHS)
CHAINS = {"mixture path": "uniform source", "metric path": "metric path"}
GRID = (0.0, 0.25, 0.625, 1.0)


@cache
def table(case: str, step: Step) -> Tensor:
    """q(y | x, v) at [x, v, y]."""
    return chain.kernel_table(exact(case).law, step)


def logits_of(case: str, seed: int) -> Tensor:
    """Logits at [x, y, v], the same for every y; those of a mask are -inf, as no clean token is one."""
    V = exact(case).law.vocab_size
    logits = draw(seed, V, 1, V).expand(V, V, V).clone()
    if case == "masked source":
        logits[..., exact(case).law.mask_id] = -torch.inf
    return logits


def joint(case: str, logits: Tensor, step: Step) -> Tensor:
    """p(v) q(y | x, v) at [x, y, v]: (V, V, V)."""
    return logits.softmax(-1) * table(case, step).mT


def log_probs(f: Functions, case: str, logits: Tensor, step: Step) -> Tensor:
    """The implementation's log p(y | x) at [x, y], from logits (V, V, V)."""
    V = logits.shape[-1]
    found = f.transition_log_prob(
        build(f, case), logits, *pairs(V), step.t, step.h, jump=step.jump, last=step.last
    )
    if tuple(found.shape) != (V, V):
        raise Mismatch(f"the result has shape {tuple(found.shape)}, not {(V, V)}")
    return found


def tlp(name: str, equation: str, **rest):
    return check("transition_log_prob", name, equation, lent=LENT, **rest)


# ---- transition_log_prob


@tlp("{case}: log p(y | x), jump = exp", MARGINAL, cases=CASES)
def _(f, case):
    return transitions(f, case, Step(T, SHORT["exp"], False, "exp"))


@tlp("{case}: log p(y | x), jump = euler", MARGINAL, cases=CASES)
def _(f, case):
    return transitions(f, case, Step(T, SHORT["euler"], False, "euler"))


@tlp("{case}: log p(y | x) of a long step", MARGINAL, cases=CASES)
def _(f, case):
    return transitions(f, case, Step(0.5, 0.25, False, "exp"))


@tlp("{case}: the last step is the posterior", "log p(y | x) = log p(v = y)", cases=CASES)
def _(f, case):
    return transitions(f, case, Step(0.875, 0.125, True, "exp"))


def transitions(f: Functions, case: str, step: Step) -> Measured:
    """Where p(y | x) = 0, the probabilities are compared."""
    logits = logits_of(CASES[case], 310)
    found = flat((log_probs(f, CASES[case], logits, step), logits.shape[:2]))
    known = joint(CASES[case], logits, step).sum(-1).flatten()
    never = known == 0
    return Measured(
        torch.where(never, found.exp(), found),
        torch.where(never, 0.0, known.log()),
        1 + torch.where(never, 0.0, known.log().abs()),
    )


@tlp("{case}: the chances of all y sum to 1", "sum_y p(y | x) = 1", cases=CASES)
def _(f, case):
    logits = logits_of(CASES[case], 311)
    steps = [Step(T, H, False, jump) for jump in JUMPS]
    observed = torch.cat([log_probs(f, CASES[case], logits, step).double().exp().sum(1) for step in steps])
    return Measured(observed, torch.ones_like(observed))


@tlp("{case}: gradient, responsibility minus posterior", SLOPE, cases=CASES)
def _(f, case):
    return slopes(f, CASES[case], Step(T, H))


@tlp("{case}: gradient at the last step", SLOPE, cases=CASES)
def _(f, case):
    return slopes(f, CASES[case], Step(0.875, 0.125, True))


def slopes(f: Functions, case: str, step: Step) -> Measured:
    """All pairs (x, y) that are possible, one token each: (N, V)."""
    logits = logits_of(case, 312)
    both = joint(case, logits, step)
    x, y = both.sum(-1).nonzero(as_tuple=True)
    leaf, both = logits[x, y].clone().requires_grad_(), both[x, y]
    found = f.transition_log_prob(build(f, case), leaf, x, y, step.t, step.h, jump=step.jump, last=step.last)
    flat((found, (len(x),)))
    weights = 1 + torch.arange(len(x)) % 3  # so that no token stands for another
    expected = (both / both.sum(-1, keepdim=True) - logits[x, y].softmax(-1)) * weights[:, None]
    return Measured(gradient(found * weights, leaf), expected.flatten(), 3.0)


@tlp("{case}: the ratio is the mean of posterior ratios, given the transition", RATIO, cases=CASES)
def _(f, case):
    name, step = CASES[case], Step(T, H)
    old, new = logits_of(name, 313), logits_of(name, 314)
    possible = joint(name, old, step).sum(-1) > 0
    log_ratio = (log_probs(f, name, new, step) - log_probs(f, name, old, step))[possible]
    posterior = joint(name, old, step)[possible]
    ratios = torch.where(old.isfinite(), new.log_softmax(-1) - old.log_softmax(-1), 0.0)[possible].exp()
    expected = (posterior * ratios).sum(-1) / posterior.sum(-1)
    return Measured(log_ratio.double().exp(), expected, 1 + expected)


@tlp("{case}: a step without movement has log p = 0 and no gradient", "lambda = 0: stay",
     cases=("metric path at t = 0", "revealed tokens, masked source"))  # fmt: skip
def _(f, case):
    name, t = ("metric path", 0.0) if "metric" in case else ("masked source", T)
    x = torch.arange(4)
    leaf = draw(315, 4, 4)
    if t:  # every token is at its clean one; the mask's row is that of a revealed token
        x, leaf = torch.tensor([0, 1, 3, 3]), torch.full((4, 4), -torch.inf).double()
        leaf[torch.arange(4), x] = draw(315, 4)
    leaf.requires_grad_()
    found = f.transition_log_prob(build(f, name), leaf, x, x.clone(), t, H)
    return Measured(torch.cat([flat((found.detach(), (4,))), gradient(found, leaf)]), numbers([0.0] * 20))


@tlp("{case}: a posterior of one symbol has no gradient", SLOPE, cases=CASES)
def _(f, case):
    """As top-k = 1 truncation makes it, the others at -inf."""
    x, clean, y = torch.tensor([0, 0, 3, 3]), torch.tensor([1, 3, 0, 3]), torch.tensor([1, 0, 0, 3])
    leaf = torch.full((4, 4), -torch.inf).double()
    leaf[torch.arange(4), clean] = draw(316, 4)
    leaf.requires_grad_()
    if case == "masked source":
        x = torch.tensor([2, 2, 3, 2])
        y = torch.tensor([1, 2, 3, 3])
        x[2], y[2] = 2, 0
    step = Step(T, SHORT["exp"])
    found = f.transition_log_prob(build(f, CASES[case]), leaf, x, y, step.t, step.h)
    exact_log = table(CASES[case], step)[x, clean, y].log()
    observed = torch.cat([flat((found.detach(), (4,))), gradient(found, leaf)])
    return Measured(observed, torch.cat([exact_log, torch.zeros(16).double()]), 8.0)


@tlp("a constant added to the logits changes nothing", "p = softmax(logits)")
def _(f):
    logits = logits_of("metric path", 317)
    found, known = (log_probs(f, "metric path", logits + add, Step(T, H)) for add in (8.0, 0.0))
    expected = joint("metric path", logits, Step(T, H)).sum(-1).log().flatten()
    never = expected == -torch.inf
    observed = torch.cat([torch.where(never, 0.0, flat((p, (4, 4)))) for p in (found, known)])
    expected = torch.where(never, 0.0, expected).repeat(2)
    return Measured(observed, expected, 1 + expected.abs())


@tlp("tokens of any shape, jump = exp and not last by default", MARGINAL)
def _(f):
    observed, expected = [], []
    for case, shape in (("uniform source", ()), ("metric path", (2, 3)), ("masked source", (3, 1, 2))):
        logits = draw(318, *shape, 4)
        x, y = torch.full(shape, 2), torch.full(shape, 1)
        observed.append(flat((f.transition_log_prob(build(f, case), logits, x, y, T, H), shape)))
        column = table(case, Step(T, H))[2, :, 1]
        expected.append((logits.softmax(-1) * column).sum(-1).log().flatten())
    return Measured(torch.cat(observed), torch.cat(expected), 5.0)


# ---- whole chains


@cache
def setting(case: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits_old, logits_new (S, D, V), start (S,), reward (S,): S = 4, two binary tokens on a mixture path,
    or one token of the metric path. Nothing is symmetric."""
    D, V = (2, 2) if case == "mixture path" else (1, 4)
    old, new = draw(320, 4, D, V), draw(321, 4, D, V) / 2
    return old, old + new, draw(322, 4).softmax(0), draw(323, 4)


def law_of(f: Functions, case: str):
    """The path of a chain: an implementation's, and the oracle's."""
    if case == "metric path":
        return build(f, case), exact(case).law
    return f.MixturePath(2, corrector=0.25), chain.Mixture(2, corrector=0.25)


STEPS = chain.steps_of(GRID)
GRIDS = {"mixture path": [Step(0.125, 0.25), *STEPS[1:]], "metric path": STEPS}  # no corrector at t = 0


def chain_log_probs(f: Functions, case: str, logits: Tensor, paths: Tensor) -> Tensor:
    """The implementation's log-probability of every step, summed over tokens. paths (N, K+1). To (N, K)."""
    path, law = law_of(f, case)
    every = torch.tensor(chain.states(law.vocab_size, logits.shape[1]))
    columns = []
    for k, step in enumerate(GRIDS[case]):
        before, after = every[paths[:, k]], every[paths[:, k + 1]]
        found = f.transition_log_prob(
            path, logits[paths[:, k]], before, after, step.t, step.h, jump=step.jump, last=step.last
        )
        flat((found, before.shape))
        columns.append(found.sum(-1))
    return torch.stack(columns, 1)


@tlp("{case}: E[A grad log p] is the gradient of the exact expected reward", REWARD, cases=CHAINS)
def _(f, case):
    old, _, start, reward = setting(case)
    _, law = law_of(f, case)
    found = chain.policy_gradient(
        lambda logits, paths: chain_log_probs(f, case, logits, paths).double().sum(1),
        law, old, GRIDS[case], start, reward,
    )  # fmt: skip
    exact_gradient = chain.reward_gradient(law, old, GRIDS[case], start, reward)
    return Measured(found.flatten(), exact_gradient.flatten())


@tlp("{case}: the product of the step ratios is the change of measure", MEASURE, cases=CHAINS)
def _(f, case):
    old, new, start, reward = setting(case)
    _, law = law_of(f, case)
    paths, chance = chain.possible(law, old, GRIDS[case], start)
    logs = [chain_log_probs(f, case, logits, paths).double().sum(1) for logits in (new, old)]
    observed = (chance * (logs[0] - logs[1]).exp() * reward[paths[:, -1]]).sum()
    expected = chain.expected_reward(law, new, GRIDS[case], start, reward)
    return Measured(
        torch.stack([observed, logs[1].exp() @ start[paths[:, 0]]]), torch.stack([expected, one()])
    )


def one() -> Tensor:
    return torch.ones((), dtype=torch.float64)


# ---- sample_step: frequencies, with bounds that a right implementation exceeds less than once in a million

COUNT = 10_000


@check("sample_step", "{case}: frequencies of (X1, x_next)", "p(v) q(y | x, v)", cases=CASES, lent=LENT,
       tolerance=6.0)  # fmt: skip
def _(f, case):
    return frequencies(f, CASES[case], Step(0.5, 0.125))


@check("sample_step", "{case}: frequencies, jump = euler", "p(v) q(y | x, v)", cases=CASES, lent=LENT,
       tolerance=6.0)  # fmt: skip
def _(f, case):
    return frequencies(f, CASES[case], Step(0.5, 0.03125, False, "euler"))


def frequencies(f: Functions, case: str, step: Step) -> Measured:
    """COUNT tokens at x = 0 (masked: the mask). Deviations are in standard errors plus two counts, which
    covers rare cells, too; of cells that must be empty it counts whether they are."""
    x = torch.full((COUNT,), 2 if case == "masked source" else 0)
    logits = logits_of(case, 330)[x[0], 0]
    y, v = sampled(f, case, logits.expand(COUNT, 4).clone(), x, step)
    found = torch.bincount(v * 4 + y, minlength=16).double() / COUNT
    known = (logits.softmax(-1)[:, None] * table(case, step)[x[0]]).flatten()
    observed = torch.where(known > 0, found, (found > 0).double())
    return Measured(observed, known, torch.where(known > 0, (known / COUNT).sqrt() + 2 / COUNT, 0.125))


def sampled(f: Functions, case: str, logits: Tensor, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    t, h, last, jump = step
    generator = torch.Generator().manual_seed(7)
    y, v = f.sample_step(build(f, case), logits, x, t, h, jump=jump, last=last, generator=generator)
    if y.shape != x.shape or v.shape != x.shape:
        raise Mismatch(f"the results have shapes {tuple(y.shape)}, {tuple(v.shape)}, not {tuple(x.shape)}")
    return y, v


@check("sample_step", "{case}: the last step is X1", "x_next = X1", cases=CASES, lent=LENT, tolerance=0.0)
def _(f, case):
    x = torch.arange(24).view(2, 12) % 4
    y, v = sampled(f, CASES[case], logits_of(CASES[case], 331)[x, 0], x, Step(0.875, 0.125, True))
    return differing(y, v)


def differing(one: Tensor, other: Tensor) -> Measured:
    """1 if two results differ anywhere, where they must not."""
    return Measured(numbers([float(not torch.equal(one, other))]), numbers([0.0]))


@check("sample_step", "tokens are drawn independently of each other", "p(x' | x) = prod_d p(x'_d | x)",
       lent=LENT, tolerance=6.0)  # fmt: skip
def _(f):
    """The share of equal neighbours among the last step's uniform tokens: 1/4."""
    x = torch.zeros(COUNT // 2, 2).long()
    y, _ = sampled(f, "metric path", torch.zeros(*x.shape, 4).double(), x, Step(0.875, 0.125, True))
    share = (y[:, 0] == y[:, 1]).double().mean()
    return Measured(share[None], numbers([0.25]), (0.1875 / len(y)) ** 0.5)


@check("sample_step", "the generator alone decides", "equal seeds, equal steps", lent=LENT, tolerance=0.0)
def _(f):
    x, logits, found = torch.arange(64) % 4, draw(332, 64, 4), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(torch.stack(sampled(f, "metric path", logits, x, Step(0.5, 0.03125))))
    return differing(*found)
