"""Draws of symbols from given uniform numbers; checks of tokens, logits and times (for shared/ctmc.py)."""

import math

import torch
from torch import Tensor

from shared.distances import in_chunks

JUMPS = ("exp", "euler")


def draw_symbols(law: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF: the first symbol v with law(0) + ... + law(v) > u * total, never one whose law is 0.

    law: (..., V), >= 0, of any total; uniforms: (*n, ...) in [0, 1), float64, e.g. (n, ...) for n draws from
    every law, which is summed once. Returns (*n, ...), int64. A draw depends on its own law and u alone.
    Computed in chunks. Raises ValueError for other shapes or numbers, and a total that is 0 or not finite.
    Pinned by test_a_drawn_symbol_is_the_first_beyond_its_uniform_number.
    """
    *shape, size = law.shape
    if list(uniforms.shape[uniforms.ndim - len(shape) :]) != shape:
        raise ValueError(f"uniforms {tuple(uniforms.shape)} need a shape that ends in {tuple(shape)}")
    if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ValueError("uniforms must lie in [0, 1)")
    tokens = math.prod(shape)
    laws, numbers = law.reshape(tokens, size), uniforms.reshape(uniforms.numel() // max(1, tokens), tokens).T

    def invert(row):
        cumulated = laws[row].cumsum(-1, dtype=torch.float64)
        total = cumulated[:, -1:]
        if not bool(((total > 0) & (total < math.inf)).all()):
            raise ValueError("a law to draw from needs a total that is finite and not 0")
        below = torch.nextafter(total, torch.zeros_like(total))  # u * total may round to total
        target = torch.minimum(numbers[row].double() * total, below).contiguous()
        return torch.searchsorted(cumulated, target, right=True)

    drawn = in_chunks(invert, size, torch.arange(tokens, device=law.device))
    return drawn.T.reshape(uniforms.shape)


def draw_uniforms(shape, device, generator: torch.Generator | None = None) -> Tensor:
    """Uniform numbers in [0, 1) for `draw_symbols`: float64, as float32 knows 2^24 different ones only."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=device)


def checked_tokens(path, *tokens: Tensor) -> list[Tensor]:
    """Tokens as int64, broadcast to one shape; ValueError unless they are symbols of the path."""
    for x in tokens:
        if x.is_floating_point() or (x.numel() and not 0 <= int(x.min()) <= int(x.max()) < path.vocab_size):
            raise ValueError(f"tokens must be integers from 0 to {path.vocab_size - 1}")
    return [x.long() for x in torch.broadcast_tensors(*tokens)]


def checked_logits(path, logits: Tensor, x: Tensor) -> Tensor:
    """logits (..., V) in float32 at least; ValueError unless there are V for every token of x (...,)."""
    if logits.shape != (*x.shape, path.vocab_size):
        raise ValueError(f"logits {tuple(logits.shape)} need the shape {(*x.shape, path.vocab_size)}")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def checked_start(t: float | Tensor) -> float:
    """The time at which a step starts; ValueError unless 0 <= t < 1."""
    if not 0 <= (t := float(t)) < 1:
        raise ValueError(f"a step starts at 0 <= t < 1, not {t}")
    return t


def checked_times(t: float | Tensor, x1: Tensor) -> Tensor:
    """A time of every token of x1 (...,), in float64; ValueError unless 0 <= t <= 1."""
    t = torch.as_tensor(t, dtype=torch.float64, device=x1.device)
    if not bool(((t >= 0) & (t <= 1)).all()):
        raise ValueError("t must lie in [0, 1]")
    return t.expand(x1.shape)


def checked_step(t: float | Tensor, h: float | Tensor, jump: str) -> tuple[float, float]:
    """(t, h) of a step; ValueError unless 0 <= t < 1, 0 < h and jump is one of JUMPS."""
    if jump not in JUMPS or not 0 < (h := float(h)) < math.inf:
        raise ValueError(f"a step needs h > 0 and a jump of {' or '.join(JUMPS)}, not {h} and {jump!r}")
    return checked_start(t), h
