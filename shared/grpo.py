"""Group-relative policy optimisation: advantages within a group, and the clipped surrogate. All algorithms
use both unchanged."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, std: str = "group", eps: float = 1e-4, clamp: float = 5.0) -> Tensor:
    """Rewards relative to their group: A = (r - mean_group) / (std + eps), clamped to [-clamp, clamp].

    rewards: (P, G) for P prompts of G samples each, or (P, G, n) for rewards per step, which are normalised
             step by step.
    std:     "group": population standard deviation over the group (GRPO, arXiv 2402.03300); "batch": over all
             P G rewards of the step (Flow-GRPO's published runs); "none": 1, no division at all (arXiv
             2503.20783).
    Returns a tensor like rewards; statistics are computed in float64. A group whose rewards are all equal
    gets exactly 0.
    Raises ValueError for another shape, an unknown std, or a reward that is not finite.
    """
    if rewards.dim() not in (2, 3):
        raise ValueError(f"rewards must be (P, G) or (P, G, n), not {tuple(rewards.shape)}")
    if std not in ("group", "batch", "none"):
        raise ValueError(f'std must be "group", "batch" or "none", not {std!r}')
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    r = rewards.double()
    centered = r - r.mean(dim=1, keepdim=True)
    if std == "none":
        advantages = centered
    else:
        axes = 1 if std == "group" else (0, 1)
        advantages = centered / (r.std(dim=axes, keepdim=True, correction=0) + eps)
    all_equal = r.amax(dim=1, keepdim=True) == r.amin(
        dim=1, keepdim=True
    )  # (P, 1[, n]); the mean may be off by a rounding
    return advantages.masked_fill(all_equal, 0.0).clamp(-clamp, clamp).to(rewards.dtype)


def weight_metrics(weights: Tensor, used: Tensor) -> dict[str, float | None]:
    """How uneven importance weights are. All are None if there are none.

    weights, used: (R,), as they are and as capped. Returns weight_mean, weight_max and weight_ess of the used
    ones, the last being (sum w)^2 / (R sum w^2), the effective share of the samples (0 if all are 0), and
    log_weight_mean of the others, within the range of their dtype.
    """
    names = ("weight_mean", "weight_max", "weight_ess", "log_weight_mean")
    if len(weights) == 0:
        return dict.fromkeys(names)
    bounds = torch.finfo(weights.dtype)
    scaled = used / used.max().clamp(min=bounds.tiny)
    share = scaled.mean() ** 2 / (scaled**2).mean().clamp(min=bounds.tiny)
    values = (used.mean(), used.max(), share, weights.clamp(bounds.tiny, bounds.max).log().mean())
    return {name: value.item() for name, value in zip(names, values, strict=True)}


def clipped_surrogate(
    log_prob_new: Tensor,
    log_prob_old: Tensor,
    advantages: Tensor,
    clip_range: float | tuple[float, float],
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped surrogate loss (arXiv 1707.06347, Eq. 7), the mean over samples (and steps).

        ratio = exp(log_prob_new - log_prob_old)
        loss  = mean( w max(-A ratio, -A clip(ratio, 1 - below, 1 + above)) )

    clip_range: (below, above), or one number for both.
    log_prob_new, log_prob_old, advantages: equal shapes, (B,) or (B, n); both log-probs must use the same
    reduction (sum or mean over entries). weights: the same shape or None for 1. Gradient flows through
    log_prob_new alone.
    Returns the loss () and metrics: ratio_mean; ratio_deviation, the largest |ratio - 1|; clip_fraction, the
    share of ratios outside the clip range. Raises ValueError if shapes differ (broadcasting would pair the
    wrong samples).
    """
    others = [log_prob_old, advantages] + ([] if weights is None else [weights])
    if any(t.shape != log_prob_new.shape for t in others):
        raise ValueError(f"shapes must be equal: {[tuple(t.shape) for t in [log_prob_new, *others]]}")
    below, above = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    ratio = torch.exp(log_prob_new - log_prob_old.detach())
    advantages = advantages.detach()
    per_sample = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - below, 1 + above))
    if weights is not None:
        per_sample = weights.detach() * per_sample
    shift = ratio.detach() - 1
    metrics = {
        "ratio_mean": ratio.detach().mean().item(),
        "ratio_deviation": shift.abs().max().item(),
        "clip_fraction": ((shift < -below) | (shift > above)).float().mean().item(),
    }
    return per_sample.mean(), metrics
