"""Named wrong versions of the token transition's log-probability and of the sampled step."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracle import definitions_discrete as exact
from oracle.checks import Wrong
from oracle.definitions_discrete import categorical, gather

# ---- transition_log_prob


def transition(
    *,
    log_p: Callable = lambda logits: logits.log_softmax(-1),
    log_q: Callable = lambda path, x, y, *step: path.log_kernel_column(x, y, *step),
    reduce: Callable = lambda log_p, log_q: torch.logsumexp(log_p + log_q, -1),
    finish: Callable = lambda found, logits, x, y, last: found,
) -> Callable:
    """`transition_log_prob` with some of its ingredients exchanged."""

    def transition_log_prob(path, logits, x, x_next, t, h, *, jump="exp", last=False):
        found = reduce(log_p(logits), log_q(path, x, x_next, t, h, jump, last))
        return finish(found, logits, x, x_next, last)

    return transition_log_prob


def at(logits: Tensor, y: Tensor) -> Tensor:
    """log p(y)."""
    return gather(logits.log_softmax(-1), y)


def averaged(path, logits, x, x_next, t, h, *, jump="exp", last=False):
    """Of the jump by the posterior mean of the rates."""
    if last:
        return at(logits, x_next)
    V = logits.shape[-1]
    every = torch.arange(V).expand(*x.shape, V)
    rates = (logits.softmax(-1)[..., None] * path.rates(x[..., None].expand_as(every), every, t)).sum(-2)
    z = h * rates.sum(-1)
    J = -torch.expm1(-z) if jump == "exp" else z.clamp(max=1)
    return torch.where(x == x_next, torch.log1p(-J), (gather(rates, x_next) * h / z * J).log())


def stay_is_certain(found, logits, x, y, last):
    return torch.where((x == y) & (not last), 0.0 * found, found)


def stay_is_constant(found, logits, x, y, last):
    return torch.where((x == y) & (not last), found.detach(), found)


def clean(values: Tensor) -> Tensor:
    """Finite log-chances: a mean over v would be -inf otherwise."""
    return values.clamp(min=-30.0)


def normalised_in_place(path, logits, *args, **kwargs):
    logits.data -= logits.data.logsumexp(-1, keepdim=True)
    return exact.transition_log_prob(path, logits, *args, **kwargs)


TRANSITION = {
    "the logits are normalised in place": normalised_in_place,
    "the logits are not normalised: they stand for log p": transition(log_p=lambda logits: logits),
    "the posterior is missing: q is summed over v": transition(log_p=lambda logits: 0 * logits.softmax(-1)),
    "q is averaged over v: the posterior must weigh it": transition(
        log_p=lambda logits: 0 * logits.softmax(-1) - math.log(logits.shape[-1])
    ),
    "the logarithm stands inside the sum over v: sum_v p(v) log q, a lower bound": transition(
        reduce=lambda log_p, log_q: (log_p.exp() * clean(log_q)).sum(-1)
    ),
    "only the likeliest X1 counts: q must be averaged over the posterior": transition(
        log_q=lambda path, x, y, *step: path.log_kernel_column(x, y, *step),
        reduce=lambda log_p, log_q: gather(log_q, log_p.argmax(-1)),
    ),
    "the largest term stands for the sum over v": transition(
        reduce=lambda log_p, log_q: (log_p + log_q).amax(-1)
    ),
    "the terms' logarithms are summed over v: it must be logsumexp": transition(
        reduce=lambda log_p, log_q: clean(log_p + log_q).sum(-1)
    ),
    "it is log p(v = x_next): the kernel is missing": transition(
        finish=lambda found, logits, x, y, last: at(logits, y)
    ),
    "the chance of the move is left out: a moved token has log p(v = x_next)": transition(
        finish=lambda found, logits, x, y, last: torch.where(x == y, found, at(logits, y))
    ),
    "tokens that stay are dropped: their log-probability is set to 0": transition(finish=stay_is_certain),
    "tokens that stay have no gradient: their chance depends on the posterior, too": transition(
        finish=stay_is_constant
    ),
    "the rates are averaged over the posterior before the jump, as in the released sampler: the kernels must "
    "be": averaged,
    "last is ignored: the last step is taken by rates": transition(
        log_q=lambda path, x, y, t, h, jump, last: path.log_kernel_column(x, y, t, h, jump, False)
    ),
    "jump is ignored: it is exp": transition(
        log_q=lambda path, x, y, t, h, jump, last: path.log_kernel_column(x, y, t, h, "exp", last)
    ),
    "x and x_next are exchanged": transition(
        log_q=lambda path, x, y, *step: path.log_kernel_column(y, x, *step)
    ),
    "it is the probability: the logarithm is missing": transition(finish=lambda found, *_: found.exp()),
    "the sign is wrong: it is -log p": transition(finish=lambda found, *_: -found),
    "the posterior is detached: there is no gradient": transition(log_p=lambda p: p.detach().log_softmax(-1)),
    "the normalisation of the posterior is detached: the gradient is the responsibility alone": transition(
        log_p=lambda logits: logits - logits.detach().logsumexp(-1, keepdim=True)
    ),
    "the gradient is twice what it must be": transition(finish=lambda found, *_: 2 * found - found.detach()),
    "the posterior has temperature 2": transition(log_p=lambda logits: (logits / 2).log_softmax(-1)),
    "the posterior is truncated to its likeliest symbol: there is no gradient": transition(
        log_p=lambda p: torch.where(p == p.amax(-1, keepdim=True), p, -torch.inf).log_softmax(-1)
    ),
    "the posterior without x, renormalised": transition(
        finish=lambda found, logits, x, y, last: torch.where(
            x == y, found, found - torch.log1p(-at(logits, x).exp().clamp(max=0.999))
        )
    ),
    "p is bounded below by 1e-3, which cuts rare symbols": transition(
        log_p=lambda logits: logits.softmax(-1).clamp(min=1e-3).log()
    ),
    "log p lacks what is not finite: impossible transitions have log p = 0": transition(
        finish=lambda found, *_: torch.where(found.isfinite(), found, 0.0)
    ),
}


# ---- sample_step


def sampler(
    *,
    chances: Callable = lambda logits: logits.softmax(-1),
    returned: Callable = lambda x1, y, again: x1,
    kernel: Callable = lambda path, x, x1, t, h, jump, last: path.kernel(x, x1, t, h, jump, last),
    jumper: Callable = lambda chances, x1, g: x1,  # the X1 that the token jumps to
    seeded: bool = True,
) -> Callable:
    """`sample_step` with some of its ingredients exchanged."""

    def sample_step(path, logits, x, t, h, *, jump="exp", last=False, generator=None):
        g = generator if seeded else None
        p = chances(logits)
        x1 = categorical(p, g)
        used = jumper(p, x1, g)
        y = categorical(kernel(path, x, used, t, h, jump, last), g)
        return y, returned(x1, y, lambda: categorical(p, g))

    return sample_step


def mean_of_two(path, logits, x, t, h, *, jump="exp", last=False, generator=None):
    one, two = (categorical(logits.softmax(-1), generator) for _ in range(2))
    if last:
        return one, one
    rates = (path.rates(x, one, t) + path.rates(x, two, t)) / 2
    z = h * rates.sum(-1, keepdim=True)
    J = -torch.expm1(-z) if jump == "exp" else z.clamp(max=1)
    moves = torch.where(rates > 0, rates * h / z * J, 0.0)
    stays = torch.nn.functional.one_hot(x, rates.shape[-1]) * (1 - moves.sum(-1, keepdim=True))
    return categorical(moves + stays, generator), one


def moved_in_place(path, logits, x, *args, **kwargs):
    y, x1 = exact.sample_step(path, logits, x, *args, **kwargs)
    return x.copy_(y), x1


SAMPLER = {
    "x is moved in place": moved_in_place,
    "X1 is the likeliest symbol: it must be drawn from the posterior": sampler(
        chances=lambda p: torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).double()
    ),
    "X1 is drawn uniformly": sampler(chances=lambda p: (0 * p).softmax(-1)),
    "X1 is drawn at temperature 2": sampler(chances=lambda p: (p / 2).softmax(-1)),
    "the X1 that is returned is another draw than the one that was used": sampler(
        returned=lambda x1, y, again: again()
    ),
    "x_next is returned in place of X1": sampler(returned=lambda x1, y, again: y),
    "the token always jumps to X1: the jump chance is missing": sampler(
        kernel=lambda path, x, x1, t, h, jump, last: path.kernel(x, x1, t, h, jump, True)
    ),
    "last is ignored: the last step is taken by rates": sampler(
        kernel=lambda path, x, x1, t, h, jump, last: path.kernel(x, x1, t, h, jump, False)
    ),
    "jump is ignored: it is exp": sampler(
        kernel=lambda path, x, x1, t, h, jump, last: path.kernel(x, x1, t, h, "exp", last)
    ),
    "the step has twice its length": sampler(
        kernel=lambda path, x, x1, t, h, jump, last: path.kernel(x, x1, t, 2 * h, jump, last)
    ),
    "the token jumps by the mean rate of two draws, as in the released sampler": mean_of_two,
    "all tokens share one X1": sampler(jumper=lambda p, x1, g: x1.flatten()[:1].expand_as(x1).clone(),
                                       returned=lambda x1, y, again: x1.flatten()[:1].expand_as(x1)),
    "the generator is ignored": sampler(seeded=False),
}  # fmt: skip

WRONG_TRANSITION = [
    *(Wrong(sentence, {"transition_log_prob": f}) for sentence, f in TRANSITION.items()),
    *(Wrong(sentence, {"sample_step": f}) for sentence, f in SAMPLER.items()),
]
