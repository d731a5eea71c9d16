"""Samplers of a rectified flow as Gaussian transitions: moments, log-probability, KL, and the sigma grid.

Conventions (rectified flow, x_sigma = (1 - sigma) x0 + sigma eps):
    sigma runs from 1 (noise) down to 0 (data); a step goes from sigma to sigma_next < sigma, and dt = sigma -
    sigma_next > 0; v = E[eps - x0 | x_sigma] is the model's velocity dx/dsigma, which points from data to
    noise.

Sigmas and noise levels are Python floats or 0-dim tensors. They are turned into Python floats, so that the
scalar coefficients are computed in float64 whatever the dtype of the latents. Latents of 16 bits are computed
in float32.
"""

import math

import torch
from torch import Tensor

SAMPLERS = ("flow", "dance", "cps")


def shifted_sigmas(num_steps: int, shift: float = 1.0) -> Tensor:
    """The grid sigma[0] = 1 > ... > sigma[num_steps] = 0, shifted as SD3 does (arXiv 2403.03206).

    sigma = shift s / (1 + (shift - 1) s) at s = 1, 1 - 1/N, ..., 0; shift = 1 is the linear grid.
    Models with a scheduler of their own take its grid instead: this one is not diffusers' `set_timesteps`,
    which shifts twice.

    Returns (num_steps + 1,) float64. Raises ValueError for num_steps < 1 or shift <= 0.
    """
    if num_steps < 1 or shift <= 0:
        raise ValueError(f"a sigma grid needs num_steps >= 1 and shift > 0, not {num_steps} and {shift}")
    s = torch.arange(num_steps, -1, -1, dtype=torch.float64) / num_steps  # (N+1,)
    return shift * s / (1 + (shift - 1) * s)


def ode_step(x: Tensor, v: Tensor, sigma: float | Tensor, sigma_next: float | Tensor) -> Tensor:
    """One Euler step of the flow's ODE: x - v dt.

    x, v: (B, *E). Returns (B, *E), float32 for 16-bit x. Differentiable in x and v.
    """
    return _at_least_float32(x) - v * (float(sigma) - float(sigma_next))


def transition(
    x: Tensor,
    v: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    noise_level: float,
    sigma_clip: float | Tensor,
    kind: str = "flow",
) -> tuple[Tensor, Tensor]:
    """Moments of one stochastic step: x_next ~ N(mean, step_std^2 I).

    With a = noise_level and eps_hat = x + (1 - sigma) v, the noise that the model sees in x, all three kinds
    are the ODE step, minus a share of that noise, plus fresh noise:

        mean = x - v dt - shrink eps_hat

        kind    step_std                                shrink                            source
        flow    a sqrt(sigma / (1 - sigma)) sqrt(dt)    step_std^2 / (2 sigma)            arXiv 2505.05470
        dance   a sqrt(dt)                              step_std^2 / (2 sigma)            arXiv 2505.07818
        cps     sigma_next sin(a pi / 2)                sigma_next (1 - cos(a pi / 2))    arXiv 2509.05952

    The last line is cps's mean (1 - sigma_next) x0_hat + sqrt(sigma_next^2 - step_std^2) eps_hat, with
    x0_hat = x - sigma v, in the form of the others. At a = 0 every kind is `ode_step` exactly. `flow` and
    `dance` keep the flow's marginals as the grid gets finer; `cps` replaces a fixed share of the noise at
    every step, however small, and does not.

    `flow` is singular at sigma = 1. Wherever sigma > sigma_clip it uses 1 - sigma_clip in place of 1 - sigma;
    with sigma_clip = sigma[1] that is the first step of a grid only, whose step_std is a if sigma[0] = 1. The
    test is `>` and not `== 1`, since grids also start at 0.999999. On any grid that step adds a^4 / 4 to the
    variance, besides terms of dt; the later steps forget it.

    x, v:        (B, *E), latents at sigma and the model's velocity there.
    noise_level: a >= 0, for cps also <= 1.
    sigma_clip:  the grid's second sigma.
    Returns mean (B, *E), float32 for 16-bit x, and step_std (), the standard deviation of x_next itself,
    sqrt(dt) included. Gradients flow through x and v into mean; step_std is a constant.
    Raises ValueError for an unknown kind, a noise level outside its range, sigmas that do not decrease within
    [0, 1], or `flow` at sigma = 1 without a sigma_clip below 1.
    """
    sigma, sigma_next, sigma_clip = float(sigma), float(sigma_next), float(sigma_clip)
    if kind not in SAMPLERS:
        raise ValueError(f"unknown sampler {kind!r}; known: {', '.join(SAMPLERS)}")
    if not 0 <= sigma_next < sigma <= 1:
        raise ValueError(f"sigma_next must be below sigma and both in [0, 1], not {sigma_next} and {sigma}")
    if not 0 <= noise_level <= (1 if kind == "cps" else math.inf):
        raise ValueError(f"noise_level must be >= 0, and <= 1 for cps, not {noise_level} for {kind}")
    if kind == "flow" and min(sigma, sigma_clip) >= 1:
        raise ValueError("flow at sigma = 1 needs sigma_clip < 1, the grid's second sigma")

    dt = sigma - sigma_next
    if kind == "cps":
        step_std = sigma_next * math.sin(noise_level * math.pi / 2)
        shrink = sigma_next * (1 - math.cos(noise_level * math.pi / 2))
    else:
        g = noise_level * (math.sqrt(sigma / (1 - min(sigma, sigma_clip))) if kind == "flow" else 1.0)
        step_std = g * math.sqrt(dt)
        shrink = step_std**2 / (2 * sigma)
    eps_hat = _at_least_float32(x) + v * (1 - sigma)
    mean = ode_step(x, v, sigma, sigma_next) - eps_hat * shrink
    return mean, torch.tensor(step_std, dtype=mean.dtype)


def gaussian_log_prob(x_next: Tensor, mean: Tensor, step_std: float | Tensor) -> Tensor:
    """log N(x_next; mean, step_std^2 I), normalised, in nats, summed over all entries of a sample.

    x_next, mean: (B, *E) of any rank; step_std: () > 0. Returns (B,), float32 for 16-bit x_next.
    Divide by the number of entries for the log-probability per dimension. Gradients flow through x_next and
    mean.
    Raises ValueError if step_std is not positive: a deterministic step has no density.
    """
    step_std = float(step_std)
    if not step_std > 0:
        raise ValueError(
            f"a log-probability needs step_std > 0, not {step_std}: deterministic steps are not trained"
        )
    z = (_at_least_float32(x_next) - mean) / step_std
    return (-0.5 * z**2 - (math.log(step_std) + 0.5 * math.log(2 * math.pi))).flatten(1).sum(1)


def gaussian_kl(mean: Tensor, mean_ref: Tensor, step_std: float | Tensor) -> Tensor:
    """KL(N(mean, step_std^2 I) || N(mean_ref, step_std^2 I)) = ||mean - mean_ref||^2 / (2 step_std^2), summed
    over a sample.

    This is the paper's KL: step_std contains sqrt(dt). The public Flow-GRPO code for SD3 divides by g^2
    instead, which loses the factor dt; its beta corresponds to beta * dt here, step by step.

    mean, mean_ref: (B, *E); step_std: () > 0. Returns (B,) >= 0 in nats. Gradients flow through both means.
    Raises ValueError if step_std is not positive.
    """
    step_std = float(step_std)
    if not step_std > 0:
        raise ValueError(f"a KL needs step_std > 0, not {step_std}: deterministic steps are not trained")
    return (((mean - mean_ref) / step_std) ** 2).flatten(1).sum(1) / 2


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
