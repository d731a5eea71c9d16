"""How contract functions are called, and in which arithmetic they compute."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from oracle.definitions import DEFINITIONS, replayed_loss
from oracle.definitions_discrete import PATHS

TOLERANCE = {"float64": 1e-10, "float32": 2e-5}  # times the property's scale: what rounding may do to it
FLOAT32_ROUNDING = 1e-6  # of results of order 1 to 10
STEP_FUNCTIONS = ("ode_step", "transition", "gaussian_log_prob", "gaussian_kl")  # they take sigmas or a std


class Functions:
    """Contract functions as attributes. Every call gets copies of its tensors, so that one call cannot spoil
    the next; functions that take sigmas as tensors only get tensors. Classes are given as they are, and the
    oracle's stand in for paths that are not there. composed(self, replay) is the loss of replayed samples
    that the functions make together."""

    def __init__(self, functions: dict[str, Callable], composed: Callable = replayed_loss):
        self.raw, self.composed = {**PATHS, **functions}, composed
        self.takes_tensors = {name for name in functions if _style(name, functions[name]) == "tensor"}

    def __getattr__(self, name: str) -> Callable:
        function, as_tensors = self.raw[name], name in self.takes_tensors
        if isinstance(function, type):
            return function

        def call(*args, **kwargs):
            return _call(function, as_tensors, args, kwargs)

        return call

    def typical(self, name: str) -> Callable:
        """What `example` has arguments for: a function, or the methods of a path."""
        if name == "MixturePath":
            return _methods(self.MixturePath(4, corrector=0.3125))  # its rates are not exact in float32
        if name == "MetricPath":
            line = torch.arange(4, dtype=torch.float64)
            return _methods(self.MetricPath((line - line[:, None]) ** 2))
        return self.raw[name]

    def plainly(self, name: str, *args, **kwargs):
        """Make a typical call with the very tensors given."""
        return _call(self.typical(name), name in self.takes_tensors, args, kwargs, copies=False)


def example(name: str, functions: Functions) -> tuple[tuple, dict]:
    """Arguments of one typical call, with numbers that float32 holds exactly."""
    if name in EXAMPLES_DISCRETE:
        return EXAMPLES_DISCRETE[name](functions)
    numbers = torch.tensor([[0.5, -1.25, 2.0, 0.75], [1.5, 0.25, -0.625, -2.5]], dtype=torch.float64)
    other = torch.tensor([[1.0, -0.75, 0.5, 1.25], [-0.5, 2.25, 0.375, -1.5]], dtype=torch.float64)
    step = {"noise_level": 0.75, "sigma_clip": 0.875}
    examples = {
        "shifted_sigmas": ((5, 3.0), {}),
        "ode_step": ((numbers, other, 0.75, 0.5), {}),
        "transition": ((numbers, other, 0.75, 0.5), step),
        "gaussian_log_prob": ((numbers, other, 0.625), {}),
        "gaussian_kl": ((numbers, other, 0.625), {}),
        "group_advantages": ((numbers,), {}),
        "clipped_surrogate": ((numbers[0], numbers[0] + other[0] / 8, other[1], 0.25, other[0].abs()), {}),
        "incremental_rewards": ((numbers,), {}),
        "turning_points": ((numbers,), {}),
        "balance": ((numbers > -1, numbers), {}),
        "step_rewards": ((numbers,), {}),
        "sequence_weight": ((numbers, other), {}),
    }
    return examples[name]


def _methods(path: Any) -> Callable:
    """All methods of a path in one call: rates, kernel and column."""

    def call(x: Tensor, x1: Tensor, t: float, h: float) -> tuple[Tensor, ...]:
        column = path.log_kernel_column(x, x1, t, h, jump="exp", last=False)
        return path.rates(x, x1, t), path.kernel(x, x1, t, h), column.exp()

    return call


def _logits() -> tuple[Tensor, Tensor]:
    """Two tables of logits, (2, 4)."""
    logits = torch.tensor([[0.5, -1.25, 2.0, 0.75], [1.5, 0.25, -0.625, -2.5]], dtype=torch.float64)
    return logits, logits.flip(0) / 2


def _symbols() -> tuple[Tensor, Tensor]:
    return torch.tensor([0, 3]), torch.tensor([1, 3])


EXAMPLES_DISCRETE: dict[str, Callable] = {
    "MixturePath": lambda f: ((*_symbols(), 0.375, 0.125), {}),
    "MetricPath": lambda f: ((*_symbols(), 0.375, 0.125), {}),
    "transition_log_prob": lambda f: ((f.MixturePath(4), _logits()[0], *_symbols(), 0.375, 0.125), {}),
    "sample_step": lambda f: (
        (f.MixturePath(4), _logits()[0], _symbols()[0], 0.375, 0.125),
        {"jump": "exp", "last": True, "generator": torch.Generator().manual_seed(0)},
    ),
    "mc_log_ratio": lambda f: (
        (f.MixturePath(4, corrector=0.25), *(p.log_softmax(-1) for p in _logits()), *_symbols(),
         torch.tensor([[1, 2], [3, 0]]), 0.375, 0.125),
        {},
    ),
    "aggregate": lambda f: ((_logits()[0], _logits()[0] > -1, "geometric"), {}),
    "posterior_kl": lambda f: (_logits(), {}),
}  # fmt: skip


def _call(function: Callable, as_tensors: bool, args: Iterable, kwargs: dict, copies: bool = True):
    def fresh(value):
        if as_tensors and type(value) is float:
            return torch.tensor(value, dtype=torch.float64)
        return value.clone() if copies and isinstance(value, Tensor) else value

    kept = {k: v if k == "noise_level" else fresh(v) for k, v in kwargs.items()}
    return function(*map(fresh, args), **kept)


def _style(name: str, function: Callable) -> str:
    """Whether a function takes sigmas and step_std as floats or, where that raises, as 0-dim tensors."""
    if name not in STEP_FUNCTIONS:
        return "float"
    args, kwargs = example(name, Functions({}))
    for style in ("float", "tensor"):
        try:
            _call(function, style == "tensor", args, kwargs)
            return style
        except Exception:  # what it raises, if it always does, the properties report
            continue
    return "float"


def arithmetic(name: str, functions: Functions) -> str:
    """Whether a function computes in float64, or rounds to float32 somewhere on the way.

    "float32" if a result has that dtype; if a result deviates from the definition by what float32 rounding of
    a constant does; or if an argument is rounded: changing it by 2^-40 of itself, which float32 cannot hold,
    leaves the result the same bit for bit, although a change by 2^-18 moves it.
    """
    args, kwargs = example(name, functions)

    def results(functions: Functions, place: int | str | None = None, change: float = 0.0) -> list[Tensor]:
        moved = [_moved(value, change) if i == place else value for i, value in enumerate(args)]
        named = {key: _moved(value, change) if key == place else value for key, value in kwargs.items()}
        result = _call(functions.typical(name), name in functions.takes_tensors, moved, named)
        parts = result if isinstance(result, tuple) else (result,)
        numbers = [torch.tensor(p, dtype=torch.float64) if isinstance(p, float) else p for p in parts]
        tensors = [torch.as_tensor(p).detach() for p in numbers if not isinstance(p, dict)]
        return [t for t in tensors if t.is_floating_point()]

    try:
        plain = results(functions)
        if any(part.dtype != torch.float64 for part in plain):
            return "float32"
        exact = results(Functions(DEFINITIONS))
        off = max((float((p - e).abs().max()) for p, e in zip(plain, exact, strict=True)), default=0.0)
        if TOLERANCE["float64"] < off < FLOAT32_ROUNDING:
            return "float32"
        for place, value in [*enumerate(args), *kwargs.items()]:
            if isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point()):
                coarse, fine = results(functions, place, 2.0**-18), results(functions, place, 2.0**-40)
                if not _equal(plain, coarse) and _equal(plain, fine):
                    return "float32"
    except Exception:  # the properties report it
        pass
    return "float64"


def _moved(value: Tensor | float, change: float) -> Tensor | float:
    if isinstance(value, float):
        return value * (1 + change)
    return value * (
        1 + change * (1 + torch.arange(value.numel(), dtype=torch.float64) % 3).reshape(value.shape)
    )


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
