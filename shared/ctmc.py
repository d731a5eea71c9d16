"""Discrete flows as continuous-time Markov chains: the transition of a token, its law and its draws.

Every token runs on its own from t = 0 (source) to t = 1 (data), given the whole state. A path (module
`paths`) fixes rates Q_t(x -> y | x1) for every clean value x1. The model gives the posterior p(v) of the
clean token, as logits. One step of size h from t:

    x1 ~ p;  with chance J(h lambda), lambda = sum_y Q_t(x -> y | x1), jump to y ~ Q_t(x -> . | x1) / lambda;
    J(z) = 1 - exp(-z) ("exp", what samplers in use do) or min(1, z) ("euler", its first order).
    The last step of a grid sets x_next = x1: the rates alone would leave tokens behind.

Tokens are integer tensors (...,); t and h are floats or 0-dim tensors.
"""

import math

import torch
from torch import Tensor

from shared.distances import EXACT_VOCABULARY, in_chunks
from shared.paths import MetricPath, MixturePath
from shared.tokens import JUMPS, checked_logits, checked_step, checked_tokens, draw_symbols, draw_uniforms

__all__ = ["JUMPS", "MetricPath", "MixturePath", "draw_symbols"]  # defined elsewhere, part of this module too
__all__ += ["sample_step", "transition_kl", "transition_law", "transition_log_prob"]


def transition_log_prob(path, logits, x, x_next, t, h, *, jump: str = "exp", last: bool = False) -> Tensor:
    """log p(x_next | x) = log sum_v p(v) q(x_next | x, v) of every token, in nats, with p = softmax(logits).

    A mixture path and every last step need p(x_next) and p(x) only; a metric path sums over V.
    logits: (..., V), -inf where p is 0; x, x_next: (...,). Returns (...,) in the dtype of logits, float32 for
    16 bits; -inf, without a gradient, where no v allows the transition. The gradient in logits is
    responsibility minus posterior, p q / sum(p q) - p: exactly 0 for a one-hot posterior and for an identity
    step, whose value is 0 too. Raises ValueError for wrong shapes, tokens, t, h or jump. Pinned by
    test_closed_forms_are_the_sum_over_the_vocabulary, test_gradient_is_responsibility_minus_posterior.
    """
    t, h = checked_step(t, h, jump)
    x, x_next = checked_tokens(path, x, x_next)
    logits = checked_logits(path, logits, x)
    log_sum = logits.logsumexp(-1)
    if last:
        terms = logits.gather(-1, x_next[..., None])
    elif isinstance(path, MixturePath):
        log_c = path.coefficients(x, x_next, t, h, jump).log().to(logits)
        log_p = logits.gather(-1, torch.stack([x_next, x], -1)) - log_sum[..., None]
        terms, log_sum = torch.cat([log_c[..., :1], log_c[..., 1:] + log_p], -1), 0.0
    else:
        terms = logits + path.log_kernel_column(x, x_next, t, h, jump).to(logits)
    impossible = terms.detach().amax(-1) == -math.inf  # a logsumexp whose gradient would be NaN
    log_prob = terms.masked_fill(impossible[..., None], 0.0).logsumexp(-1) - log_sum
    return log_prob.masked_fill(impossible, -math.inf)


def transition_law(path, logits, x, t, h, *, jump: str = "exp", last: bool = False) -> Tensor:
    """p(y | x) = sum_v p(v) q(y | x, v) of every y: (..., V), with gradient in logits; p = softmax(logits).

    For the exact KL between transitions. logits: (..., V); x: (...,). A mixture path takes O(V) a token, from
    its closed form; a metric path sums over v, O(V^2) a token, computed in chunks and kept for the gradient:
    it raises ValueError above EXACT_VOCABULARY symbols. Else it raises like `transition_log_prob`.
    Pinned by test_the_law_is_that_of_every_transition.
    """
    t, h = checked_step(t, h, jump)
    (x,) = checked_tokens(path, x)
    p = checked_logits(path, logits, x).softmax(-1)
    if last:
        return p
    every = torch.arange(path.vocab_size, device=x.device)
    if isinstance(path, MixturePath):
        c0, c1, c2 = path.coefficients(x[..., None], every, t, h, jump).to(p).unbind(-1)
        return c0 + c1 * p + c2 * p.gather(-1, x[..., None])
    if path.vocab_size > EXACT_VOCABULARY:
        raise ValueError(f"the law of a metric path takes V^2 operations a token: too many, V = {len(every)}")
    rows = p.reshape(-1, path.vocab_size)

    def law(row, x):
        kernel = path.kernel(*torch.broadcast_tensors(x[:, None], every), t, h, jump)  # (n, V, V), [v, y]
        return (rows[row][:, None] @ kernel.to(p))[:, 0]

    row = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    return in_chunks(law, path.vocab_size**2, row, x)


def sample_step(
    path, logits, x, t, h, *, jump="exp", last=False, generator=None, uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step of the chain (module head): draw x1 from softmax(logits), then x_next from `kernel` given x1.

    No other draw enters the jump: `transition_log_prob` is the law of x_next. logits: (..., V); x: (...,);
    uniforms: (2, ...) in [0, 1), those of x1 and of x_next, float64; from the generator if None. What a token
    draws depends on its own arguments only. Returns (x_next, x1), (...,) each, without a gradient, computed
    in chunks. Raises ValueError like `transition_log_prob`. Pinned by
    test_sampling_frequencies_are_the_transition, test_a_token_draws_the_same_whatever_the_batch.
    """
    t, h = checked_step(t, h, jump)
    (x,) = checked_tokens(path, x)
    rows = checked_logits(path, logits.detach(), x).reshape(-1, path.vocab_size)
    if uniforms is None:
        uniforms = draw_uniforms((2, *x.shape), x.device, generator)
    elif uniforms.shape != (2, *x.shape):
        raise ValueError(f"uniforms {tuple(uniforms.shape)} need the shape {(2, *x.shape)}")

    def step(row, x, u, u_next):
        x1 = draw_symbols(rows[row].softmax(-1), u)
        x_next = x1 if last else draw_symbols(path.kernel(x, x1, t, h, jump), u_next)
        return torch.stack([x_next, x1], -1)

    row = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    return in_chunks(step, path.vocab_size, row, x, *uniforms).unbind(-1)


def transition_kl(path, logits, logits_ref, x, t, h, *, jump: str = "exp", last: bool = False) -> Tensor:
    """KL(p(. | x) || p_ref(. | x)) of the laws of x_next, in nats, for posteriors (..., V): (...,).

    By `transition_law`, which raises its ValueErrors. At most the KL of the posteriors. Pinned by
    test_k3_estimates_the_kl_of_the_transitions.
    """
    both = logits.double(), logits_ref.double()  # in float32 small chances would be 0
    p, ref = (transition_law(path, each, x, t, h, jump=jump, last=last) for each in both)
    possible = p.detach() > 0
    gap = torch.where(possible, p, 1.0).log() - torch.where(possible, ref, 1.0).log()
    return (p * gap).sum(-1).to(logits)
