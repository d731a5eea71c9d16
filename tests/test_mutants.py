"""Each mutant of mutants.py must fail the test that it names; every pure function has one."""

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
from pathlib import Path

import pytest
from conftest import LinearPolicy
from mutants import MUTANTS, Mutant

COVERED = [
    f"shared.{name}" for name in ("sde", "grpo", "rollout", "prompts", "rewards", "policies", "training")
]
COVERED += ["shared.ctmc", "shared.paths", "shared.tokens", "shared.distances"]
COVERED += ["shared.policies.digit_tokens", "shared.rewards.answers"]
COVERED += [f"shared.rewards.{name}" for name in ("geneval", "ocr", "remote")]
COVERED += ["shared.token_rollout", "shared.evaluation"]
COVERED += ["algos.flow_grpo", "algos.tp_grpo", "algos.op_grpo", "algos.dflow_grpo"]
EXEMPT = {f"{name}.train" for name in COVERED}  # whole runs
EXEMPT |= {"shared.training.timed", "shared.training.swapped"}  # contexts, whose code cannot be exchanged
FIXTURES = {"linear_policy": LinearPolicy}


def resolve(path: str):
    """The module and the function or method of an import path."""
    target = pkgutil.resolve_name(path)
    return importlib.import_module(target.__module__), target


@contextlib.contextmanager
def applied(mutant: Mutant, folder: Path):
    """Within this context the function has the mutant's code, wherever it has been imported."""
    module, function = resolve(mutant.function)
    source, body = Path(module.__file__).read_text(), inspect.getsource(function)
    assert body.count(mutant.old) == 1, (
        f"{mutant.function} holds {mutant.old!r} {body.count(mutant.old)} times"
    )
    copy = folder / "mutated.py"
    copy.write_text(source.replace(body, body.replace(mutant.old, mutant.new)))
    spec = importlib.util.spec_from_file_location(module.__name__ + "_mutated", copy)
    mutated = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.sys.modules, spec.name, mutated)  # dataclasses look their module up
        spec.loader.exec_module(mutated)
    for name in mutant.function.removeprefix(module.__name__ + ".").split("."):
        mutated = getattr(mutated, name)
    original = function.__code__, function.__defaults__
    function.__code__, function.__defaults__ = mutated.__code__, mutated.__defaults__
    try:
        yield
    finally:
        function.__code__, function.__defaults__ = original


def run_test(path: str) -> None:
    """Run a test function with every combination of its parameters."""
    module, name = path.split(".")
    test = getattr(importlib.import_module(module), name)
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    choices = []
    for mark in marks:
        names = [word.strip() for word in mark.args[0].split(",")]
        values = [value if len(names) > 1 else (value,) for value in mark.args[1]]
        choices.append([dict(zip(names, value, strict=True)) for value in values])
    for combination in itertools.product(*choices):
        arguments = {key: value for part in combination for key, value in part.items()}
        arguments |= {
            key: make() for key, make in FIXTURES.items() if key in inspect.signature(test).parameters
        }
        test(**arguments)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.function}: {m.fault}" for m in MUTANTS])
def test_mutant_is_killed(mutant, tmp_path):
    with applied(mutant, tmp_path):
        try:
            run_test(mutant.killed_by)
        except (Exception, pytest.fail.Exception):
            return
    pytest.fail(f"{mutant.function} with the fault {mutant.fault!r} passes {mutant.killed_by}")


@pytest.mark.parametrize("path", sorted({mutant.killed_by for mutant in MUTANTS}))
def test_killers_pass_on_the_right_code(path):
    run_test(path)


def test_every_public_function_has_a_mutant():
    mutated = {mutant.function for mutant in MUTANTS}
    for name in COVERED:
        module = importlib.import_module(name)
        functions = [
            f for f, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == name
        ]
        public = {f"{name}.{f}" for f in functions if not f.startswith("_")} - EXEMPT
        assert functions and public <= mutated, f"without a mutant: {sorted(public - mutated)}"
    assert len(MUTANTS) >= 40 and len({m[:2] for m in MUTANTS}) == len(MUTANTS)
