"""The discrete contract functions as literally as their equations read: `oracle.chain`, entry by entry.

The checks use them for what a checked file does not have, and the named wrong versions depart from them.
tests/test_oracle_discrete.py holds them against independent means. Arguments and results are those of the
contract; t and h are Python floats.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from oracle import chain
from oracle.chain import Step


def entrywise(function: Callable, *tensors: Tensor) -> Tensor:
    """A function of symbols that returns a list, at every entry of some tensors of symbols: (..., V)."""
    tensors = torch.broadcast_tensors(*tensors)
    entries = list(zip(*(t.flatten().tolist() for t in tensors), strict=True))
    rows = {symbols: function(*symbols) for symbols in set(entries)}
    return torch.tensor([rows[symbols] for symbols in entries], dtype=torch.float64).reshape(
        *tensors[0].shape, -1
    )


class Path:
    """A path of `oracle.chain` with the methods of the contract. Its step by symbols can be exchanged."""

    def __init__(self, law: chain.Path):
        self.law = law

    def rate_list(self, x: int, v: int, t: float) -> list[float]:
        """Q_t(x -> . | v)."""
        return chain.rates(self.law, x, v, t)

    def log_kernel_list(self, x: int, v: int, step: Step) -> list[float]:
        """log q(. | x, v)."""
        t, h, last, jump = step
        return [chain.log_kernel(self.law, x, y, v, t, h, jump, last) for y in range(self.law.vocab_size)]

    def rates(self, x: Tensor, x1: Tensor, t: float) -> Tensor:
        """Q_t(x -> . | x1), 0 at x itself. x, x1 (...). Returns (..., V)."""
        return entrywise(lambda x, v: self.rate_list(x, v, t), x, x1)

    def kernel(
        self, x: Tensor, x1: Tensor, t: float, h: float, jump: str = "exp", last: bool = False
    ) -> Tensor:
        """q(. | x, x1). x, x1 (...). Returns (..., V)."""
        step = Step(t, h, last, jump)
        return entrywise(lambda x, v: [math.exp(p) for p in self.log_kernel_list(x, v, step)], x, x1)

    def log_kernel_column(
        self, x: Tensor, x_next: Tensor, t: float, h: float, jump: str = "exp", last: bool = False
    ) -> Tensor:
        """log q(x_next | x, v) for every v. x, x_next (...). Returns (..., V)."""
        step, V = Step(t, h, last, jump), range(self.law.vocab_size)
        return entrywise(lambda x, y: [self.log_kernel_list(x, v, step)[y] for v in V], x, x_next)


class MixturePath(Path):
    """`chain.Mixture`."""

    def __init__(
        self,
        vocab_size: int,
        source: str = "uniform",
        mask_id: int | None = None,
        power: float = 1.0,
        corrector: float = 0.0,
    ):
        super().__init__(chain.Mixture(vocab_size, source, mask_id, power, corrector))


class MetricPath(Path):
    """`chain.Metric`. distance (V, V)."""

    def __init__(self, distance: Tensor, c: float = 3.0, a: float = 0.9):
        super().__init__(chain.Metric(tuple(map(tuple, distance.tolist())), c, a))

    @classmethod
    def from_embeddings(cls, weight: Tensor) -> "MetricPath":
        """`chain.fudoki_distance`. weight (V, E)."""
        return cls(torch.tensor(chain.fudoki_distance(weight.tolist()), dtype=torch.float64))


def transition_log_prob(
    path: Path, logits: Tensor, x: Tensor, x_next: Tensor, t: float, h: float, *, jump: str = "exp",
    last: bool = False,
) -> Tensor:  # fmt: skip
    """log sum over v of p(v) q(x_next | x, v). logits (..., V), x, x_next (...). Returns (...)."""
    column = path.log_kernel_column(x, x_next, t, h, jump=jump, last=last)
    return torch.logsumexp(logits.log_softmax(-1) + column, -1)


def gather(values: Tensor, symbols: Tensor) -> Tensor:
    """values[..., symbol]. values (..., V), symbols (...) or (n, ...). Returns the shape of symbols."""
    return values.expand(*symbols.shape, -1).gather(-1, symbols[..., None])[..., 0]


def mc_log_ratio(
    path: Path, log_p_new: Tensor, log_p_old: Tensor, x: Tensor, x_next: Tensor, draws: Tensor, t: float,
    h: float, *, jump: str = "exp",
) -> Tensor:  # fmt: skip
    """log(sum_j q_j p_new(X_j)/p_old(X_j) / sum_j q_j), q_j = q(x_next | x, X_j). log_p_* (..., V), x, x_next
    (...), draws (n, ...), the first of which is the X1 that was used. Returns (...)."""
    weights = gather(path.log_kernel_column(x, x_next, t, h, jump=jump, last=False), draws).exp()
    ratios = (gather(log_p_new, draws) - gather(log_p_old, draws)).exp()
    return ((weights * ratios).sum(0) / weights.sum(0)).log()


def aggregate(log_ratio: Tensor, mask: Tensor, how: str) -> Tensor:
    """Over the tokens inside the mask: the sum (product), the mean (geometric), or every token's own, 0
    outside (token). log_ratio, mask (B, D). Returns (B,), (B, D) for token."""
    rows = [chain.aggregate(row, kept, how) for row, kept in zip(log_ratio, mask.tolist(), strict=True)]
    stacked = torch.stack([torch.stack([torch.as_tensor(v) for v in row]) for row in rows])
    return stacked if how == "token" else stacked[:, 0]


def posterior_kl(logits: Tensor, logits_ref: Tensor) -> Tensor:
    """sum over v of p(v) log(p(v)/p_ref(v)), where p(v) > 0. logits, logits_ref (..., V). Returns (...)."""
    log_p, log_ref = logits.log_softmax(-1), logits_ref.log_softmax(-1)
    gap = torch.where(log_p > -torch.inf, log_p - log_ref, 0.0)
    return (log_p.exp() * gap).sum(-1)


def sample_step(
    path: Path, logits: Tensor, x: Tensor, t: float, h: float, *, jump: str = "exp", last: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """X1 ~ p(.), x_next ~ q(. | x, X1). logits (..., V), x (...). Returns x_next and X1, (...) each."""
    x1 = categorical(logits.softmax(-1), generator)
    return categorical(path.kernel(x, x1, t, h, jump=jump, last=last), generator), x1


def categorical(chances: Tensor, generator: torch.Generator | None) -> Tensor:
    """One symbol for every row of chances (..., V). Returns (...)."""
    drawn = torch.multinomial(chances.flatten(0, -2), 1, generator=generator)
    return drawn.reshape(chances.shape[:-1])


PATHS: dict[str, type] = {"MixturePath": MixturePath, "MetricPath": MetricPath}
DISCRETE: Iterable[Callable] = (
    MixturePath, MetricPath, transition_log_prob, sample_step, mc_log_ratio, aggregate, posterior_kl,
)  # fmt: skip
