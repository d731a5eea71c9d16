"""How an implementation is held against the properties: measuring, tolerances, and what a deviation means.

A property measures something of the contract functions (values, gradients, integrals) and knows what it must
be. Where it is something else, every named wrong version is measured in the same way: the meaning of the
deviation is the wrong version whose measurements agree with those of the implementation most often.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from oracle.definitions import DEFINITIONS

TOLERANCE = {"float64": 1e-10, "float32": 2e-5}  # times the property's scale: what rounding may do to it
FLOAT32_ROUNDING = 1e-6  # of results of order 1 to 10
AGREEMENT = 10  # tolerances within which a wrong version explains a measurement
STEP_FUNCTIONS = ("ode_step", "transition", "gaussian_log_prob", "gaussian_kl")  # they take sigmas or a std


class Mismatch(Exception):
    """A result that cannot be compared: its shape is wrong, say. The message says what is wrong."""


class Measured(NamedTuple):
    """What a property found. scale bounds the terms whose rounding the result inherits."""

    observed: Tensor
    expected: Tensor
    scale: Tensor | float = 1.0


class Property(NamedTuple):
    """One row of the table. measure takes the functions as attributes, called as the contract says."""

    function: str
    name: str
    equation: str
    needs: tuple[str, ...]
    measure: Callable[["Functions"], Measured]
    tolerance: float | None = None  # None: that of the arithmetic

    def __str__(self) -> str:
        return f"{self.function}: {self.name}"


class Wrong(NamedTuple):
    """A named wrong version: the functions that it replaces, and what it does, as a sentence."""

    sentence: str
    functions: dict[str, Callable]


class Row(NamedTuple):
    """What became of a property. deviation and tolerance are None where it was not checked."""

    function: str
    property: str
    equation: str
    deviation: float | None
    tolerance: float | None
    arithmetic: str | None
    verdict: str  # holds, FAILS or not checked
    meaning: str


class Functions:
    """Contract functions as attributes. Every call gets copies of its tensors, so that one call cannot spoil
    the next; functions that take sigmas as tensors only get tensors."""

    def __init__(self, functions: dict[str, Callable]):
        self.raw = functions
        self.takes_tensors = {name for name in functions if _style(name, functions[name]) == "tensor"}

    def __getattr__(self, name: str) -> Callable:
        function, as_tensors = self.raw[name], name in self.takes_tensors

        def call(*args, **kwargs):
            return _call(function, as_tensors, args, kwargs)

        return call

    def plainly(self, name: str, *args, **kwargs):
        """Call a function with the very tensors given."""
        if name in self.takes_tensors:
            args = [torch.tensor(a, dtype=torch.float64) if isinstance(a, float) else a for a in args]
        return self.raw[name](*args, **kwargs)


def example(name: str) -> tuple[tuple, dict]:
    """Arguments of one typical call, with numbers that float32 holds exactly."""
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


def _call(function: Callable, as_tensors: bool, args: Iterable, kwargs: dict):
    def fresh(value):
        if as_tensors and type(value) is float:
            return torch.tensor(value, dtype=torch.float64)
        return value.clone() if isinstance(value, Tensor) else value

    kept = {k: v if k == "noise_level" else fresh(v) for k, v in kwargs.items()}
    return function(*map(fresh, args), **kept)


def _style(name: str, function: Callable) -> str:
    """Whether a function takes sigmas and step_std as floats or, where that raises, as 0-dim tensors."""
    if name not in STEP_FUNCTIONS:
        return "float"
    args, kwargs = example(name)
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
    args, kwargs = example(name)

    def results(functions: Functions, place: int | str | None = None, change: float = 0.0) -> list[Tensor]:
        moved = [_moved(value, change) if i == place else value for i, value in enumerate(args)]
        named = {key: _moved(value, change) if key == place else value for key, value in kwargs.items()}
        result = getattr(functions, name)(*moved, **named)
        parts = result if isinstance(result, tuple) else (result,)
        tensors = [torch.as_tensor(p).detach() for p in parts if not isinstance(p, dict)]
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


class Outcome(NamedTuple):
    """A property measured on an implementation; error where that was impossible."""

    property: Property
    measured: Measured | None
    deviation: float
    tolerance: float
    arithmetic: str
    error: str

    @property
    def holds(self) -> bool:
        return self.deviation <= self.tolerance


def largest_deviation(measured: Measured) -> float:
    """max |observed - expected| / scale; infinite where observed is not finite."""
    off = (measured.observed - measured.expected).abs() / measured.scale
    return float(off.nan_to_num(nan=torch.inf).max())


def measure(prop: Property, functions: Functions, precision: str = "float64") -> Outcome:
    """One property of the given functions."""
    tolerance = TOLERANCE[precision] if prop.tolerance is None else prop.tolerance
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            measured = prop.measure(functions)
    except Mismatch as mismatch:
        return Outcome(prop, None, torch.inf, tolerance, precision, str(mismatch))
    except Exception as error:
        reason = f"raised {type(error).__name__}: {error}".splitlines()[0][:160]
        return Outcome(prop, None, torch.inf, tolerance, precision, reason)
    return Outcome(prop, measured, largest_deviation(measured), tolerance, precision, "")


def examine(functions: dict[str, Callable], properties: list[Property], wrongs: list[Wrong]) -> list[Row]:
    """Hold functions against properties: one row each, in their order."""
    checked = Functions(functions)
    precision = {name: arithmetic(name, checked) for name in functions}
    outcomes = {}
    for prop in properties:
        if all(name in functions for name in prop.needs):
            single = "float32" if any(precision[name] == "float32" for name in prop.needs) else "float64"
            outcomes[prop] = measure(prop, checked, single)
    diagnosis = Diagnosis(list(outcomes.values()), wrongs)
    rows = []
    for prop in properties:
        outcome = outcomes.get(prop)
        if outcome is None:
            missing = ", ".join(name for name in prop.needs if name not in functions)
            row = (None, None, None, "not checked", f"lacks {missing}")
        elif outcome.holds:
            row = (outcome.deviation, outcome.tolerance, outcome.arithmetic, "holds", "")
        else:
            row = (
                outcome.deviation,
                outcome.tolerance,
                outcome.arithmetic,
                "FAILS",
                diagnosis.meaning(outcome),
            )
        rows.append(Row(prop.function, prop.name, prop.equation, *row))
    return rows


class Diagnosis:
    """What the failures among some outcomes mean."""

    def __init__(self, outcomes: list[Outcome], wrongs: list[Wrong]):
        self.outcomes, self.wrongs = outcomes, wrongs
        self.versions = {id(wrong): Functions({**DEFINITIONS, **wrong.functions}) for wrong in wrongs}
        self.known: dict[tuple[int, Property], bool] = {}

    def meaning(self, failure: Outcome) -> str:
        """A sentence for a failed property."""
        if failure.error:
            return failure.error
        suspects = [w for w in self.wrongs if self.relevant(w, failure) and self.agrees(w, failure)]
        if suspects:
            return max(suspects, key=self.agreement).sentence
        spoilt = [
            o.property.function
            for o in self.outcomes
            if not o.holds and len(o.property.needs) == 1 and o.property.function in failure.property.needs
        ]
        if spoilt and len(failure.property.needs) > 1:
            return f"follows from the failures of {', '.join(dict.fromkeys(spoilt))}"
        return pattern(failure)

    def relevant(self, wrong: Wrong, outcome: Outcome) -> bool:
        return all(name in outcome.property.needs for name in wrong.functions) and not outcome.error

    def agreement(self, wrong: Wrong) -> float:
        """Share of the outcomes that the wrong version reproduces, good ones included."""
        relevant = [outcome for outcome in self.outcomes if self.relevant(wrong, outcome)]
        return sum(self.agrees(wrong, outcome) for outcome in relevant) / len(relevant)

    def agrees(self, wrong: Wrong, outcome: Outcome) -> bool:
        key = (id(wrong), outcome.property)
        if key not in self.known:
            version = measure(outcome.property, self.versions[id(wrong)])
            self.known[key] = version.measured is not None and self.same(version, outcome)
        return self.known[key]

    @staticmethod
    def same(version: Outcome, outcome: Outcome) -> bool:
        """Whether both measured the same, and both right or both wrong."""
        a, b = version.measured.observed, outcome.measured.observed
        if a.shape != b.shape or (version.deviation <= outcome.tolerance) != outcome.holds:
            return False
        slack = AGREEMENT * TOLERANCE[outcome.arithmetic] * outcome.measured.scale * a.abs().clamp(min=1)
        return bool(((a - b).abs() <= slack).logical_or(a == b).logical_or(a.isnan() & b.isnan()).all())


def pattern(failure: Outcome) -> str:
    """The plain pattern of a deviation that no named wrong version explains."""
    observed, expected = failure.measured.observed, failure.measured.expected
    if not observed.isfinite().all():
        return "the result is not finite"
    if (observed == 0).all():
        return "the result is 0 everywhere"
    slack = AGREEMENT * TOLERANCE[failure.arithmetic]
    factor = float((observed * expected).sum() / (expected * expected).sum().clamp(min=1e-300))
    if (
        observed.numel() > 1
        and factor
        and ((observed - factor * expected).abs() <= slack * observed.abs().max()).all()
    ):
        words = f"the result is {factor:.6g} times the exact one"
        lost = f", as when dividing by g^2 = step_std^2 / dt, which loses the factor dt (here {factor:.6g})"
        return words + (lost if failure.property.function == "gaussian_kl" and 0 < factor < 1 else "")
    shift = float((observed - expected).mean())
    if observed.numel() > 1 and ((observed - expected - shift).abs() <= slack * observed.abs().max()).all():
        return f"the result is the exact one plus {shift:.6g}"
    worst = int(((observed - expected).abs() / failure.measured.scale).flatten().argmax())
    return (
        f"no known pattern; largest deviation: {observed.flatten()[worst]:.6g} instead of "
        f"{expected.flatten()[worst]:.6g}"
    )
