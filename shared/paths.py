"""Paths from noise to data of a discrete flow: laws, rates and the Euler kernel of a token.

A path fixes p_t(x | x1), the law at t of a token whose clean value is x1, and rates Q_t(x -> y | x1) that
carry it. Methods carry no gradient and compute in float64, except for a metric path of embeddings without a
matrix, which uses their dtype. Tokens are integer tensors (...,); t and h are floats or 0-dim tensors.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from shared.distances import DistanceMatrix, EmbeddingDistance, embedding_distance, in_chunks, remember
from shared.tokens import (
    checked_start,
    checked_step,
    checked_times,
    checked_tokens,
    draw_symbols,
    draw_uniforms,
)

SMALL_VOCABULARY = 64  # up to here the V^3 transitions of a step are remembered: 2 MiB at most


def _kernel(path, x, x1, t, h, jump: str = "exp", last: bool = False) -> Tensor:
    """q(. | x, x1), (..., V): the law of x_next after one step from x, given the drawn x1 (module `ctmc`).

    q(y) = J(h lambda) Q_t(x -> y | x1) / lambda for y != x, and 1 - J(h lambda) at x; [y = x1] if last.
    x, x1: (...,); 0 <= t < 1; h > 0. Pinned by test_kernel_is_its_definition.
    """
    t, h = checked_step(t, h, jump)
    x, x1 = checked_tokens(path, x, x1)
    if last:
        return one_hot(x1, path.vocab_size).double()
    return _rows(path, path._computed_kernel, x, x1, t, h, jump)


def _computed_kernel(path, x, x1, t, h, jump: str) -> Tensor:
    rates = path.rates(x, x1, t)
    total = rates.sum(-1, keepdim=True)
    chance = _jump_chance(h * total, jump)
    stay = (-h * total).exp() if jump == "exp" else 1 - chance
    kernel = rates * torch.where(total > 0, chance / total, 0.0)
    return kernel.scatter(-1, x[..., None], stay)


def _rows(path, compute, x, y, t, h, jump: str) -> Tensor:
    """compute(x, y, t, h, jump), (..., n), for symbols x, y (...,), which the caller has checked.

    For a small vocabulary it is computed once for all pairs, remembered for each step, and looked up.
    """
    size = path.vocab_size
    if size > SMALL_VOCABULARY:
        return compute(x, y, t, h, jump)

    def every_pair():
        pairs = torch.arange(size * size, device=x.device)
        return compute(pairs // size, pairs % size, t, h, jump)

    kept = path.remembered.setdefault(compute.__name__, {})
    table = remember(kept, (t, h, jump, x.device), every_pair)
    return table.index_select(0, (x * size + y).flatten()).reshape(*x.shape, table.shape[1])


def _sample(path, x1: Tensor, t: float | Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Tokens of p_t(. | x1), shaped like x1, e.g. to train a model; t as in `marginal`."""
    rows = x1, checked_times(t, x1), draw_uniforms(x1.shape, x1.device, generator)
    return in_chunks(lambda x1, t, u: draw_symbols(path.marginal(x1, t), u), path.vocab_size, *rows)


def _draw_source(path, shape, generator: torch.Generator | None = None) -> Tensor:
    """Tokens of p_0, of the given shape, on the generator's device."""
    any_x1 = torch.zeros(shape, dtype=torch.long, device=generator.device if generator else "cpu")
    return path.sample(any_x1, 0.0, generator)


@dataclass(frozen=True)
class MixturePath:
    """p_t(x | x1) = kappa [x = x1] + (1 - kappa) p_0(x), kappa = t^power (arXiv 2407.15595).

    With kappa' = d kappa / dt and a corrector c >= 0, which moves tokens to and fro and leaves p_t as it is:
        Q_t(x -> y | x1) = (1 + c) kappa' / (1 - kappa) [y = x1] + c kappa' / kappa p_0(y),  y != x.

    source: p_0 is "uniform", or "mask", all on mask_id, a symbol. Raises ValueError for arguments out of
    range, and at t = 0 where rates are infinite (corrector > 0, power < 1). Pinned by
    test_rates_carry_their_path, test_closed_forms_are_the_sum_over_the_vocabulary.
    """

    vocab_size: int
    source: str = "uniform"
    mask_id: int | None = None
    power: float = 1.0
    corrector: float = 0.0
    remembered: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    kernel, _computed_kernel = _kernel, _computed_kernel
    sample, draw_source = _sample, _draw_source

    def __post_init__(self):
        masks = {"uniform": [None], "mask": range(self.vocab_size)}
        if self.source not in masks or self.mask_id not in masks[self.source]:
            raise ValueError(f"source is uniform, or mask with a mask_id: {self.source!r}, {self.mask_id}")
        if self.vocab_size < 2 or not (0 < self.power < math.inf and 0 <= self.corrector < math.inf):
            raise ValueError(f"needs vocab_size >= 2, power > 0 and corrector >= 0: {self}")

    def is_identity(self, t: float | Tensor) -> bool:
        """Whether a step from t that is not the last never moves a token: it has nothing to train."""
        return float(t) == 0 and self.power > 1 and self.corrector == 0

    def marginal(self, x1: Tensor, t: float | Tensor) -> Tensor:
        """p_t(. | x1), (..., V); t in [0, 1] broadcasts to x1 (...,), e.g. (B, 1) to (B, D)."""
        kappa = checked_times(t, x1)[..., None] ** self.power
        clean = one_hot(*checked_tokens(self, x1), self.vocab_size)
        return kappa * clean + (1 - kappa) * self._source_law(x1.device)

    def rates(self, x: Tensor, x1: Tensor, t: float | Tensor) -> Tensor:
        """Q_t(x -> . | x1), (..., V), per unit of t; 0 at x itself. x, x1: (...,); 0 <= t < 1."""
        x, x1 = checked_tokens(self, x, x1)
        a, b = self._speeds(t)
        rates = a * one_hot(x1, self.vocab_size).double() + b * self._source_law(x.device)
        return rates.scatter(-1, x[..., None], 0.0)

    def log_kernel_column(self, x, x_next, t, h, jump: str = "exp", last: bool = False) -> Tensor:
        """log q(x_next | x, v) for every v: (..., V), -inf where impossible. x, x_next: (...,)."""
        x, x_next = checked_tokens(self, x, x_next)
        t, h = checked_step(t, h, jump)
        is_next, is_x = (one_hot(y, self.vocab_size).double() for y in (x_next, x))
        if last:
            return is_next.log()
        c0, c1, c2 = self.coefficients(x, x_next, t, h, jump)[..., None].unbind(-2)
        return (c0 + c1 * is_next + c2 * is_x).log()

    def coefficients(self, x, x_next, t, h, jump: str = "exp") -> Tensor:
        """(C0, C1, C2) >= 0, (..., 3): q(x_next | x, v) = C0 + C1 [v = x_next] + C2 [v = x], unless last.

        So sum_v p(v) q(x_next | x, v) = C0 + C1 p(x_next) + C2 p(x), whatever V is. With a, b the speeds
        towards x1 and p_0, total rates l0 = b (1 - p_0(x)) if x1 = x, l1 = a + l0 if not, f(l) = J(h l) / l:
            stay       1 - J(h l1),       J(h l1) - J(h l0),    0
            move to y  b p_0(y) f(l1),    a f(l1),              b p_0(y) (f(l0) - f(l1))
        """
        t, h = checked_step(t, h, jump)
        return _rows(self, self._coefficients, *checked_tokens(self, x, x_next), t, h, jump)

    def _coefficients(self, x, x_next, t, h, jump: str) -> Tensor:
        source_law, (a, b) = self._source_law(x.device), self._speeds(t)
        rate0 = b * (1 - source_law[x])
        jump0, jump1 = _jump_chance(h * rate0, jump), _jump_chance(h * (rate0 + a), jump)
        f0, f1 = torch.where(rate0 > 0, jump0 / rate0, h), torch.where(rate0 + a > 0, jump1 / (rate0 + a), h)
        back, zero = b * source_law[x_next], torch.zeros_like(rate0)
        stay, move = (1 - jump1, jump1 - jump0, zero), (back * f1, a * f1, back * (f0 - f1).clamp(min=0))
        return torch.stack([torch.where(x_next == x, *pair) for pair in zip(stay, move, strict=True)], -1)

    def _speeds(self, t: float | Tensor) -> tuple[float, float]:
        """(1 + c) kappa' / (1 - kappa) and c kappa' / kappa."""
        t = checked_start(t)
        if t == 0 and (self.corrector > 0 or self.power < 1):
            raise ValueError("at t = 0 the rates are infinite for corrector > 0 or power < 1")
        a = (1 + self.corrector) * self.power * t ** (self.power - 1) / (1 - t**self.power)
        return a, self.corrector * self.power / t if self.corrector else 0.0

    def _source_law(self, device) -> Tensor:
        if self.mask_id is None:
            return torch.full((self.vocab_size,), 1 / self.vocab_size, dtype=torch.float64, device=device)
        return one_hot(torch.tensor(self.mask_id, device=device), self.vocab_size).double()


class MetricPath:
    """p_t(x | x1) = softmax_x(-beta d(x, x1)), beta = c (t / (1 - t))^a (FUDOKI, arXiv 2505.20147).

    Its rates Q_t(x -> y | x1) = p_t(y | x1) beta' [d(x, x1) - d(y, x1)]_+ move tokens strictly closer to x1.
    At t = 0 beta' is 0 for a > 1, and set to 0 (FUDOKI) for a < 1, where it is infinite: an identity step.
    lambda = beta' mu (module `distances`); mu is computed once per t and remembered.
    distance: (V, V), [x, x1], >= 0 and smallest at x = x1, perhaps not symmetric; or an EmbeddingDistance.
    Tokens are on its device. Raises ValueError for other matrices, and for c or a <= 0.
    Pinned by test_rates_carry_their_path, test_kernel_is_its_definition, test_table_error_is_bounded.
    """

    kernel, _computed_kernel = _kernel, _computed_kernel
    sample, draw_source = _sample, _draw_source

    def __init__(self, distance: Tensor | DistanceMatrix | EmbeddingDistance, c: float = 3.0, a: float = 0.9):
        if not (0 < c < math.inf and 0 < a < math.inf):
            raise ValueError(f"a metric path needs c > 0 and a > 0, not {c} and {a}")
        self.distance = DistanceMatrix(distance) if isinstance(distance, Tensor) else distance
        self.c, self.a, self.vocab_size = c, a, len(self.distance.tensor)
        self.remembered = {}

    @classmethod
    def from_embeddings(cls, weight: Tensor, c: float = 3.0, a: float = 0.9, exact: bool | None = None):
        """With FUDOKI's distance between the rows of weight (V, E); `exact` as in `embedding_distance`."""
        return cls(embedding_distance(weight, exact), c, a)

    def is_identity(self, t: float | Tensor) -> bool:
        """Whether a step from t that is not the last never moves a token: it has nothing to train."""
        return self._beta_and_speed(checked_start(t))[1] == 0

    def marginal(self, x1: Tensor, t: float | Tensor) -> Tensor:
        """p_t(. | x1), (..., V); t in [0, 1] broadcasts to x1 (...,), e.g. (B, 1) to (B, D)."""
        t, (x1,) = checked_times(t, x1)[..., None], checked_tokens(self, x1)
        distance = self.distance.to_clean(x1)
        beta = self.c * (t / (1 - t).clamp(min=1e-300)) ** self.a
        law = (-beta.to(distance) * distance).softmax(-1)
        return torch.where(t < 1, law, one_hot(x1, self.vocab_size).to(law))

    def rates(self, x: Tensor, x1: Tensor, t: float | Tensor) -> Tensor:
        """Q_t(x -> . | x1), (..., V), per unit of t; 0 at x itself. x, x1: (...,); 0 <= t < 1."""
        x, x1 = checked_tokens(self, x, x1)
        (beta, speed), distance = self._beta_and_speed(checked_start(t)), self.distance.to_clean(x1)
        gap = (distance.gather(-1, x[..., None]) - distance).clamp(min=0)
        return (-beta * distance).softmax(-1) * gap * speed

    def log_kernel_column(self, x, x_next, t, h, jump: str = "exp", last: bool = False) -> Tensor:
        """log q(x_next | x, v) for every v: (..., V), -inf where impossible. x, x_next: (...,).

        In logarithms, as p_t underflows: a stay is log(1 - J(h lambda)), a move to y, with Z of p_t(. | v),
        -beta d(y, v) - log Z + log(beta' (d(x, v) - d(y, v))) + log(J(h lambda) / lambda).
        """
        x, x_next = checked_tokens(self, x, x_next)
        t, h = checked_step(t, h, jump)
        if last or self.is_identity(t):
            possible = one_hot(x_next, self.vocab_size) if last else (x == x_next)[..., None]
            return possible.expand(*x.shape, self.vocab_size).to(self.distance.tensor).log()
        return _rows(self, self._column, x, x_next, t, h, jump)

    def _column(self, x, x_next, t, h, jump: str) -> Tensor:
        beta, speed = self._beta_and_speed(t)
        log_z, table = self.distance.log_z_and_table(beta)

        def column(x, x_next):
            distance, distance_next = self.distance.from_symbol(x), self.distance.from_symbol(x_next)
            total = self.distance.look_up(table, x, distance) * speed
            chance = _jump_chance(h * total, jump)
            stay = -h * total if jump == "exp" else torch.log1p(-chance)
            factor = (distance - distance_next) * speed * (chance / total)
            move = factor.log() - beta * distance_next - log_z
            move = torch.where(distance_next < distance, move, -math.inf)
            return torch.where((x == x_next)[..., None], stay, move)

        return in_chunks(column, self.vocab_size, x, x_next)

    def _beta_and_speed(self, t: float) -> tuple[float, float]:
        """beta and beta' = d beta / dt; beta' is 0 at t = 0 where it is infinite."""
        odds = t / (1 - t)
        speed = self.c * self.a * odds ** (self.a - 1) / (1 - t) ** 2 if odds > 0 or self.a >= 1 else 0.0
        return self.c * odds**self.a, speed


def _jump_chance(z: Tensor, jump: str) -> Tensor:
    return -torch.expm1(-z) if jump == "exp" else z.clamp(max=1)
