"""What the properties share: their list, the numbers they are measured on, and how results are read.

Random numbers come from fixed generators, and all inputs are exact in float32, so that an implementation that
works in float32 loses nothing before it starts.
"""

from functools import partial

import torch
from torch import Tensor

from oracle import gaussian
from oracle.calling import TOLERANCE, Functions
from oracle.checks import Mismatch, Property

SINGLE = TOLERANCE["float32"]
GRID = (1.0, 0.9375, 0.78125, 0.5625, 0.3125, 0.125, 0.0)  # uneven, and exact in float32
LEVELS = {"flow": 0.75, "dance": 0.375, "cps": 0.625}
EQUATIONS = {
    "flow": "mean = x - (v + g^2/(2 sigma) (x + (1 - sigma) v)) dt, step_std = g sqrt(dt), "
    "g = a sqrt(sigma/(1 - sigma)) (arXiv 2505.05470)",
    "dance": "mean = x - (v + g^2/(2 sigma) (x + (1 - sigma) v)) dt, step_std = g sqrt(dt), g = a "
    "(arXiv 2505.07818)",
    "cps": "mean = (1 - sigma') x0_hat + sqrt(sigma'^2 - step_std^2) eps_hat, step_std = sigma' sin(a pi/2) "
    "(arXiv 2509.05952)",
}


PROPERTIES: list[Property] = []


def check(
    function: str,
    name: str,
    equation: str | dict,
    *,
    cases=(None,),
    needs=(),
    tolerance=None,
    quick=True,
    lent=(),
):
    """Register a property, one row for each case: {case} in its name is replaced; equation may be by case."""

    def register(measure):
        for case in cases:
            PROPERTIES.append(
                Property(
                    function,
                    name.format(case=case),
                    equation[case] if isinstance(equation, dict) else equation,
                    needs or (function,),
                    measure if case is None else partial(measure, case=case),
                    tolerance,
                    quick,
                    lent,
                )
            )
        return measure

    return register


def draw(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers in float64 that float32 holds exactly."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return noise.double()


def numbers(values) -> Tensor:
    """Numbers or a tensor as a float64 tensor. (Of a Python float, torch.as_tensor alone makes a float32.)"""
    return torch.as_tensor(values, dtype=torch.float64)


def flat(*results: tuple) -> Tensor:
    """(value, shape) pairs as one float64 vector. Raises Mismatch where a value has another shape."""
    parts = []
    for value, shape in results:
        value = numbers(value)
        if tuple(value.shape) != tuple(shape):
            raise Mismatch(f"the result has shape {tuple(value.shape)}, not {tuple(shape)}")
        parts.append(value.flatten())
    return torch.cat(parts)


def moments_of(f: Functions, x: Tensor, v: Tensor, sigma: float, sigma_next: float, **rest) -> Tensor:
    """Mean and standard deviation of every entry, (2, *x.shape)."""
    mean, std = f.transition(x, v, sigma, sigma_next, **rest)
    if tuple(mean.shape) != tuple(x.shape):
        raise Mismatch(f"the mean has shape {tuple(mean.shape)}, not {tuple(x.shape)}")
    std = numbers(std)
    try:
        return torch.stack([mean.double(), std.broadcast_to(x.shape)])
    except RuntimeError:
        raise Mismatch(f"step_std of shape {tuple(std.shape)} does not fit x {tuple(x.shape)}") from None


def exact_moments(x, v, sigma, sigma_next, noise_level, sigma_clip, kind) -> Tensor:
    on_x, on_v, std = gaussian.step_coefficients(sigma, sigma_next, kind, noise_level, sigma_clip)
    return torch.stack([on_x * x + on_v * v, torch.full_like(x, std)])


def gradient(value: Tensor, *leaves: Tensor) -> Tensor:
    """d(sum of value) / d leaves, flat; 0 where no gradient flows."""
    if not value.requires_grad:
        return torch.zeros(sum(leaf.numel() for leaf in leaves), dtype=torch.float64)
    grads = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return torch.cat([g.double().flatten() for g in filled])


def random_policy(seed: int, dims: int, size: float = 0.4) -> gaussian.Policy:
    """A linear policy without symmetries on GRID."""
    N = len(GRID) - 1
    return gaussian.Policy(
        size * draw(seed, N, dims, dims) + 0.5 * torch.eye(dims), size * draw(seed + 1, N, dims),
        numbers(GRID),
    )  # fmt: skip
