"""How an implementation is held against the properties: measuring, tolerances, and what a deviation means.

A property measures something of the contract functions (values, gradients, integrals) and knows what it must
be. Where it is something else, every named wrong version is measured in the same way: the meaning of the
deviation is the wrong version whose measurements agree with those of the implementation most often.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from oracle.calling import TOLERANCE, Functions, arithmetic
from oracle.definitions import DEFINITIONS, replayed_loss

AGREEMENT = 10  # tolerances within which a wrong version explains a measurement


class Mismatch(Exception):
    """A result that cannot be compared: its shape is wrong, say. The message says what is wrong."""


class Measured(NamedTuple):
    """What a property found and must find. scale bounds the terms whose rounding the result inherits."""

    observed: Tensor
    expected: Tensor | Callable[[], Tensor]  # a function where that is slow
    scale: Tensor | float = 1.0


class Property(NamedTuple):
    """One row of the table. measure takes the functions as attributes, called as the contract says."""

    function: str
    name: str
    equation: str
    needs: tuple[str, ...]
    measure: Callable[[Functions], Measured]
    tolerance: float | None = None  # None: that of the arithmetic
    quick: bool = True  # cheap enough to be measured on every wrong version
    lent: tuple[str, ...] = ()  # what else it calls: the file's, or the oracle's where the file has none

    def __str__(self) -> str:
        return f"{self.function}: {self.name}"


@dataclass(frozen=True, eq=False)  # equal only to itself, so that its behaviour can be cached
class Wrong:
    """A named wrong version: the functions that it replaces, and what it does, as a sentence. One that puts
    right functions together wrongly names these, and has the composition."""

    sentence: str
    functions: dict[str, Callable]
    composed: Callable = replayed_loss


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


class Outcome(NamedTuple):
    """A property measured on an implementation (expected is a tensor); error where that was impossible."""

    property: Property
    measured: Measured | None
    deviation: float
    tolerance: float
    arithmetic: str
    error: str

    @property
    def holds(self) -> bool:
        return self.deviation <= self.tolerance


def largest_deviation(observed: Tensor, measured: Measured) -> float:
    """max |observed - expected| / scale; infinite where observed is not finite."""
    off = (observed - measured.expected).abs() / measured.scale
    return float(off.nan_to_num(nan=torch.inf).max())


def observe(prop: Property, functions: Functions) -> Measured:
    """What a property finds. Raises what the functions raise, or Mismatch."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        return prop.measure(functions)


def measure(prop: Property, functions: Functions, precision: str = "float64") -> Outcome:
    """One property of the given functions. Raises NotImplementedError if they do."""
    tolerance = TOLERANCE[precision] if prop.tolerance is None else prop.tolerance
    try:
        measured = observe(prop, functions)
    except Mismatch as mismatch:
        return Outcome(prop, None, torch.inf, tolerance, precision, str(mismatch))
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"raised {type(error).__name__}: {error}".splitlines()[0][:160]
        return Outcome(prop, None, torch.inf, tolerance, precision, reason)
    if callable(measured.expected):
        measured = measured._replace(expected=measured.expected())
    return Outcome(prop, measured, largest_deviation(measured.observed, measured), tolerance, precision, "")


def examine(functions: dict[str, Callable], properties: list[Property], wrongs: list[Wrong]) -> list[Row]:
    """Hold functions against properties: one row each, in their order.

    Not checked is a property that needs a function that is not there, or one that raises NotImplementedError
    (a kind of sampler that it does not have, say).
    """
    checked = Functions(functions)
    precision = {name: arithmetic(name, checked) for name in functions}
    outcomes, absent = {}, {}
    for prop in properties:
        missing = [name for name in prop.needs if name not in functions]
        if missing:
            absent[prop] = f"lacks {', '.join(missing)}"
            continue
        single = any(precision.get(name) == "float32" for name in (*prop.needs, *prop.lent))
        try:
            outcomes[prop] = measure(prop, checked, "float32" if single else "float64")
        except NotImplementedError as reason:
            absent[prop] = f"not implemented: {reason}".splitlines()[0]
    diagnosis = Diagnosis(list(outcomes.values()), wrongs)
    rows = []
    for prop in properties:
        if prop in absent:
            row = (None, None, None, "not checked", absent[prop])
        else:
            outcome = outcomes[prop]
            found = (outcome.deviation, outcome.tolerance, outcome.arithmetic)
            row = (*found, "holds", "") if outcome.holds else (*found, "FAILS", diagnosis.meaning(outcome))
        rows.append(Row(prop.function, prop.name, prop.equation, *row))
    return rows


class Diagnosis:
    """What the failures among some outcomes mean."""

    def __init__(self, outcomes: list[Outcome], wrongs: list[Wrong]):
        self.outcomes, self.wrongs = outcomes, wrongs
        self.named: list[Wrong] = []
        alone = [o for o in outcomes if len(o.property.needs) == 1 and not o.property.lent]
        simple = [o for o in alone if not o.holds]
        self.spoilt = list(dict.fromkeys(failure.property.function for failure in simple))
        for failure in simple:
            if failure.property.quick and not failure.error:
                self.named += self.best(self.suspects(failure, self.wrongs))

    def meaning(self, failure: Outcome) -> str:
        """A sentence for a failed property."""
        if failure.error:
            return failure.error
        causes = [function for function in self.spoilt if function in self.concerned(failure)]
        several = len(self.concerned(failure)) > 1
        wrongs = self.wrongs
        if causes and (several or not failure.property.quick):
            wrongs = self.named + [wrong for wrong in self.wrongs if len(wrong.functions) > 1]
        best = self.best(self.suspects(failure, wrongs))
        if best:
            return best[0].sentence
        if several and causes:
            return f"follows from the failures of {', '.join(causes)}"
        return pattern(failure)

    def suspects(self, failure: Outcome, wrongs: list[Wrong]) -> list[Wrong]:
        """Wrong versions that measure what the implementation does."""
        return [wrong for wrong in wrongs if self.relevant(wrong, failure) and self.agrees(wrong, failure)]

    def best(self, suspects: list[Wrong]) -> list[Wrong]:
        """The suspect that reproduces most outcomes, good ones included, or none."""
        return [max(suspects, key=self.agreement)] if len(suspects) > 1 else suspects

    def agreement(self, wrong: Wrong) -> float:
        """How well a wrong version reproduces the outcomes of the functions that it replaces, on average."""
        relevant = [o for o in self.outcomes if o.property.quick and self.relevant(wrong, o)]
        relevant = [o for o in relevant if len(o.property.needs) == len(wrong.functions)] or relevant
        return sum(self.likeness(wrong, o) for o in relevant) / max(len(relevant), 1)

    def concerned(self, outcome: Outcome) -> list[str]:
        """What a failure may come from: what it needs, and what it was lent if that fails by itself."""
        needs, lent = outcome.property.needs, outcome.property.lent
        return [*needs, *(name for name in lent if name in self.spoilt)]

    def relevant(self, wrong: Wrong, outcome: Outcome) -> bool:
        return all(name in self.concerned(outcome) for name in wrong.functions)

    def agrees(self, wrong: Wrong, outcome: Outcome) -> bool:
        return self.likeness(wrong, outcome) == 1.0

    def likeness(self, wrong: Wrong, outcome: Outcome) -> float:
        """1 for the same measurement, 1/2 where both fail but differently, 0 where only one fails."""
        if outcome.error:
            return 0.0 if measure(outcome.property, version(wrong)).holds else 0.5
        measured, found = outcome.measured, outcome.measured.observed
        observed = behaviour(wrong, outcome.property)
        if observed is None or observed.shape != found.shape:
            return 0.0 if outcome.holds else 0.5
        if (largest_deviation(observed, measured) <= outcome.tolerance) != outcome.holds:
            return 0.0
        slack = AGREEMENT * TOLERANCE[outcome.arithmetic] * found.abs().clamp(min=1)
        slack = slack.clamp(min=outcome.property.tolerance or 0.0) * measured.scale
        same = ((observed - found).abs() <= slack) | (observed == found) | (observed.isnan() & found.isnan())
        return 1.0 if same.all() else 0.5


@cache
def version(wrong: Wrong) -> Functions:
    """All contract functions, with those that a wrong version replaces."""
    return Functions({**DEFINITIONS, **wrong.functions}, wrong.composed)


@cache
def behaviour(wrong: Wrong, prop: Property) -> Tensor | None:
    """What a property observes of a wrong version; None where that raises."""
    try:
        return observe(prop, version(wrong)).observed
    except Exception:  # a wrong version may raise, too
        return None


def pattern(failure: Outcome) -> str:
    """The plain pattern of a deviation that no named wrong version explains."""
    observed, expected = failure.measured.observed, failure.measured.expected
    slack = AGREEMENT * TOLERANCE[failure.arithmetic] * observed.abs().max()

    def explained(values: Tensor) -> bool:
        return observed.numel() > 1 and bool(((observed - values).abs() <= slack).all())

    if not observed.isfinite().all():
        return "the result is not finite"
    if (observed == 0).all():
        return "the result is 0 everywhere"
    factor = float((observed * expected).sum() / (expected**2).sum().clamp(min=1e-300))
    if explained(factor * expected) and failure.property.function == "gaussian_kl" and 0 < factor < 1:
        return (
            f"the KL is {factor:.6g} times the exact one, as when dividing by g^2 = step_std^2 / dt, which "
            f"loses the factor dt (here {factor:.6g})"
        )
    if explained(factor * expected):
        return f"the result is {factor:.6g} times the exact one"
    shift = float((observed - expected).mean())
    if explained(expected + shift):
        return f"the result is the exact one plus {shift:.6g}"
    worst = int(((observed - expected).abs() / failure.measured.scale).flatten().argmax())
    got, exact = float(observed.flatten()[worst]), float(expected.flatten()[worst])
    return f"no known pattern; the largest deviation is {got:.6g} in place of {exact:.6g}"
