"""Discrete flows by enumeration: every quantity of the sampler and of its training as a sum over all states.

D tokens of V symbols have S = V^D states. A policy is a table of logits (S, D, V): row [s, d] gives the
posterior of the clean token d in state s. One step draws X1 from it for every token, jumps towards it with a
chance that the path's rates give, and the last step is X1 itself. So each step is an S x S matrix, K steps
are its products, and expectations, gradients and ratios are exact up to rounding: no sampling.

All of it is float64 on the CPU and written from the definitions, entry by entry, with nothing of the code
that it checks. Time t runs from 0 (source) to 1 (data); x, y, v are symbols: before, after, the clean one.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Mixture(NamedTuple):
    """p_t(x | v) = kappa [x = v] + (1 - kappa) p0(x) with kappa = t^power; p0 uniform, or all on the mask.

    Its rates are those of the forward process plus corrector times (forward + backward), which leaves p_t as
    it is: Q(x -> y | v) = (1 + c) kappa'/(1 - kappa) [y = v] + c kappa'/kappa p0(y) for y != x.
    """

    vocab_size: int
    source: str = "uniform"
    mask_id: int | None = None
    power: float = 1.0
    corrector: float = 0.0

    def kappa(self, t: float) -> float:
        return t**self.power

    def speed(self, t: float) -> float:
        """d kappa / dt."""
        return self.power * t ** (self.power - 1)

    def p0(self, x: int) -> float:
        return float(x == self.mask_id) if self.source == "mask" else 1 / self.vocab_size

    def law(self, v: int, t: float) -> list[float]:
        """p_t(. | v)."""
        k = self.kappa(t)
        return [k * (x == v) + (1 - k) * self.p0(x) for x in range(self.vocab_size)]

    def law_speed(self, v: int, t: float) -> list[float]:
        """d/dt p_t(. | v)."""
        return [self.speed(t) * ((x == v) - self.p0(x)) for x in range(self.vocab_size)]

    def log_rate(self, x: int, y: int, v: int, t: float) -> float:
        c, k, speed = self.corrector, self.kappa(t), self.speed(t)
        rate = (1 + c) * speed / (1 - k) * (y == v) + (c * speed / k * self.p0(y) if c else 0.0)
        return log(rate)


class Metric(NamedTuple):
    """p_t(x | v) = softmax over x of -beta d(x, v), beta = c (t/(1 - t))^a, with the rates of least kinetic
    energy, which only move closer to v: Q(x -> y | v) = p_t(y | v) beta' max(d(x, v) - d(y, v), 0). At t = 0,
    where beta' is infinite for a < 1, it is set to 0: the step is the identity."""

    distance: tuple[tuple[float, ...], ...]
    c: float = 3.0
    a: float = 0.9

    @property
    def vocab_size(self) -> int:
        return len(self.distance)

    def beta(self, t: float) -> float:
        return self.c * (t / (1 - t)) ** self.a

    def speed(self, t: float) -> float:
        """d beta / dt, and 0 at t = 0."""
        return self.c * self.a * (t / (1 - t)) ** (self.a - 1) / (1 - t) ** 2 if t > 0 else 0.0

    def log_law(self, v: int, t: float) -> list[float]:
        energies = [-self.beta(t) * self.distance[x][v] for x in range(self.vocab_size)]
        top = max(energies)
        log_sum = top + math.log(sum(math.exp(e - top) for e in energies))
        return [e - log_sum for e in energies]

    def law(self, v: int, t: float) -> list[float]:
        """p_t(. | v)."""
        return [math.exp(p) for p in self.log_law(v, t)]

    def law_speed(self, v: int, t: float) -> list[float]:
        """d/dt p_t(x | v) = p_t(x | v) beta' (E d - d(x, v))."""
        law, d = self.law(v, t), [row[v] for row in self.distance]
        mean = sum(p * e for p, e in zip(law, d, strict=True))
        return [p * self.speed(t) * (mean - e) for p, e in zip(law, d, strict=True)]

    def log_rate(self, x: int, y: int, v: int, t: float) -> float:
        gap = max(self.distance[x][v] - self.distance[y][v], 0.0)
        return self.log_law(v, t)[y] + log(self.speed(t)) + log(gap)


Path = Mixture | Metric


def fudoki_distance(weight: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """d(x, v) = (|e_x/|e_x| - e_v/|e_v||^2)^2 for the rows of an embedding table."""
    unit = [[w / math.hypot(*row) for w in row] for row in weight]
    return tuple(
        tuple(sum((a - b) ** 2 for a, b in zip(one, two, strict=True)) ** 2 for two in unit) for one in unit
    )


def log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


# ---- one token, given its clean token v


@cache
def rates(path: Path, x: int, v: int, t: float) -> list[float]:
    """Q_t(x -> . | v), 0 at x itself: (V,)."""
    return [0.0 if y == x else math.exp(path.log_rate(x, y, v, t)) for y in range(path.vocab_size)]


def log_jump(z: float, jump: str) -> float:
    """Logarithm of the chance to jump, z = h lambda: 1 - exp(-z), or min(1, z) for euler."""
    return log(-math.expm1(-z) if jump == "exp" else min(1.0, z))


def log_stay(z: float, jump: str) -> float:
    """Logarithm of the chance to stay, which is 1 minus that to jump."""
    return -z if jump == "exp" else log(1.0 - min(1.0, z))


@cache
def log_kernel(path: Path, x: int, y: int, v: int, t: float, h: float, jump: str, last: bool) -> float:
    """log q(y | x, v): stay with 1 - J(h lambda), else go to y with Q(x -> y | v)/lambda, lambda the sum of
    the rates; at the last step y is v."""
    if last:
        return log(float(y == v))
    total = math.fsum(rates(path, x, v, t))
    if y == x:
        return log_stay(h * total, jump)
    rate = path.log_rate(x, y, v, t)
    return rate - math.log(total) + log_jump(h * total, jump) if rate > -math.inf else rate


class Step(NamedTuple):
    """From t to t + h."""

    t: float
    h: float
    last: bool = False
    jump: str = "exp"


def steps_of(grid: Sequence[float], jump: str = "exp") -> list[Step]:
    """The K steps of a grid 0 = t_0 < .. < t_K = 1."""
    K = len(grid) - 1
    return [Step(grid[k], grid[k + 1] - grid[k], k == K - 1, jump) for k in range(K)]


def kernel_table(path: Path, step: Step) -> Tensor:
    """q(y | x, v) at [x, v, y]: (V, V, V)."""
    V, (t, h, last, jump) = range(path.vocab_size), step
    table = [[[math.exp(log_kernel(path, x, y, v, t, h, jump, last)) for y in V] for v in V] for x in V]
    return torch.tensor(table, dtype=torch.float64)


def released_table(path: Path, posterior: Tensor, step: Step, n: int) -> Tensor:
    """p(y | x) at [x, y] of the sampler that jumps by the mean rate of n draws of X1, enumerated: (V, V).

    posterior (V, V): row x is that of symbol x. For n = 1 this is the usual kernel.
    """
    V = range(path.vocab_size)
    rows = []
    for x in V:
        row = torch.zeros(len(V), dtype=torch.float64)
        by_v = [rates(path, x, v, step.t) for v in V]
        for draws in itertools.product(V, repeat=n):
            mean = [sum(by_v[v][y] for v in draws) / n for y in V]
            total = sum(mean)
            chance = math.exp(log_jump(step.h * total, step.jump))
            moves = [q / total * chance if total > 0 else 0.0 for q in mean]
            moves[x] = 1 - chance
            row = row + posterior[x, list(draws)].prod() * torch.tensor(moves, dtype=torch.float64)
        rows.append(row)
    return torch.stack(rows)


# ---- one token: transition probabilities, ratios and their estimates


def token_transition(posterior: Tensor, kernel: Tensor) -> Tensor:
    """p(y | x) = sum over v of p(v | x) q(y | x, v). posterior (..., V), kernel (V, V) at [v, y]. Returns
    (..., V)."""
    return sum(posterior[..., v, None] * kernel[v] for v in range(len(kernel)))


def responsibility(posterior: Tensor, column: Tensor) -> Tensor:
    """The law of X1 given x and x': p(v) q(x' | x, v) / p(x' | x). posterior, column (V,). Returns (V,)."""
    return posterior * column / (posterior * column).sum()


def mc_ratio(p_new: Tensor, p_old: Tensor, column: Tensor, draws: Sequence[int]) -> Tensor:
    """sum_j q_j p_new(X_j)/p_old(X_j) / sum_j q_j with q_j = q(x' | x, X_j); NaN if all q_j are 0. Returns
    ()."""
    weights = torch.stack([column[v] for v in draws])
    return sum(column[v] * p_new[v] / p_old[v] for v in draws) / weights.sum()


def expected_over_draws(
    value: Callable[[tuple[int, ...]], Tensor], p_old: Tensor, column: Tensor, n: int, used: bool = True
) -> Tensor:
    """E[value(draws) | x, x'] over n draws of X1, all V^n enumerated: the first is the used one, which has
    the law of X1 given x', the others have the posterior's. used = False: n fresh draws, and only those sets
    that can lead to x' at all. Returns what value returns."""
    first = responsibility(p_old, column) if used else p_old
    total, mass = 0.0, 0.0
    for draws in itertools.product(range(len(p_old)), repeat=n):
        chance = first[draws[0]] * p_old[list(draws[1:])].prod()
        if chance > 0 and column[list(draws)].sum() > 0:
            total, mass = total + chance * value(draws), mass + chance
    return total / mass


def kl(p: Tensor, q: Tensor) -> Tensor:
    """sum p log(p/q) over the last axis, where p > 0."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)


def aggregate(log_ratio: Sequence[float], mask: Sequence[bool], how: str) -> list[float]:
    """One sample's log-ratio by its tokens inside the mask: [their sum] (product), [their mean] (geometric),
    or each of them, 0 outside (token)."""
    inside = [value for value, kept in zip(log_ratio, mask, strict=True) if kept]
    if how == "token":
        return [value if kept else 0.0 for value, kept in zip(log_ratio, mask, strict=True)]
    return [sum(inside) / (len(inside) if how == "geometric" else 1)]


# ---- D tokens, K steps


def states(vocab_size: int, tokens: int) -> list[tuple[int, ...]]:
    """All S = V^D states, in the order of the tables."""
    return list(itertools.product(range(vocab_size), repeat=tokens))


def transition_matrix(path: Path, logits: Tensor, step: Step) -> Tensor:
    """p(s' | s) = product over the tokens, which are independent given s. logits (S, D, V). Returns
    (S, S)."""
    posterior, table = logits.softmax(-1), kernel_table(path, step)
    every = states(path.vocab_size, logits.shape[1])
    rows = []
    for s, state in enumerate(every):
        tokens = [token_transition(posterior[s, d], table[x]) for d, x in enumerate(state)]
        after = [torch.stack([p[y] for p, y in zip(tokens, other, strict=True)]).prod() for other in every]
        rows.append(torch.stack(after))
    return torch.stack(rows)


def marginals(path: Path, logits: Tensor, steps: Sequence[Step], start: Tensor) -> Tensor:
    """The exact law of the state after 0 .. K steps. start (S,). Returns (K+1, S)."""
    laws = [start]
    for step in steps:
        laws.append(laws[-1] @ transition_matrix(path, logits, step))
    return torch.stack(laws)


def expected_reward(
    path: Path, logits: Tensor, steps: Sequence[Step], start: Tensor, reward: Tensor
) -> Tensor:
    """E[reward(x_K)]. reward (S,). Differentiable in logits. Returns ()."""
    return marginals(path, logits, steps, start)[-1] @ reward


def reward_gradient(
    path: Path, logits: Tensor, steps: Sequence[Step], start: Tensor, reward: Tensor
) -> Tensor:
    """The exact gradient of the expected reward in the logits, by autograd through all K steps: (S, D, V)."""
    leaf = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(expected_reward(path, leaf, steps, start, reward), leaf)[0]


def trajectories(num_states: int, num_steps: int) -> Tensor:
    """All S^(K+1) sequences of states, as indices: (S^(K+1), K+1)."""
    return torch.tensor(list(itertools.product(range(num_states), repeat=num_steps + 1)))


def step_log_probs(path: Path, logits: Tensor, steps: Sequence[Step], paths: Tensor) -> Tensor:
    """log p(s_{k+1} | s_k) of every step. paths (N, K+1). Returns (N, K)."""
    matrices = [transition_matrix(path, logits, step) for step in steps]
    return torch.stack([m[paths[:, k], paths[:, k + 1]] for k, m in enumerate(matrices)], 1).log()


def possible(path: Path, logits: Tensor, steps: Sequence[Step], start: Tensor) -> tuple[Tensor, Tensor]:
    """The trajectories of positive probability (N, K+1), and their probabilities (N,), which sum to 1."""
    paths = trajectories(len(start), len(steps))
    chance = start[paths[:, 0]] * step_log_probs(path, logits.detach(), steps, paths).sum(1).exp()
    return paths[chance > 0], chance[chance > 0]


def policy_gradient(
    log_ratio: Callable[[Tensor, Tensor], Tensor],
    path: Path,
    logits: Tensor,
    steps: Sequence[Step],
    start: Tensor,
    reward: Tensor,
) -> Tensor:
    """The gradient of E_old[reward(x_K) log_ratio] in the logits at theta_old, by enumeration: (S, D, V).

    log_ratio takes the logits and trajectories (N, K+1) and gives the sum over the steps of each: (N,).
    """
    paths, chance = possible(path, logits, steps, start)
    leaf = logits.detach().clone().requires_grad_()
    return torch.autograd.grad((chance * reward[paths[:, -1]] * log_ratio(leaf, paths)).sum(), leaf)[0]


def mean_field_log_ratio(logits: Tensor, old: Tensor, paths: Tensor, vocab_size: int) -> Tensor:
    """sum over tokens of log p(x_K^d | x_0) - log p_old(x_K^d | x_0): one forward at x_0. Returns (N,)."""
    every = torch.tensor(states(vocab_size, logits.shape[1]))
    ends = every[paths[:, -1]][..., None]  # (N, D, 1)
    log_p = (logits.log_softmax(-1) - old.log_softmax(-1))[paths[:, 0]]
    return log_p.gather(-1, ends)[..., 0].sum(-1)
