"""Named wrong ways to put weights and surrogate together for replayed samples. Their functions are right."""

from collections.abc import Callable

import torch
from torch import Tensor

from oracle import definitions as exact
from oracle.checks import Wrong
from oracle.definitions import Replay


def before_prefix(r: Replay, inside: float, outside: float) -> Tensor:
    """(n,): one number for the steps of the prefix, another for the others."""
    return torch.tensor([inside] * r.prefix + [outside] * (r.log_new.shape[1] - r.prefix)).double()


def weight(r: Replay) -> Tensor:
    """The right weight, at every step: (B, n)."""
    return exact.sequence_weight(r.log_old[:, : r.prefix], r.log_off[:, : r.prefix])[:, None].expand_as(
        r.log_new
    )


def drawn_by(r: Replay) -> Tensor:
    """Log-density of every step under the policy that drew it: (B, n)."""
    return torch.cat([r.log_off[:, : r.prefix], r.log_old[:, r.prefix :]], 1)


def composed(
    *, old: Callable = lambda r: r.log_old, weights: Callable = weight, inside: Callable = lambda r: 0.0
) -> Callable:
    """`replayed_loss` with some of its ingredients exchanged; inside is added to the log-ratio."""

    def loss(f, r: Replay) -> Tensor:
        A, new = r.advantages[:, None].expand_as(r.log_new), r.log_new + inside(r)
        return f.clipped_surrogate(new, old(r), A, r.clip_range, weights=weights(r).expand_as(new))[0]

    return loss


def ones(r: Replay) -> Tensor:
    return torch.ones_like(r.log_new)


COMPOSED = {
    "the naive ratio p_theta/p_off stands in the clip, with no weight of the prefix: the ratio must be "
    "p_theta/p_old, times the weight outside the clip": composed(old=drawn_by, weights=ones),
    "the ratio is p_theta/p_off although the weight is there: it must be p_theta/p_old": composed(
        old=drawn_by
    ),
    "the weight runs over the whole trajectory although the suffix was sampled anew: it must end with the "
    "prefix": composed(weights=lambda r: exact.sequence_weight(r.log_old, r.log_off)[:, None]),
    "every step of the prefix has its own ratio p_old/p_off as weight: it must be their product": composed(
        weights=lambda r: (r.log_old - drawn_by(r)).exp()
    ),
    "the weight of a step ends with that step: it must be that of the whole prefix": composed(
        weights=lambda r: (r.log_old - drawn_by(r)).cumsum(1).exp()
    ),
    "the weight multiplies the steps of the prefix only: it must multiply the suffix, too": composed(
        weights=lambda r: weight(r) ** before_prefix(r, 1.0, 0.0)
    ),
    "the weight multiplies the suffix only: it must multiply the prefix, too": composed(
        weights=lambda r: weight(r) ** before_prefix(r, 0.0, 1.0)
    ),
    "the weight is p_theta/p_off: it must be p_old/p_off": composed(
        weights=lambda r: exact.sequence_weight(r.log_new[:, : r.prefix], r.log_off[:, : r.prefix])[:, None]
    ),
    "the steps of the prefix are not trained: their loss is left out": composed(
        weights=lambda r: weight(r) * before_prefix(r, 0.0, 1.0)
    ),
    "the steps of the suffix are not trained: their loss is left out": composed(
        weights=lambda r: weight(r) * before_prefix(r, 1.0, 0.0)
    ),
}
PARTS = {name: exact.DEFINITIONS[name] for name in ("sequence_weight", "clipped_surrogate")}
WRONG_REPLAY = [Wrong(sentence, PARTS, composition) for sentence, composition in COMPOSED.items()]
