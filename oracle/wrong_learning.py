"""Named wrong versions of the advantages, the surrogate and the weights of replayed samples."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracle import definitions as exact
from oracle.checks import Wrong


def masked(r: Tensor, advantages: Tensor) -> Tensor:
    """0 for groups of equal rewards."""
    return torch.where(r.amax(1, keepdim=True) == r.amin(1, keepdim=True), torch.zeros_like(r), advantages)


def normalised(
    *,
    center: Callable = lambda r: r.mean(1, keepdim=True),
    group_std: Callable = lambda r: r.std(1, keepdim=True, correction=0),
    batch_std: Callable = lambda r: r.std((0, 1), keepdim=True, correction=0),
    divisor: Callable = lambda std, eps: std + eps,
    none: Callable = lambda r, eps: 1.0,
    bound: Callable = lambda A, clamp: A.clamp(-clamp, clamp),
    equal: Callable = masked,
) -> Callable:
    """`group_advantages` with some of its ingredients exchanged."""

    def group_advantages(rewards, std="group", eps=1e-4, clamp=5.0):
        r = rewards.double()
        spread = {"group": group_std, "batch": batch_std}
        below = none(r, eps) if std == "none" else divisor(spread[std](r), eps)
        return bound(equal(r, (r - center(r)) / below), clamp)

    return group_advantages


def other_std(used: str) -> Callable:
    return lambda rewards, std="group", **rest: exact.group_advantages(rewards, std=used, **rest)


def sample_std(r: Tensor, axes) -> Tensor:
    return r.std(axes, keepdim=True, correction=1)


ADVANTAGES = {
    "the std is the unbiased one (divided by G - 1): it must be the population std": normalised(
        group_std=lambda r: sample_std(r, 1), batch_std=lambda r: sample_std(r, (0, 1))
    ),
    "the unbiased std gives NaN for a group of one": normalised(
        group_std=lambda r: sample_std(r, 1), equal=lambda r, A: A
    ),
    "the mean is that of the whole batch: it must be the group's": normalised(
        center=lambda r: r.mean((0, 1), keepdim=True)
    ),
    "mean and std run over the prompts, not over the group: the wrong axis": normalised(
        center=lambda r: r.mean(0, keepdim=True), group_std=lambda r: r.std(0, keepdim=True, correction=0)
    ),
    "the std runs over the prompts, not over the group: the wrong axis": normalised(
        group_std=lambda r: r.std(0, keepdim=True, correction=0)
    ),
    "mean and std run over the steps too: each step must be normalised by itself": normalised(
        center=lambda r: r.mean(tuple(range(1, r.dim())), keepdim=True),
        group_std=lambda r: r.std(tuple(range(1, r.dim())), keepdim=True, correction=0),
        batch_std=lambda r: r.std(correction=0),
    ),
    "mean and std run over the steps, not over the group": normalised(
        center=lambda r: r.mean(-1, keepdim=True), group_std=lambda r: r.std(-1, keepdim=True, correction=0)
    ),
    "the std runs over the steps too: each step must be normalised by itself": normalised(
        group_std=lambda r: r.std(tuple(range(1, r.dim())), keepdim=True, correction=0),
        batch_std=lambda r: r.std(correction=0),
    ),
    "the batch std runs over the steps too": normalised(batch_std=lambda r: r.std(correction=0)),
    "the batch std is that of the centred rewards: it must be that of the rewards": normalised(
        batch_std=lambda r: (r - r.mean(1, keepdim=True)).std((0, 1), keepdim=True, correction=0)
    ),
    "the batch std is the mean of the groups' stds": normalised(
        batch_std=lambda r: r.std(1, keepdim=True, correction=0).mean(0, keepdim=True)
    ),
    "std is ignored: the group's is used always": other_std("group"),
    "std is ignored: the batch's is used always": other_std("batch"),
    "the rewards are not divided by the std": other_std("none"),
    "the default std is not the group's": lambda rewards, std="batch", **k: exact.group_advantages(
        rewards, std, **k
    ),
    "std = none still divides by the std": normalised(
        none=lambda r, eps: r.std(1, keepdim=True, correction=0) + eps
    ),
    "std = none still divides by 1 + eps": normalised(none=lambda r, eps: 1 + eps),
    "the rewards are not centred": normalised(center=lambda r: 0.0, equal=lambda r, A: A),
    "the baseline leaves the sample itself out: it must be the group's mean": normalised(
        center=lambda r: (r.sum(1, keepdim=True) - r) / (r.shape[1] - 1)
    ),
    "the baseline is the median": normalised(center=lambda r: r.median(1, keepdim=True).values),
    "the sign is wrong: bad samples are reinforced": lambda *a, **k: -exact.group_advantages(*a, **k),
    "eps is missing: small stds blow the advantages up": normalised(divisor=lambda std, eps: std),
    "eps is fixed: the argument is ignored": normalised(divisor=lambda std, eps: std + 1e-4),
    "eps is added to the variance, inside the square root": normalised(
        divisor=lambda s, eps: (s**2 + eps).sqrt()
    ),
    "eps is a lower bound of the std: it must be added": normalised(divisor=lambda s, eps: s.clamp(min=eps)),
    "eps is 1e-8: it must be 1e-4": lambda rewards, std="group", eps=1e-8, clamp=5.0: exact.group_advantages(
        rewards, std, eps, clamp
    ),
    "eps is 1e-6: it must be 1e-4": lambda rewards, std="group", eps=1e-6, clamp=5.0: exact.group_advantages(
        rewards, std, eps, clamp
    ),
    "the advantages are divided by the variance": normalised(divisor=lambda std, eps: std**2 + eps),
    "the advantages are not clamped": normalised(bound=lambda A, clamp: A),
    "the clamp is fixed at 5: the argument is ignored": normalised(bound=lambda A, clamp: A.clamp(-5, 5)),
    "the clamp holds on the positive side only": normalised(bound=lambda A, clamp: A.clamp(max=clamp)),
    "the clamp holds on the negative side only": normalised(bound=lambda A, clamp: A.clamp(min=-clamp)),
    "a group of equal rewards is left with the rounding of its mean: it must get exactly 0": normalised(
        equal=lambda r, A: A
    ),
}


def surrogate(
    *,
    ratio: Callable = lambda new, old: torch.exp(new - old.detach()),
    clip: Callable = lambda ratio, c: ratio.clamp(1 - c, 1 + c),
    worse: Callable = torch.maximum,
    advantage: Callable = lambda A: A.detach(),
    weigh: Callable = lambda loss, w: w.detach() * loss,
    reduce: Callable = lambda loss, A, w: loss.mean(),
    sign: float = -1.0,
    bound: Callable = lambda loss, A: loss,
) -> Callable:
    """`clipped_surrogate` with some of its ingredients exchanged."""

    def clipped_surrogate(log_prob_new, log_prob_old, advantages, clip_range, weights=None):
        A, r = advantage(advantages), ratio(log_prob_new, log_prob_old)
        loss = bound(worse(sign * A * r, sign * A * clip(r, clip_range)), A)
        loss = loss if weights is None else weigh(loss, weights)
        return reduce(loss, advantages, weights), {}

    return clipped_surrogate


def weights_inside(new, old, A, clip_range, weights=None):
    ratio = torch.exp(new - old.detach()) * (1.0 if weights is None else weights.detach())
    return torch.maximum(-A * ratio, -A * ratio.clamp(1 - clip_range, 1 + clip_range)).mean(), {}


def weights_unclipped_only(new, old, A, clip_range, weights=None):
    ratio, w = torch.exp(new - old.detach()), 1.0 if weights is None else weights.detach()
    return torch.maximum(-A * ratio * w, -A * ratio.clamp(1 - clip_range, 1 + clip_range)).mean(), {}


SURROGATE = {
    "the ratio is detached: the loss has no gradient and nothing is learned": surrogate(
        ratio=lambda new, old: torch.exp(new - old).detach()
    ),
    "min stands for max: the surrogate is the optimistic one and the clip does not bound it": surrogate(
        worse=torch.minimum
    ),
    "old and new are swapped: the ratio is inverted": surrogate(
        ratio=lambda new, old: torch.exp(old.detach() - new)
    ),
    "the sign is wrong: the loss is ascended": surrogate(worse=torch.minimum, sign=1.0),
    "the ratio is the difference of the log-probs: exp is missing": surrogate(
        ratio=lambda new, old: new - old.detach()
    ),
    "the ratio is 1 + the difference of the log-probs: exp is missing": surrogate(
        ratio=lambda new, old: 1 + new - old.detach()
    ),
    "there is no clip": surrogate(clip=lambda ratio, c: ratio),
    "only the clipped ratio is used: the max with the unclipped one is missing": surrogate(
        worse=lambda plain, clipped: clipped
    ),
    "the ratio is clipped from above only": surrogate(clip=lambda ratio, c: ratio.clamp(max=1 + c)),
    "the ratio is clipped from below only": surrogate(clip=lambda ratio, c: ratio.clamp(min=1 - c)),
    "the clip range is 0 .. clip_range: it must lie around 1": surrogate(
        clip=lambda ratio, c: ratio.clamp(-c, c)
    ),
    "the clip range is 1/(1 + c) .. 1 + c: it must be 1 - c .. 1 + c": surrogate(
        clip=lambda ratio, c: ratio.clamp(1 / (1 + c), 1 + c)
    ),
    "the log-ratio is clipped, not the ratio": surrogate(
        clip=lambda r, c: r.clamp(math.exp(-c), math.exp(c))
    ),
    "the clip range is twice as wide": surrogate(clip=lambda ratio, c: ratio.clamp(1 - 2 * c, 1 + 2 * c)),
    "the clip range is half as wide": surrogate(clip=lambda ratio, c: ratio.clamp(1 - c / 2, 1 + c / 2)),
    "a second clip bounds the loss of A < 0 at large ratios (dual-clip PPO)": surrogate(
        bound=lambda loss, A: torch.where(A < 0, torch.minimum(loss, -3 * A), loss)
    ),
    "the advantages are clamped to +-5 inside the loss": surrogate(
        advantage=lambda A: A.detach().clamp(-5, 5)
    ),
    "the loss is the sum over the samples: it must be their mean": surrogate(
        reduce=lambda loss, A, w: loss.sum()
    ),
    "the loss is summed over the steps and averaged over the samples": surrogate(
        reduce=lambda loss, A, w: loss.sum() / len(loss)
    ),
    "the loss is averaged over the samples of non-zero advantage only": surrogate(
        reduce=lambda loss, A, w: loss.sum() / (A != 0).sum()
    ),
    "the weights are ignored": surrogate(weigh=lambda loss, w: loss),
    "the weights are inverted: the loss is divided by them": surrogate(
        weigh=lambda loss, w: loss / w.detach()
    ),
    "the weights are normalised: the loss is divided by their sum": surrogate(
        reduce=lambda loss, A, w: loss.mean() if w is None else loss.sum() / w.detach().sum()
    ),
    "the weights are capped at 1": surrogate(weigh=lambda loss, w: loss * w.detach().clamp(max=1)),
    "the weights enter squared": surrogate(weigh=lambda loss, w: loss * w.detach() ** 2),
    "the weights stand inside the clip: the weighted ratio is clipped, like p_theta/p_off": weights_inside,
    "the weights multiply the unclipped term only": weights_unclipped_only,
    "gradient flows through the weights": surrogate(weigh=lambda loss, w: w * loss),
    "gradient flows through the advantages": surrogate(advantage=lambda A: A),
    "gradient flows through log_prob_old": surrogate(ratio=lambda new, old: torch.exp(new - old)),
    "gradient flows through the advantages, the weights and log_prob_old": surrogate(
        ratio=lambda new, old: torch.exp(new - old), advantage=lambda A: A, weigh=lambda loss, w: w * loss
    ),
    "the advantages are taken without their sign": surrogate(advantage=lambda A: A.detach().abs()),
}


WEIGHT = {
    "the weight is inverted: it is p_off / p_old": lambda old, off: torch.exp((off - old).sum(1)),
    "the weight is the geometric mean of the steps': it must be their product": lambda old, off: torch.exp(
        (old - off).mean(1)
    ),
    "the weight is the sum of the steps' ratios: it must be their product": lambda old, off: (
        (old - off).exp().sum(1)
    ),
    "the weight is the mean of the steps' ratios: it must be their product": lambda old, off: (
        (old - off).exp().mean(1)
    ),
    "exp is missing: it is the logarithm of the weight": lambda old, off: (old - off).sum(1),
    "p_off is missing: the weight is p_old": lambda old, off: old.sum(1).exp(),
    "only the last step of the prefix counts": lambda old, off: (old - off)[:, -1].exp(),
    "only the first step of the prefix counts": lambda old, off: (old - off)[:, 0].exp(),
    "the first step of the prefix is left out": lambda old, off: (old - off)[:, 1:].sum(1).exp(),
    "the last step of the prefix is left out": lambda old, off: (old - off)[:, :-1].sum(1).exp(),
    "the weight is capped at 1": lambda old, off: (old - off).sum(1).exp().clamp(max=1),
    "the weight is capped at 10": lambda old, off: (old - off).sum(1).exp().clamp(max=10),
    "every step's ratio is capped at 1": lambda old, off: (old - off).exp().clamp(max=1).prod(1),
    "the weights are normalised to sum 1": lambda old, off: (old - off).sum(1).softmax(0),
    "the weights are normalised to mean 1": lambda old, off: (old - off).sum(1).softmax(0) * len(old),
    "the weight's logarithm has a factor 1/2": lambda old, off: ((old - off).sum(1) / 2).exp(),
    "all weights are 1: replayed samples are not corrected": lambda old, off: torch.ones(
        len(old), dtype=torch.float64
    ),
}

WRONG_LEARNING = [
    *(Wrong(sentence, {"group_advantages": f}) for sentence, f in ADVANTAGES.items()),
    *(Wrong(sentence, {"clipped_surrogate": f}) for sentence, f in SURROGATE.items()),
    *(Wrong(sentence, {"sequence_weight": f}) for sentence, f in WEIGHT.items()),
]
