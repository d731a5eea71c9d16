"""Named wrong versions of the Monte Carlo ratio, the aggregation over tokens and the KL of posteriors."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracle import definitions_discrete as exact
from oracle.checks import Wrong
from oracle.definitions_discrete import gather

# ---- mc_log_ratio


def estimate(
    *,
    draws: Callable = lambda draws: draws,
    weigh: Callable = lambda q, draws, log_old, path, x, y, t, h, jump: q,
    ratio: Callable = lambda new, old: (new - old).exp(),
    reduce: Callable = lambda q, r: (q * r).sum(0) / q.sum(0),
    finish: Callable = torch.log,
    jump_of: Callable = lambda jump: jump,
) -> Callable:
    """`mc_log_ratio` with some of its ingredients exchanged."""

    def mc_log_ratio(path, log_p_new, log_p_old, x, x_next, draws_, t, h, *, jump="exp"):
        used = draws(draws_)
        column = path.log_kernel_column(x, x_next, t, h, jump_of(jump), False)
        q = weigh(gather(column, used).exp(), used, log_p_old, path, x, x_next, t, h, jump)
        return finish(reduce(q, ratio(gather(log_p_new, used), gather(log_p_old, used))))

    return mc_log_ratio


def rate_of(q, draws, log_old, path, x, y, t, h, jump):
    """Q(x -> y | X_j) for a token that moved, 1 for one that stayed."""
    many = x.expand_as(draws), y.expand_as(draws)
    return torch.where(many[0] == many[1], 1.0, gather_each(path.rates(many[0], draws, t), many[1]))


def gather_each(values: Tensor, symbols: Tensor) -> Tensor:
    return values.gather(-1, symbols[..., None])[..., 0]


def geometric(q, r):
    return ((q * r.log()).sum(0) / q.sum(0)).exp()


def subtracted_in_place(path, log_p_new, log_p_old, *args, **kwargs):
    found = exact.mc_log_ratio(path, log_p_new, log_p_old, *args, **kwargs)
    log_p_new.data -= log_p_old.data
    return found


MC = {
    "the used draw is thrown away: fresh draws alone give a biased ratio": estimate(
        draws=lambda draws: draws[1:] if len(draws) > 1 else draws
    ),
    "only the used draw counts": estimate(draws=lambda draws: draws[:1]),
    "the kernel's weights are missing: the posterior ratios are averaged": estimate(
        reduce=lambda q, r: r.mean(0)
    ),
    "the weighted sum is not divided by the sum of the weights": estimate(reduce=lambda q, r: (q * r).sum(0)),
    "the weighted sum is divided by n: it must be by the sum of the weights": estimate(
        reduce=lambda q, r: (q * r).mean(0)
    ),
    "the ratio is inverted: old over new": estimate(ratio=lambda new, old: (old - new).exp()),
    "p_old is missing in the ratio": estimate(ratio=lambda new, old: new.exp()),
    "the weights have p_old once more: the draws already come from it": estimate(
        weigh=lambda q, draws, log_old, *_: q * gather(log_old, draws).exp()
    ),
    "the posterior ratios are averaged in logarithms: a geometric mean": estimate(reduce=geometric),
    "the logarithm is missing: it is the ratio": estimate(finish=lambda r: r),
    "the weights are the rates, without the chance to jump": estimate(weigh=rate_of),
    "the weights are the logarithms of the kernel": estimate(weigh=lambda q, *_: q.log().clamp(min=-30.0)),
    "the weights are squared": estimate(weigh=lambda q, *_: q**2),
    "jump is ignored: it is exp": estimate(jump_of=lambda jump: "exp"),
    "the last draw counts as the used one, and stands there twice": estimate(
        draws=lambda draws: torch.cat([draws[-1:], draws[1:]])
    ),
    "the used draw has the mean weight of the others: it must have its own": estimate(
        weigh=lambda q, *_: torch.cat([q[1:].mean(0, keepdim=True), q[1:]]) if len(q) > 1 else q
    ),
    "the largest weight stands for all: only one draw counts": estimate(
        reduce=lambda q, r: r.gather(0, q.argmax(0, keepdim=True))[0]
    ),
    "the posterior ratios are clipped to 1 +- 0.2 before they are averaged": estimate(
        ratio=lambda new, old: (new - old).exp().clamp(0.8, 1.2)
    ),
    "the ratio is detached: there is no gradient": estimate(finish=lambda r: r.detach().log()),
    "log p_new is changed in place": subtracted_in_place,
    "a small number is added to the denominator": estimate(
        reduce=lambda q, r: (q * r).sum(0) / (q.sum(0) + 1e-3)
    ),
}


# ---- aggregate


def padded_in_place(log_ratio, mask, how):
    log_ratio.data[~mask] = 0.0
    return exact.aggregate(log_ratio, mask, how)


def normalised_in_place(logits, logits_ref):
    logits.data -= logits.data.logsumexp(-1, keepdim=True)
    return exact.posterior_kl(logits, logits_ref)


def counted(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)


def aggregator(
    *,
    keep: Callable = counted,
    product: Callable = lambda v, m: v.sum(1),
    geometric: Callable = lambda v, m: v.sum(1) / m.sum(1),
    token: Callable = lambda v, m: v,
) -> Callable:
    """`aggregate` with some of its ingredients exchanged. The values are those that `keep` leaves."""

    def aggregate(log_ratio, mask, how):
        return {"product": product, "geometric": geometric, "token": token}[how](keep(log_ratio, mask), mask)

    return aggregate


AGGREGATE = {
    "padding counts: the mask is ignored": aggregator(keep=lambda v, m: v, geometric=lambda v, m: v.mean(1)),
    "padding counts in the sums, although not in the number of tokens": aggregator(keep=lambda v, m: v),
    "padding counts for single tokens": lambda v, m, how: v if how == "token" else exact.aggregate(v, m, how),
    "the mask is inverted": aggregator(
        keep=lambda v, m: torch.where(m, 0.0, v), geometric=lambda v, m: v.sum(1) / (~m).sum(1).clamp(min=1)
    ),
    "the geometric mean is a sum: the division by the number of tokens is missing": aggregator(
        geometric=lambda v, m: v.sum(1)
    ),
    "the geometric mean divides by all D tokens: padding must not count": aggregator(
        geometric=lambda v, m: v.mean(1)
    ),
    "the geometric mean divides by the batch's mean number of tokens": aggregator(
        geometric=lambda v, m: v.sum(1) / m.sum(1).double().mean()
    ),
    "the geometric mean is the arithmetic mean of the ratios": aggregator(
        geometric=lambda v, m: ((counted(v.exp(), m).sum(1)) / m.sum(1)).log()
    ),
    "the product is a mean: all tokens must be summed": aggregator(product=lambda v, m: v.sum(1) / m.sum(1)),
    "product and geometric are exchanged": aggregator(
        product=lambda v, m: v.sum(1) / m.sum(1), geometric=lambda v, m: v.sum(1)
    ),
    "single tokens are divided by their number": aggregator(token=lambda v, m: v / m.sum(1, keepdim=True)),
    "token gives one mean a sample: it must give every token": aggregator(
        token=lambda v, m: v.sum(1) / m.sum(1)
    ),
    "it returns the ratio: the result must be its logarithm": lambda v, m, how: exact.aggregate(
        v, m, how
    ).exp(),
    "the sums run over the samples, not over the tokens": lambda v, m, how: (
        counted(v, m) if how == "token" else counted(v, m).sum(0)[: len(v)]
    ),
    "the log-ratios at padding are set to 0 in place": padded_in_place,
    "the first token is left out": aggregator(product=lambda v, m: v[:, 1:].sum(1)),
    "no gradient flows through the log-ratios": lambda v, m, how: exact.aggregate(v.detach(), m, how),
}


# ---- posterior_kl


def divergence(
    *,
    logs: Callable = lambda logits: logits.log_softmax(-1),
    term: Callable = lambda p, q: p.exp() * torch.where(p > -torch.inf, p - q, 0.0),
    reduce: Callable = lambda terms: terms.sum(-1),
    detach: Callable = lambda p: p,
) -> Callable:
    """`posterior_kl` with some of its ingredients exchanged; term gets log p and log p_ref."""
    return lambda logits, logits_ref: reduce(term(detach(logs(logits)), logs(logits_ref)))


def middle(p: Tensor, q: Tensor) -> Tensor:
    return torch.logaddexp(p, q) - math.log(2)


def gap(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > -torch.inf, p - q, 0.0)


POSTERIOR_KL = {
    "the direction is wrong: it is KL(ref || p)": divergence(term=lambda p, q: q.exp() * gap(q, p)),
    "the KL is symmetric: half of both directions": divergence(
        term=lambda p, q: (p.exp() - q.exp()) * gap(p, q) / 2
    ),
    "it is the Jensen-Shannon divergence": divergence(
        term=lambda p, q: (p.exp() * gap(p, middle(p, q)) + q.exp() * gap(q, middle(p, q))) / 2
    ),
    "p is missing: the log-ratios are averaged without weight": divergence(
        term=lambda p, q: gap(p, q), reduce=lambda terms: terms.mean(-1)
    ),
    "the KL is averaged over the vocabulary: it must be the sum": divergence(
        reduce=lambda terms: terms.mean(-1)
    ),
    "the logits are not normalised": divergence(
        term=lambda p, q: p.softmax(-1) * gap(p, q), logs=lambda logits: logits
    ),
    "the sign is wrong": divergence(reduce=lambda terms: -terms.sum(-1)),
    "it is the negative entropy: the reference is missing": divergence(
        term=lambda p, q: p.exp() * torch.where(p > -torch.inf, p, 0.0)
    ),
    "it is the cross entropy: the entropy of p is missing": divergence(
        term=lambda p, q: -p.exp() * torch.where(p > -torch.inf, q, 0.0)
    ),
    "it is the reverse k3 estimate, rho - 1 - log rho with rho = p/p_ref, averaged over p: not a KL": (
        divergence(term=lambda p, q: p.exp() * (gap(p, q).exp() - 1 - gap(p, q)))
    ),
    "it is half the squared log-ratio, averaged over p": divergence(
        term=lambda p, q: p.exp() * gap(p, q) ** 2 / 2
    ),
    "all tokens are averaged: every token must have its own": divergence(
        reduce=lambda terms: terms.sum(-1).mean()
    ),
    "no gradient flows through p, or only through its logarithm: it is 0 on average": divergence(
        detach=lambda p: p.detach()
    ),
    "the logits are normalised in place": normalised_in_place,
    "0 log 0 is NaN: symbols that no posterior gives must count 0": divergence(
        term=lambda p, q: p.exp() * (p - q)
    ),
}

WRONG_DISCRETE = [
    *(Wrong(sentence, {"mc_log_ratio": f}) for sentence, f in MC.items()),
    *(Wrong(sentence, {"aggregate": f}) for sentence, f in AGGREGATE.items()),
    *(Wrong(sentence, {"posterior_kl": f}) for sentence, f in POSTERIOR_KL.items()),
]
