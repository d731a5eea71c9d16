"""The contract functions once more, as literally as their equations read: slow, float64, no shortcuts. Those
of discrete flows stand in `oracle.definitions_discrete`.

The checks use them for the functions that a check does not look at, and the named wrong versions depart from
them. tests/test_oracle.py holds them against independent means. Arguments and results are those of the
contract; sigmas and step_std are Python floats.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oracle.definitions_discrete import DISCRETE
from oracle.gaussian import awarded_rewards, balanced_points, is_turning_point, step_coefficients


def shifted_sigmas(num_steps: int, shift: float = 1.0) -> Tensor:
    """sigma = shift s / (1 + (shift - 1) s) at s = 1 - k / num_steps (arXiv 2403.03206). Returns (N+1,)."""
    linear = [1 - k / num_steps for k in range(num_steps + 1)]
    return torch.tensor([shift * s / (1 + (shift - 1) * s) for s in linear], dtype=torch.float64)


def ode_step(x: Tensor, v: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """One Euler step of dx/dsigma = v from sigma to sigma_next. x, v (B, *E). Returns (B, *E)."""
    return x + v * (sigma_next - sigma)


def transition(
    x: Tensor,
    v: Tensor,
    sigma: float,
    sigma_next: float,
    *,
    noise_level: float,
    sigma_clip: float,
    kind: str = "flow",
) -> tuple[Tensor, Tensor]:
    """Moments of one stochastic step: `step_coefficients` applied. x, v (B, *E). Returns (B, *E) and ()."""
    on_x, on_v, std = step_coefficients(sigma, sigma_next, kind, noise_level, sigma_clip)
    return on_x * x + on_v * v, torch.tensor(std, dtype=torch.float64)


def gaussian_log_prob(x_next: Tensor, mean: Tensor, step_std: float) -> Tensor:
    """-|x_next - mean|^2 / (2 std^2) - E/2 log(2 pi std^2) for E entries. x_next, mean (B, *E). To (B,)."""
    variance = float(step_std) ** 2
    square = ((x_next - mean) ** 2).reshape(len(mean), -1).sum(1)
    return -square / (2 * variance) - mean[0].numel() / 2 * math.log(2 * math.pi * variance)


def gaussian_kl(mean: Tensor, mean_ref: Tensor, step_std: float) -> Tensor:
    """|mean - mean_ref|^2 / (2 std^2). mean, mean_ref (B, *E). Returns (B,)."""
    return ((mean - mean_ref) ** 2).reshape(len(mean), -1).sum(1) / (2 * float(step_std) ** 2)


def group_advantages(rewards: Tensor, std: str = "group", eps: float = 1e-4, clamp: float = 5.0) -> Tensor:
    """(r - mean_group) / (population std + eps) within +-clamp, for every prompt and step by itself."""
    if rewards.dim() == 3:
        columns = [group_advantages(rewards[..., j], std, eps, clamp) for j in range(rewards.shape[2])]
        return torch.stack(columns, dim=2)
    rows = rewards.tolist()
    batch_std = spread([r for row in rows for r in row])
    result = []
    for row in rows:
        divisor = {"group": spread(row) + eps, "batch": batch_std + eps, "none": 1.0}[std]
        middle = math.fsum(row) / len(row)
        scaled = [0.0 if max(row) == min(row) else (r - middle) / divisor for r in row]
        result.append([min(max(a, -clamp), clamp) for a in scaled])
    return torch.tensor(result, dtype=torch.float64)


def spread(values: list[float]) -> float:
    """The population standard deviation."""
    middle = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


def clipped_surrogate(
    log_prob_new: Tensor,
    log_prob_old: Tensor,
    advantages: Tensor,
    clip_range: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mean of -w A ratio, with ratio held at the clip range where going on would still pay (arXiv
    1707.06347, Eq. 7): above 1 + clip_range for A > 0, below 1 - clip_range for A < 0."""
    ratio = torch.exp(log_prob_new - log_prob_old.detach())
    ratio = torch.where((advantages > 0) & (ratio > 1 + clip_range), 1 + clip_range, ratio)
    ratio = torch.where((advantages < 0) & (ratio < 1 - clip_range), 1 - clip_range, ratio)
    weights = torch.ones_like(ratio) if weights is None else weights
    return -(weights.detach() * advantages.detach() * ratio).sum() / ratio.numel(), {}


def surrogate_gradient(
    log_prob_new: Tensor, log_prob_old: Tensor, advantages: Tensor, clip_range: float, weights: Tensor
) -> Tensor:
    """The surrogate's derivative in log_prob_new, in numpy: -w A ratio / count, and 0 where it is clipped."""
    new, old, A, w = (t.detach().numpy() for t in (log_prob_new, log_prob_old, advantages, weights))
    ratio = np.exp(new - old)
    clipped = (A > 0) * (ratio > 1 + clip_range) + (A < 0) * (ratio < 1 - clip_range)
    return torch.from_numpy((1 - clipped) * -w * A * ratio / ratio.size)


def incremental_rewards(R: Tensor) -> Tensor:
    """d[j] = R[j] - R[j-1] (arXiv 2602.06422, Eq. 7). R (..., n+1). Returns (..., n)."""
    return torch.stack([R[..., j] - R[..., j - 1] for j in range(1, R.shape[-1])], dim=-1)


def turning_points(R: Tensor, rule: str = "consistent", tolerance: float = 0.0) -> Tensor:
    """`is_turning_point` for every trajectory and step. R (..., n+1). Returns bool (..., n)."""
    n = R.shape[-1] - 1
    rows = R.reshape(-1, n + 1).tolist()
    points = [[is_turning_point(row, j, rule, tolerance) for j in range(1, n + 1)] for row in rows]
    return torch.tensor(points, dtype=torch.bool).reshape(*R.shape[:-1], n)


def balance(mask: Tensor, r_agg: Tensor) -> Tensor:
    """`balanced_points` over the whole batch. mask, r_agg: equal shapes. Returns bool."""
    kept = balanced_points(mask.flatten().tolist(), r_agg.flatten().tolist())
    return torch.tensor(kept, dtype=torch.bool).reshape(mask.shape)


def step_rewards(
    R: Tensor, rule: str = "consistent", balanced: bool = True, tolerance: float = 0.0
) -> Tensor:
    """`awarded_rewards` of a batch of any shape. R (..., n+1). Returns (..., n)."""
    n = R.shape[-1] - 1
    rows = awarded_rewards(R.reshape(-1, n + 1).tolist(), rule, balanced, tolerance)
    return torch.tensor(rows, dtype=torch.float64).reshape(*R.shape[:-1], n)


def sequence_weight(log_prob_old: Tensor, log_prob_off: Tensor) -> Tensor:
    """prod over the prefix of p_old / p_off (arXiv 2604.04142). (B, prefix) each. Returns (B,)."""
    return torch.exp(log_prob_old - log_prob_off).prod(dim=1)


class Replay(NamedTuple):
    """Samples whose first `prefix` steps were drawn by the policy `off`, the others by `old`. B samples, n
    steps."""

    log_new: Tensor  # (B, n) log-density of every step under the policy that is optimised
    log_old: Tensor  # (B, n) under the policy at the start of the iteration
    log_off: Tensor  # (B, n) under the policy that sampled the stored trajectory
    prefix: int
    advantages: Tensor  # (B,)
    clip_range: float


def replayed_loss(f: Any, r: Replay) -> Tensor:
    """The corrected objective (arXiv 2604.04142): the clipped loss of every step, ratio p_new/p_old, times
    the constant w = prod over the prefix of p_old/p_off. f: functions as attributes. Returns ()."""
    w = f.sequence_weight(r.log_old[:, : r.prefix], r.log_off[:, : r.prefix])
    A, weights = (t[:, None].expand_as(r.log_new) for t in (r.advantages, w))
    return f.clipped_surrogate(r.log_new, r.log_old, A, r.clip_range, weights=weights)[0]


DEFINITIONS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        shifted_sigmas, ode_step, transition, gaussian_log_prob, gaussian_kl, group_advantages,
        clipped_surrogate, incremental_rewards, turning_points, balance, step_rewards, sequence_weight,
        *DISCRETE,
    )
}  # fmt: skip
