"""All properties, in the order of the contract, and all named wrong versions."""

import torch

from oracle import (  # noqa: F401
    properties_discrete,
    properties_learning,
    properties_likelihood,
    properties_paths,
    properties_replay,
    properties_steps,
    properties_transition,
    properties_turning,
)
from oracle.calling import example
from oracle.checks import Measured, Mismatch
from oracle.definitions import DEFINITIONS
from oracle.measuring import PROPERTIES, check, numbers
from oracle.wrong_discrete import WRONG_DISCRETE
from oracle.wrong_learning import WRONG_LEARNING
from oracle.wrong_paths import WRONG_PATHS
from oracle.wrong_replay import WRONG_REPLAY
from oracle.wrong_steps import WRONG_STEPS
from oracle.wrong_transition import WRONG_TRANSITION
from oracle.wrong_turning import WRONG_TURNING

CONTRACT = tuple(DEFINITIONS)
WRONGS = [
    *WRONG_STEPS,
    *WRONG_LEARNING,
    *WRONG_TURNING,
    *WRONG_REPLAY,
    *WRONG_PATHS,
    *WRONG_TRANSITION,
    *WRONG_DISCRETE,
]


def unchanged(f, case: str) -> Measured:
    """Whether a call leaves its tensor arguments as they were. Raises Mismatch if it does not."""
    args, kwargs = example(case, f)
    used, _ = example(case, f)
    f.plainly(case, *used, **kwargs)
    pairs = [(a, b) for a, b in zip(args, used, strict=True) if isinstance(a, torch.Tensor)]
    if not all(torch.equal(a, b) for a, b in pairs):
        raise Mismatch("it changes its arguments in place")
    return Measured(numbers([0.0]), numbers([0.0]))


for name in CONTRACT[1:]:  # the first has no tensor among its arguments
    check(name, "it leaves its arguments as they were", "functions of the contract are pure", cases=(name,),
          tolerance=0.0)(unchanged)  # fmt: skip
PROPERTIES.sort(key=lambda prop: CONTRACT.index(prop.function))
