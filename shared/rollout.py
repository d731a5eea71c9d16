"""Trajectories of a policy: stochastic rollouts, their ODE completions, and plain ODE sampling.

Everything random is handed in, so that a rollout is a function of its arguments; `sample_noise` makes the
noise of sample i of iteration k of a run from (seed, k, i) alone, whatever the micro-batches, the processes,
or an interruption.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.sde import gaussian_kl, gaussian_log_prob, ode_step, transition


class Rollout(NamedTuple):
    """B trajectories with n stochastic steps each. *E are the dimensions of one latent."""

    latents: (
        Tensor  # (B, n+1, *E) the state before each stochastic step and after the last, in the storage dtype
    )
    log_prob: Tensor  # (B, n) log p(latents[:, j+1] | latents[:, j]) in nats, summed over E
    final: Tensor  # (B, *E) the trajectory's end, at sigma = 0
    completions: Tensor | None  # (B, n+1, *E) where the ODE leads from latents[:, j]; the last is `final`
    nfe_rows: int  # network evaluations, in samples
    nfe_calls: int  # network evaluations, in calls


def sample_noise(policy, seed: int, iteration: int, samples: range | list[int], count: int) -> Tensor:
    """Standard normal noise for the given samples of an iteration: `count` latents each, (B, count, *E).

    Sample i always gets the same noise, whatever other samples are drawn with it.
    """
    return torch.stack([policy.noise(count, sample_generator(seed, iteration, i)) for i in samples])


def sample_generator(seed: int, iteration: int, sample: int) -> torch.Generator:
    """A generator on the CPU that only these three numbers, each 0 or more, decide."""
    state = int(np.random.SeedSequence((seed, iteration, sample)).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state)


def rollout(
    policy,
    noise: Tensor,
    cond: dict[str, Tensor],
    sigmas: Tensor,
    window: tuple[int, int],
    *,
    noise_level: float,
    kind: str = "flow",
    storage_dtype: torch.dtype | None = None,
    with_completions: bool = False,
    completion_batch_size: int | None = None,
    replayed: tuple[Tensor, Tensor] | None = None,
) -> Rollout:
    """Sample B trajectories: stochastic steps within `window`, ODE steps before and after it.

    noise:  (B, n+1, *E): the initial latent and the n noises of the stochastic steps.
    cond:   batch-first tensors from policy.encode.
    sigmas: (N+1,) from 1 down to 0.
    window: (start, stop): steps start .. stop-1 are stochastic, n = stop - start, 0 <= start < stop <= N - 1.
            The last step is never stochastic: its standard deviation is 0 (cps) or next to 0.

    with_completions: also complete each state before a stochastic step by the ODE (TP-GRPO, arXiv
            2602.06422). The completions go down the grid together: one call per grid step for all of them,
            the newly reached state included (completion_batch_size caps the rows of a call). A state's first
            ODE step uses the velocity that its stochastic step needs anyway. The trajectory's own steps are
            calls of their own, on exactly these B rows, so that training on the same rows repeats them bit
            for bit and ratio == 1 before the first update.
    replayed: rows (R,) and the states (R, p+1, *E), 0 <= p <= n, that these rows go through before and after
            each of their first p stochastic steps, in place of sampling them (OP-GRPO, arXiv 2604.04142).
            log_prob is that of these steps under this policy. States are in the storage dtype.
    storage_dtype: each new state is rounded to it (None: the dtype of the noise) before its log-probability
            and before the next step, so that training, which reads the stored state, sees the same numbers.

    With noise_level = 0 the stochastic steps are ODE steps exactly, and log_prob is infinite.
    Runs without gradient. Raises ValueError if the window does not fit the grid or the noise.
    """
    start, stop = window
    num_steps = len(sigmas) - 1
    if not 0 <= start < stop <= num_steps - 1 or noise.shape[1] != stop - start + 1:
        raise ValueError(f"window {window} does not fit {num_steps} steps and noise {tuple(noise.shape)}")
    storage_dtype = storage_dtype or noise.dtype

    def reach(x: Tensor, j: int) -> Tensor:  # the state before stochastic step j, in place of x
        if replayed is not None and 0 <= j < replayed[1].shape[1]:
            return x.index_copy(0, replayed[0], replayed[1][:, j])
        return x

    x = reach(noise[:, 0].to(storage_dtype), -start)
    latents, log_probs, rows, calls = [], [], 0, 0
    branches = []  # the completions under way, each (B, *E), all at the current sigma
    with torch.no_grad():
        for k in range(num_steps):
            sigma, sigma_next = sigmas[k], sigmas[k + 1]
            v = policy.velocity(x, sigma, cond)
            rows, calls = rows + len(x), calls + 1
            if branches:
                joined = torch.cat(branches)
                joined_cond = {name: torch.cat([value] * len(branches)) for name, value in cond.items()}
                joined, used = _ode_step_in_batches(
                    policy, joined, joined_cond, sigma, sigma_next, completion_batch_size
                )
                branches = list(joined.to(storage_dtype).split(len(x)))
                rows, calls = rows + len(joined), calls + used
            if start <= k < stop:
                latents.append(x)
                if with_completions:
                    branches.append(ode_step(x, v, sigma, sigma_next).to(storage_dtype))
                mean, step_std = transition(
                    x, v, sigma, sigma_next, noise_level=noise_level, sigma_clip=sigmas[1], kind=kind
                )
                x = reach((mean + step_std * noise[:, 1 + k - start]).to(storage_dtype), k + 1 - start)
                log_probs.append(
                    gaussian_log_prob(x, mean, step_std) if noise_level else x.new_full((len(x),), torch.inf)
                )
            else:
                x = reach(ode_step(x, v, sigma, sigma_next).to(storage_dtype), k + 1 - start)
            if k == stop - 1:
                latents.append(x)
    completions = torch.stack([*branches, x], dim=1) if with_completions else None
    return Rollout(torch.stack(latents, dim=1), torch.stack(log_probs, dim=1), x, completions, rows, calls)


def step_moments(
    policy, x: Tensor, k: int, cond: dict[str, Tensor], sigmas: Tensor, *, noise_level: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Mean (B, *E) and standard deviation () of the policy's stochastic step k from x (B, *E), as in
    `rollout`.

    Gradient flows to the policy's weights through the velocity.
    """
    v = policy.velocity(x, sigmas[k], cond)
    return transition(
        x, v, sigmas[k], sigmas[k + 1], noise_level=noise_level, sigma_clip=sigmas[1], kind=kind
    )


def all_moments(
    policy,
    latents: Tensor,
    cond: dict[str, Tensor],
    sigmas: Tensor,
    window: tuple[int, int],
    *,
    noise_level: float,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """`step_moments` of all n steps of trajectories (B, n+1, *E), without gradient: means (B, n, *E), stds
    (n,)."""
    with torch.no_grad():
        moments = [
            step_moments(policy, latents[:, j], k, cond, sigmas, noise_level=noise_level, kind=kind)
            for j, k in enumerate(range(*window))
        ]
    means, stds = zip(*moments, strict=True)
    return torch.stack(means, dim=1), torch.stack(stds)


def log_weight_variance(
    latents: Tensor, off: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Variance of the log-weight log p_new - log p_off of each step, given the state, over trajectories
    (B, n+1, *E) from `off`.

    off, new: their `all_moments` under the two policies. Given the state, the log-weight is normal with
    variance V = |mean_new - mean_off|^2 / std^2 and mean -V/2, if `new` was not trained on these
    trajectories. Returns the mean over the trajectories of (log-weight + V/2)^2 (n,), and of V (n,), which
    must agree. For the flow sampler below sigma = 1, V = |dv|^2 dt (1 + a^2/2)^2 (1 - sigma) / (a^2 sigma).
    """
    measured, expected = [], []
    for j, std in enumerate(off[1]):
        x_next, mean_off, mean_new = latents[:, j + 1], off[0][:, j], new[0][:, j]
        log_w = gaussian_log_prob(x_next, mean_new, std) - gaussian_log_prob(x_next, mean_off, std)
        V = 2 * gaussian_kl(mean_new, mean_off, std)
        measured.append(((log_w + V / 2) ** 2).mean())
        expected.append(V.mean())
    return torch.stack(measured), torch.stack(expected)


def ode_sample(policy, x: Tensor, cond: dict[str, Tensor], sigmas: Tensor) -> Tensor:
    """Follow the ODE from x at sigmas[0] to the end of the grid, without gradient. x: (B, *E). Returns (B,
    *E)."""
    with torch.no_grad():
        for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
            x = ode_step(x, policy.velocity(x, sigma, cond), sigma, sigma_next)
    return x


def _ode_step_in_batches(policy, x, cond, sigma, sigma_next, batch_size):
    """One ODE step of all rows, at most batch_size rows a call. Returns the new states and the number of
    calls."""
    batch_size = batch_size or len(x)
    parts = []
    for first in range(0, len(x), batch_size):
        rows = slice(first, first + batch_size)
        v = policy.velocity(x[rows], sigma, {name: value[rows] for name, value in cond.items()})
        parts.append(ode_step(x[rows], v, sigma, sigma_next))
    return torch.cat(parts), len(parts)
