"""Distances between the symbols of a vocabulary, and the rates of a metric path by them (for shared/ctmc.py).

A path has p(y | v) = softmax_y(-beta d(y, v)) and leaves x at a rate proportional to

    mu_v(D) = sum_y p(y | v) [D - d(y, v)]_+  at D = d(x, v),

convex and piecewise linear in D, with a knot at the distance of every symbol. A likelihood needs it at every
v. `DistanceMatrix` keeps all V^2 values and is exact. `EmbeddingDistance` never holds (V, V): it computes
distances from embeddings and tabulates mu_v, for a codebook of thousands of symbols. Same methods in both.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

EXACT_VOCABULARY = 2048  # up to here a (V, V) matrix of float64 takes 32 MiB at most
TABLE_POINTS = 512  # per clean symbol: 32 MiB of float32 at V = 16,384
FARTHEST = 4.0  # |e - e'|^2 of unit vectors
TABLES_KEPT = 32  # steps whose tables are remembered: a grid has fewer
CHUNK = 2**20  # entries of the largest temporary where a result is computed in chunks


def _log_z_and_table(distances, beta: float) -> tuple[Tensor, Tensor]:
    """log sum_y exp(-beta d(y, v)) of every v (V,), and `tabulate` of all v; remembered for each beta."""

    def profile(v):
        distance = distances.to_clean(v)  # (n, V)
        log_z = (-beta * distance).logsumexp(-1, keepdim=True)
        law = (-beta * distance - log_z).exp_()
        return torch.cat([log_z, distances.tabulate(distance, law)], -1)

    def tables():
        size = len(distances.tensor)
        profiles = in_chunks(profile, size, torch.arange(size, device=distances.tensor.device))
        return profiles[:, 0].clone(), profiles[:, 1:].contiguous()

    return remember(distances.remembered, beta, tables)


class DistanceMatrix:
    """d(x, v) from a matrix (V, V), [x, v]: finite and >= 0, else ValueError. Computes in float64."""

    log_z_and_table = _log_z_and_table

    def __init__(self, matrix: Tensor):
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
            raise ValueError(f"a distance must be a (V, V) matrix, V >= 2, not {tuple(matrix.shape)}")
        if not bool(((matrix >= 0) & (matrix < math.inf)).all()):
            raise ValueError("distances must be finite and >= 0")
        self.tensor, self.remembered = matrix.detach().double(), {}

    def from_symbol(self, x: Tensor) -> Tensor:
        """d(x, v) for every v: (..., V)."""
        return self.tensor[x]

    def to_clean(self, v: Tensor) -> Tensor:
        """d(y, v) for every y: (..., V)."""
        return self.tensor.T[v]

    def tabulate(self, distance: Tensor, law: Tensor) -> Tensor:
        """mu_v(d(x, v)) for every x: (n, V), from d(y, v) and p(y | v) of n symbols v, (n, V) each.

        The slope of mu_v is the mass at smaller distances. Its sum over sorted distances has terms >= 0 only:
        nothing cancels at small distances.
        """
        ordered, order = distance.sort(-1)
        mass = law.gather(-1, order).cumsum(-1)
        mu = pad((mass[..., :-1] * ordered.diff(dim=-1)).cumsum(-1), (1, 0))
        return torch.empty_like(mu).scatter_(-1, order, mu)

    def look_up(self, table: Tensor, x: Tensor, distance: Tensor) -> Tensor:
        """mu_v(d(x, v)) of every v: (n, V), from the table of all v; x (n,), distance = from_symbol(x)."""
        return table.T[x]


class EmbeddingDistance:
    """d(x, v) = s^2, s = |u_x - u_v|^2 = 2 - 2 cos in [0, 4], for unit vectors u (V, E), in their dtype.

    Dot products are in float64: in float32 a BLAS rounds differently for other numbers of rows, and one draw
    in a million or so would depend on the batch.

    mu_v is tabulated at D = s^2 for TABLE_POINTS uniform s, exactly, and linear in D between. It is convex:
        0 <= error <= (mass of p(. | v) inside the interval) * (width of the interval in D) / 4.
    A table takes V^2 operations, chunk by chunk. Pinned by test_ctmc.test_table_error_is_bounded.
    """

    log_z_and_table = _log_z_and_table

    def __init__(self, unit: Tensor):
        self.tensor, self.remembered = unit, {}
        self.unit = unit.double()

    def from_symbol(self, x: Tensor) -> Tensor:
        """d(x, v) for every v, exactly 0 at x: (..., V)."""
        cosine = (self.unit[x] @ self.unit.T).to(self.tensor)
        distance = cosine.mul_(-2).add_(2).clamp_(0, FARTHEST).square_()
        return distance.scatter_(-1, x[..., None], 0.0)

    to_clean = from_symbol

    def tabulate(self, distance: Tensor, law: Tensor) -> Tensor:
        """mu_v at the nodes: (n, TABLE_POINTS), from d(y, v) and p(y | v) of n symbols v, (n, V) each."""
        step = FARTHEST / (TABLE_POINTS - 1)
        nodes = (torch.arange(TABLE_POINTS, device=law.device, dtype=law.dtype) * step).square()
        cell = (distance.sqrt() / step).long().clamp_(max=TABLE_POINTS - 2)  # node <= distance < next node
        zeros = law.new_zeros(len(law), TABLE_POINTS - 1)
        mass = zeros.scatter_add(-1, cell, law)
        inside = zeros.scatter_add(-1, cell, (nodes[cell + 1] - distance).clamp_(min=0).mul_(law))
        return pad(((mass.cumsum(-1) - mass) * nodes.diff() + inside).cumsum(-1), (1, 0))

    def look_up(self, table: Tensor, x: Tensor, distance: Tensor) -> Tensor:
        """mu_v(d(x, v)) of every v: (n, V), from the table of all v; x (n,), distance = from_symbol(x)."""
        position = distance.T.contiguous().sqrt_().mul_((TABLE_POINTS - 1) / FARTHEST)
        cell = position.floor().clamp_(max=TABLE_POINTS - 2)  # (V, n): rows of the table stay in the cache
        share = (position.square_() - cell.square()) / (2 * cell + 1)  # in D, whose nodes are squares
        cell = cell.long()
        below, above = table.gather(1, cell), table.gather(1, cell + 1)
        return torch.lerp(below, above, share).T.contiguous()


def embedding_distance(weight: Tensor, exact: bool | None = None) -> DistanceMatrix | EmbeddingDistance:
    """FUDOKI's distance d(x, v) = (|e_x / |e_x| - e_v / |e_v||^2)^2 between the rows of weight (V, E).

    exact: as a matrix of float64; the default for V <= EXACT_VOCABULARY. If not, distances are dot products
    in the dtype of weight, at least float32, and mu is interpolated: a matrix of 16,384 symbols and its mu at
    8 times t would take 18 GiB. Raises ValueError unless every embedding is finite and not 0.
    """
    weight = weight.detach()
    norm = weight.double().norm(dim=-1, keepdim=True)
    if weight.ndim != 2 or len(weight) < 2 or not bool(((norm > 0) & (norm < math.inf)).all()):
        raise ValueError("embeddings must be a (V, E) matrix, V >= 2, whose rows are finite and not 0")
    unit = weight.double() / norm
    if exact or (exact is None and len(unit) <= EXACT_VOCABULARY):
        return DistanceMatrix((2 - 2 * unit @ unit.T).clamp(min=0).square().fill_diagonal_(0))
    return EmbeddingDistance(unit.to(torch.promote_types(weight.dtype, torch.float32)))


def remember(kept: dict, key, make):
    """kept[key], which make() gives if it is not there. The oldest of more than TABLES_KEPT leaves."""
    if key not in kept:
        made = make()
        if len(kept) >= TABLES_KEPT:
            del kept[next(iter(kept))]
        kept[key] = made
    return kept[key]


def in_chunks(function, width: int, *rows: Tensor) -> Tensor:
    """function(*rows) for row tensors of one shape (...,), with (n,) entries at a time, each of which needs
    memory for `width` numbers a few times over; results are (n, ...). Returns (..., ...)."""
    shape, size = rows[0].shape, max(1, CHUNK // width)
    parts = [function(*part) for part in zip(*(r.reshape(-1).split(size) for r in rows), strict=True)]
    result = torch.cat(parts)
    return result.reshape(shape + result.shape[1:])
