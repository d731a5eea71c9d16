"""Trajectories of a discrete flow: rollouts with what their likelihood ratios need, and plain sampling.

As in `rollout`, everything random is handed in: the noise of sample i of iteration k of a run is a function
of (seed, k, i) alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from shared.ctmc import sample_step, transition_log_prob
from shared.rollout import sample_generator
from shared.tokens import draw_symbols

PROBED = 2**26  # entries of the logits that `ratio_noise` looks at, at most: 256 MiB


class TokenRollout(NamedTuple):
    """B trajectories of D tokens over K steps, as ids; and of the policy that made them, log-probabilities in
    nats of whatever its ratio compares, never a whole posterior."""

    states: Tensor  # (B, K+1, D) ids, before each step and after the last
    log_prob: Tensor | None  # transitions (B, K, D), draws (B, K, n, D), or ends (B, 1, D): see token_rollout
    draws: Tensor | None  # (B, K, n, D) clean tokens drawn from the posterior at states[:, k], the used first
    log_weight: Tensor | None  # (B, K, n, D) log q(states[:, k+1] | states[:, k], draw); 0 if n = 1
    nfe_rows: int  # network evaluations, in samples
    nfe_calls: int  # network evaluations, in calls


def sample_uniforms(
    policy, seed: int, iteration: int, samples: range | list[int], num_steps: int, num_draws: int = 1
) -> tuple[Tensor, Tensor]:
    """The noise of the given samples of an iteration: source tokens (B, N), N = policy.num_tokens, and
    uniform numbers in [0, 1), (B, K, 1 + num_draws, N): for each step the used clean token, the jump, and
    further clean tokens.

    Sample i always gets the same noise, whatever other samples are drawn with it; more draws leave the others
    as they are.
    """
    source, uniforms = [], []
    for i in samples:
        generator = sample_generator(seed, iteration, i)
        source.append(policy.source(1, generator)[0])
        shapes = [(num_steps, count, policy.num_tokens) for count in (2, num_draws - 1)]
        numbers = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        uniforms.append(torch.cat(numbers, dim=1))
    return torch.stack(source), torch.stack(uniforms).to(source[0].device)


def token_rollout(
    policy,
    source: Tensor,
    uniforms: Tensor,
    cond: dict[str, Tensor],
    times: Tensor,
    *,
    jump: str = "exp",
    sampler: str = "conditional",
    keep: str | None = None,
    top_k: int | None = None,
) -> TokenRollout:
    """Sample B trajectories with the Euler kernel of shared/ctmc.py, the last step setting x_next = x1.

    source (B, N) and uniforms (B, K, 1 + n, N) from `sample_uniforms`, of which the first D of N tokens are
    used; cond: batch-first tensors from policy.encode, "mask" (B, D) among them: only tokens inside it move.
    times: (K+1,) from 0 up to 1.
    sampler: "conditional", the kernel above, or "released": jumps by the mean of the rates of the n draws, as
        the authors' code does. That is another kernel (n > 1); its draws' weights are those of the kernel
        above.
    keep: what log_prob is of: "transitions", log p(states[:, k+1] | states[:, k]); "draws", the posterior
        probabilities of the draws, whose ids and log-weights are kept as well; "ends", the posterior
        probability at states[:, 0] of the tokens states[:, K]; None.
    jump: as in `sample_step`; the released sampler's jumps are "exp".
    top_k: the posterior is cut to its most probable symbols; None: as it is.
    Runs without gradient.
    """
    mask, path, K = cond["mask"], policy.path, len(times) - 1
    x, numbers = source[:, : mask.shape[1]], uniforms[..., : mask.shape[1]].movedim(2, 0)  # (1+n, B, K, D)
    states, log_probs, all_draws, log_weights = [x], [], [], []
    with torch.no_grad():
        for k in range(K):
            t, h, last = float(times[k]), float(times[k + 1] - times[k]), k == K - 1
            logits = policy.posterior_logits(x, t, cond)  # (B, D, V)
            if top_k is not None:
                best = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
                logits = torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)
            pair, further = numbers[:2, :, k], numbers[2:, :, k]  # X1 and jump; more X1
            if sampler == "released" and not last:
                draws = draw_symbols(logits.softmax(-1), torch.cat([pair[:1], further]))  # (n, B, D)
                x_next = draw_symbols(averaged_law(path, x, draws, t, h), pair[1])
            else:
                x_next, x1 = sample_step(path, logits, x, t, h, jump=jump, last=last, uniforms=pair)
                if keep == "draws":
                    draws = torch.cat([x1[None], draw_symbols(logits.softmax(-1), further)])
            x_next = torch.where(mask, x_next, x)
            if keep == "transitions":
                log_probs.append(transition_log_prob(path, logits, x, x_next, t, h, jump=jump, last=last))
            elif keep == "draws":
                log_probs.append(at_draws(logits.log_softmax(-1), draws).movedim(0, 1))
                all_draws.append(draws.movedim(0, 1))
                log_weight = torch.zeros_like(log_probs[-1])  # of one draw it does not matter
                if len(draws) > 1:
                    column = path.log_kernel_column(x, x_next, t, h, jump, last)
                    log_weight[:] = at_draws(column, draws).masked_fill(~mask, 0.0).movedim(0, 1)
                log_weights.append(log_weight)
            elif keep == "ends" and k == 0:
                at_source = logits
            x = x_next
            states.append(x)
        if keep == "ends":
            log_probs.append(transition_log_prob(path, at_source, states[0], x, 0.0, 1.0, last=True))
    columns = (torch.stack(c, dim=1) if c else None for c in (states, log_probs, all_draws, log_weights))
    return TokenRollout(*columns, len(x) * K, K)


def at_draws(values: Tensor, draws: Tensor) -> Tensor:
    """values (..., V) at the symbols draws (n, ...): (n, ...)."""
    return values.gather(-1, draws.movedim(0, -1)).movedim(-1, 0)


def averaged_law(path, x: Tensor, draws: Tensor, t: float, h: float) -> Tensor:
    """The law of x_next (B, D, V) by the mean rates of the draws (n, B, D): a jump with chance
    1 - exp(-h lambda), to y with chance rate / lambda. For n = 1 this is the kernel of shared/paths.py."""
    rates = sum(path.rates(x, draw, t) for draw in draws) / len(draws)  # (B, D, V)
    total = rates.sum(-1, keepdim=True)
    law = rates * torch.where(total > 0, -torch.expm1(-h * total) / total, 0.0)
    return law.scatter(-1, x[..., None], torch.exp(-h * total))


def ratio_noise(
    policy, states: Tensor, k: int, cond: dict[str, Tensor], times: Tensor, old: AbstractContextManager, *,
    jump: str, counts: tuple[int, ...], repeats: int, generator: torch.Generator, estimate: Callable,
    reduce: Callable,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Ratios p(x_next | x) / p_old(x_next | x) of step k, not the last, of the first trajectories: exact
    (R,), and from n draws of X1, `repeats` times for each n of counts: (len(counts), repeats, R), on the CPU.

    states (B, K+1, D), cond: of trajectories by the old policy, whose weights the policy has within `old`.
    estimate(log_p, log_p_old, log_weight): the log-ratio from values at draws, the first of which made the
    step; reduce(log-ratios of tokens (b, D), mask (b, D)): those of interest, R in all. Without gradient.
    """
    x, x_next, t, h = states[:, k], states[:, k + 1], float(times[k]), float(times[k + 1] - times[k])
    rows = slice(max(1, PROBED // (states.shape[2] * policy.path.vocab_size)))
    x, x_next, cond = x[rows], x_next[rows], {name: value[rows] for name, value in cond.items()}
    with torch.no_grad():
        logits = policy.posterior_logits(x, t, cond)
        with old:
            logits_old = policy.posterior_logits(x, t, cond)
        log_p, log_p_old = logits.log_softmax(-1), logits_old.log_softmax(-1)
        column = policy.path.log_kernel_column(x, x_next, t, h, jump=jump).to(logits)  # (b, D, V)
        used_law = (log_p_old + column).softmax(-1)  # of X1 given the step
        estimates = []
        for n in counts:
            uniforms = torch.rand((repeats * n, *x.shape), generator=generator, dtype=torch.float64)
            used, fresh = uniforms.to(x.device).split([repeats, repeats * (n - 1)])
            draws = torch.cat([draw_symbols(used_law, used), draw_symbols(log_p_old.exp(), fresh)])
            values = [at_draws(each, draws).unflatten(0, (n, repeats)) for each in (log_p, log_p_old, column)]
            ratios = [reduce(each, cond["mask"]).exp().flatten() for each in estimate(*values)]
            estimates.append(torch.stack(ratios))
        step = (x, x_next, t, h)
        new, was = (transition_log_prob(policy.path, p, *step, jump=jump) for p in (logits, logits_old))
    exact = reduce(new - was, cond["mask"]).exp().flatten()
    return exact.cpu(), torch.stack(estimates).cpu()
