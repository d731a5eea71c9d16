"""Named wrong versions of the incremental rewards, the turning points, balancing and the step rewards."""

from collections.abc import Callable

import torch
from torch import Tensor

from oracle import definitions as exact
from oracle.checks import Wrong

INCREMENTS = {
    "the sign is wrong: R[j-1] - R[j]": lambda R: R[..., :-1] - R[..., 1:],
    "it is what remains, R[n] - R[j-1]: it must be R[j] - R[j-1]": lambda R: R[..., -1:] - R[..., :-1],
    "it is the change since the start, R[j] - R[0]": lambda R: R[..., 1:] - R[..., :1],
    "it is R[j] itself": lambda R: R[..., 1:],
    "the first step gets R[1] itself: R[0] is ignored": lambda R: torch.cat(
        [R[..., 1:2], R[..., 2:] - R[..., 1:-1]], -1
    ),
    "the steps are in reverse order": lambda R: (R[..., 1:] - R[..., :-1]).flip(-1),
    "the differences are taken as absolute values": lambda R: (R[..., 1:] - R[..., :-1]).abs(),
}


def signs(difference: Tensor, tolerance: float) -> Tensor:
    return torch.where(difference.abs() <= tolerance, 0.0, difference.sign())


def rule(
    *,
    sign: Callable = signs,
    before: Callable = lambda s: s < 0,
    now: Callable = lambda s: s > 0,
    rest: Callable = lambda R, sign: sign(R[..., -1:] - R[..., 1:]),
    trend: Callable = lambda R, sign: sign(R[..., -1:] - R[..., :1]),
    first: Callable = lambda name, s, follows: follows if name == "consistent" else s > 0,
    later: Callable = lambda name, turns, follows: turns & follows if name == "consistent" else turns,
    finish: Callable = lambda points: points,
    default: str = "consistent",
) -> Callable:
    """`turning_points` with some of its ingredients exchanged."""

    def turning_points(R, rule=default, tolerance=0.0):
        def near(difference: Tensor) -> Tensor:
            return sign(difference, tolerance)

        d = near(R[..., 1:] - R[..., :-1])
        s, follows = d * trend(R, near), d * rest(R, near) > 0
        points = torch.zeros_like(d, dtype=torch.bool)
        points[..., 1:] = later(rule, before(s[..., :-1]) & now(s[..., 1:]), follows[..., 1:])
        points[..., 0] = first(rule, s[..., 0], follows[..., 0])
        return finish(points)

    return turning_points


def last_true(points: Tensor) -> Tensor:
    return torch.cat([points[..., :-1], torch.ones_like(points[..., -1:])], -1)


def shifted(points: Tensor, by: int) -> Tensor:
    moved = torch.zeros_like(points)
    if by > 0:
        moved[..., by:] = points[..., :-by]
    else:
        moved[..., :by] = points[..., -by:]
    return moved


POINTS = {
    "the first step is ignored: it can be a turning point too": rule(
        first=lambda n, s, f: torch.zeros_like(f)
    ),
    "the first step is always a turning point": rule(first=lambda n, s, f: torch.ones_like(f)),
    "the first step follows the trend rule under the consistent rule": rule(first=lambda n, s, f: s > 0),
    "the first step follows the consistent rule under the trend rule": rule(first=lambda n, s, f: f),
    "the last step counts as consistent: nothing follows it, so it never is a consistent turning point": rule(
        rest=lambda R, sign: torch.cat(
            [sign(R[..., -1:] - R[..., 1:-1]), sign(R[..., -1:] - R[..., -2:-1])], dim=-1
        )
    ),
    "the last step is always a turning point": rule(finish=last_true),
    "the last step is never a turning point under the trend rule either": rule(
        finish=lambda p: torch.cat([p[..., :-1], torch.zeros_like(p[..., -1:])], -1)
    ),
    "the consistency condition is missing: the consistent rule is the trend rule": rule(
        later=lambda name, turns, follows: turns, first=lambda name, s, f: s > 0
    ),
    "the consistency condition is missing after the first step": rule(later=lambda name, turns, f: turns),
    "the consistency condition is applied under the trend rule too": rule(
        later=lambda name, turns, f: turns & f, first=lambda name, s, f: f
    ),
    "the two rules are swapped": rule(
        later=lambda name, turns, f: turns & f if name == "trend" else turns,
        first=lambda name, s, f: f if name == "trend" else s > 0,
    ),
    "the turn is missing: every step along the trend counts": rule(before=lambda s: torch.ones_like(s) > 0),
    "the turn is missing: every consistent step counts": rule(
        later=lambda name, turns, f: f if name == "consistent" else turns
    ),
    "a flat step counts as one against the trend (s[j-1] <= 0)": rule(before=lambda s: s <= 0),
    "a flat step counts as one along the trend (s[j] >= 0)": rule(now=lambda s: s >= 0),
    "sign(0) counts as positive": rule(sign=lambda d, tol: torch.where(d.abs() <= tol, 1.0, d.sign())),
    "sign(0) counts as negative": rule(sign=lambda d, tol: torch.where(d.abs() <= tol, -1.0, d.sign())),
    "the turn is reversed: steps that leave the trend are marked": rule(
        before=lambda s: s > 0, now=lambda s: s < 0
    ),
    "the points are one step late": rule(finish=lambda p: shifted(p, 1)),
    "the points are one step early": rule(finish=lambda p: shifted(p, -1)),
    "the step is compared with the next one, not with the one before": rule(
        finish=lambda p: torch.cat([p[..., :1], p[..., 1:].roll(-1, -1)], -1)
    ),
    "what remains is measured before the step (R[n] - R[j-1]): it must be R[n] - R[j]": rule(
        rest=lambda R, sign: sign(R[..., -1:] - R[..., :-1])
    ),
    "the trend is measured from the last step: it must be R[n] - R[0]": rule(
        trend=lambda R, sign: sign(R[..., -1:] - R[..., -2:-1])
    ),
    "the trend is ignored: only rises count": rule(trend=lambda R, sign: torch.ones_like(R[..., :1])),
    "the trend is taken with the wrong sign": rule(trend=lambda R, sign: sign(R[..., :1] - R[..., -1:])),
    "the trend is that of the batch, not the trajectory's": rule(
        trend=lambda R, sign: sign((R[..., -1:] - R[..., :1]).mean()).reshape(1).expand_as(R[..., :1])
    ),
    "the tolerance is ignored": rule(sign=lambda d, tol: d.sign()),
    "a difference equal to the tolerance counts: it must be 0": rule(
        sign=lambda d, tol: torch.where((d.abs() < tol) | (d == 0), 0.0, d.sign())
    ),
    "the tolerance applies to the steps only, not to the trend": rule(
        trend=lambda R, sign: (R[..., -1:] - R[..., :1]).sign(),
        rest=lambda R, sign: (R[..., -1:] - R[..., 1:]).sign(),
    ),
    "there are no turning points at all": rule(finish=torch.zeros_like),
    "every step is a turning point": rule(finish=torch.ones_like),
}


def balancing(
    *,
    rank: Callable = lambda r: r.abs(),
    keep: Callable = min,
    empty: Callable = lambda mask: mask,
    descending: bool = True,
) -> Callable:
    """`balance` with some of its ingredients exchanged."""

    def balance(mask, r_agg):
        positive, negative = mask & (r_agg > 0), mask & (r_agg < 0)
        count = keep(int(positive.sum()), int(negative.sum()))
        if not positive.any() or not negative.any():
            return empty(mask)
        kept = mask & (r_agg == 0)
        for side in (positive, negative):
            places = side.flatten().nonzero().flatten()
            order = rank(r_agg).flatten()[places].sort(descending=descending, stable=True).indices[:count]
            kept.view(-1)[places[order]] = True
        return kept

    return balance


def by_row(mask, r_agg):
    rows = zip(mask.reshape(-1, mask.shape[-1]), r_agg.reshape(-1, mask.shape[-1]), strict=True)
    return torch.stack([exact.balance(m, r) for m, r in rows]).reshape(mask.shape)


BALANCING = {
    "the smallest awards are kept: the largest must be": balancing(descending=False),
    "awards are ranked with their sign, not by their size": balancing(rank=lambda r: r),
    "the first in the batch are kept, whatever their award": balancing(rank=torch.zeros_like),
    "of equal awards the earlier ones are dropped: it must be the later ones": lambda mask, r_agg: (
        exact.balance(mask.flatten().flip(0), r_agg.flatten().flip(0)).flip(0).reshape(mask.shape)
    ),
    "each trajectory is balanced by itself: the scope is the whole batch": by_row,
    "each prompt is balanced by itself: the scope is the whole batch": lambda mask, r_agg: torch.stack(
        [exact.balance(m, r) for m, r in zip(mask, r_agg, strict=True)]
    ),
    "nothing is balanced": lambda mask, r_agg: mask,
    "if one side is empty all are dropped: all must stay": balancing(empty=torch.zeros_like),
    "the mask is ignored: steps that are no turning points are counted": lambda mask, r_agg: exact.balance(
        torch.ones_like(mask), r_agg
    ),
    "the counts include steps that are no turning points": lambda mask, r_agg: (
        exact.balance(torch.ones_like(mask), r_agg) & mask
    ),
    "one too many is kept on the larger side": balancing(keep=lambda p, n: min(p, n) + 1),
    "one too few is kept": balancing(keep=lambda p, n: min(p, n) - 1),
    "only positive turning points are ever dropped": lambda mask, r_agg: (
        exact.balance(mask, r_agg) | (mask & (r_agg < 0))
    ),
    "only negative turning points are ever dropped": lambda mask, r_agg: (
        exact.balance(mask, r_agg) | (mask & (r_agg > 0))
    ),
}


def awarding(
    *,
    points: Callable = exact.turning_points,
    balance: Callable = exact.balance,
    award: Callable = lambda R: R[..., -1:] - R[..., :-1],
    ranked: Callable = lambda R: R[..., -1:] - R[..., :-1],
    elsewhere: Callable = lambda R: R[..., 1:] - R[..., :-1],
    dropped: Callable = lambda R: R[..., 1:] - R[..., :-1],
    balanced_default: bool = True,
    rule_default: str = "consistent",
) -> Callable:
    """`step_rewards` with some of its ingredients exchanged."""

    def step_rewards(R, rule=rule_default, balanced=balanced_default, tolerance=0.0):
        mask = points(R, rule, tolerance)
        kept = balance(mask, ranked(R)) if balanced else mask
        return torch.where(kept, award(R), torch.where(mask, dropped(R), elsewhere(R)))

    return step_rewards


AWARDS = {
    "a dropped turning point gets 0: it must get R[j] - R[j-1]": awarding(
        dropped=lambda R: torch.zeros_like(R[..., 1:])
    ),
    "balancing ranks by R[n] - R[0]: it must rank by the award R[n] - R[j-1]": awarding(
        ranked=lambda R: (R[..., -1:] - R[..., :1]).expand_as(R[..., 1:])
    ),
    "balancing ranks by R[j] - R[j-1]: it must rank by the award R[n] - R[j-1]": awarding(
        ranked=lambda R: R[..., 1:] - R[..., :-1]
    ),
    "the award is R[n] - R[j]: it must contain the turning step, R[n] - R[j-1]": awarding(
        award=lambda R: R[..., -1:] - R[..., 1:]
    ),
    "the award is R[n] - R[0]: it must be R[n] - R[j-1]": awarding(
        award=lambda R: (R[..., -1:] - R[..., :1]).expand_as(R[..., 1:])
    ),
    "the award is R[n] itself": awarding(award=lambda R: R[..., -1:].expand_as(R[..., 1:])),
    "the award is added to R[j] - R[j-1]: it must replace it": awarding(
        award=lambda R: R[..., -1:] - R[..., :-1] + R[..., 1:] - R[..., :-1]
    ),
    "every step gets the award R[n] - R[j-1]": awarding(
        points=POINTS["every step is a turning point"], balance=lambda m, r: m
    ),
    "steps that are no turning points get 0": awarding(elsewhere=lambda R: torch.zeros_like(R[..., 1:])),
    "the award has the wrong sign": awarding(award=lambda R: R[..., :-1] - R[..., -1:]),
    "balanced is off by default": awarding(balanced_default=False),
    "the default rule is trend": awarding(rule_default="trend"),
    "balanced is ignored: it is always on": lambda R, rule="consistent", balanced=True, tolerance=0.0: (
        exact.step_rewards(R, rule, True, tolerance)
    ),
}

# one trajectory has consistent points of one sign only, so that balancing it by itself drops none
SEEN_IN_AWARDS = {
    **{sentence: awarding(points=f) for sentence, f in POINTS.items() if "default" not in sentence},
    **{sentence: awarding(balance=f) for sentence, f in BALANCING.items() if f is not by_row},
}
WRONG_TURNING = [
    *(Wrong(sentence, {"incremental_rewards": f}) for sentence, f in INCREMENTS.items()),
    *(Wrong(sentence, {"turning_points": f}) for sentence, f in POINTS.items()),
    *(Wrong(sentence, {"balance": f}) for sentence, f in BALANCING.items()),
    *(Wrong(sentence, {"step_rewards": f}) for sentence, f in {**AWARDS, **SEEN_IN_AWARDS}.items()),
]
