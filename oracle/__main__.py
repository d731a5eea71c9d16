"""Hold an implementation against the exact truth.

    python -m oracle                     # this project's functions
    python -m oracle --impl FILE.py      # those that FILE.py defines
    python -m oracle --only transition   # one function, or the properties whose name contains the words
    python -m oracle --list              # the properties
    python -m oracle --json

Exit code 0 if all that was checked holds, 1 if a property fails, 2 if there is nothing that can be checked.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from oracle.checks import Property, Row, examine
from oracle.properties import CONTRACT, PROPERTIES, WRONGS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (
    *(f"shared/{name}.py" for name in ("sde", "grpo", "ctmc")),
    *(f"algos/{name}.py" for name in ("tp_grpo", "op_grpo", "dflow_grpo")),
)


class Unusable(Exception):
    """There is nothing to check; the message is one line."""


def load(path: Path) -> dict[str, Callable]:
    """The contract functions that a Python file defines. Raises Unusable."""
    if not path.is_file():
        raise Unusable(f"{path}: there is no such file")
    name = f"oracle_checks_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Unusable(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    sys.path.append(str(path.resolve().parent))  # for what stands beside the file
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever stops the file, SystemExit included
        del sys.modules[name]
        words = " ".join(str(error).split())
        raise Unusable(f"{path}: it cannot be imported: {type(error).__name__}: {words}") from None
    return {name: getattr(module, name) for name in CONTRACT if callable(getattr(module, name, None))}


def collect(impl: Path | None) -> dict[str, Callable]:
    """The functions to check: those of a file, or of this project's files. Raises Unusable."""
    paths = [impl] if impl else [ROOT / path for path in PROJECT if (ROOT / path).exists()]
    functions: dict[str, Callable] = {}
    for path in paths:
        functions = {**load(path), **functions}
    if not functions:
        where = impl or "the project"
        raise Unusable(f"{where}: none of the contract's functions is defined ({', '.join(CONTRACT)})")
    return functions


def select(words: str | None) -> list[Property]:
    """All properties, or those of a function, or those whose name contains some words. Raises Unusable."""
    if words is None:
        return PROPERTIES
    chosen = [p for p in PROPERTIES if p.function == words] or [p for p in PROPERTIES if words in str(p)]
    if not chosen:
        raise Unusable(f"--only {words}: no function or property has that name; see --list")
    return chosen


def table(rows: list[Row]) -> str:
    """The rows as text. What failed is followed by its meaning and its equation."""
    width = [max(len(row[i]) for row in rows) for i in (0, 1)]
    head = f"{'function':{width[0]}}  {'property':{width[1]}}  {'deviation':>9}  tolerance           verdict"
    lines = [head, "-" * len(head)]
    for row in rows:
        deviation = "" if row.deviation is None else f"{row.deviation:.1e}"
        tolerance = "" if row.tolerance is None else f"{row.tolerance:.1e} ({row.arithmetic})"
        name = f"{row.function:{width[0]}}  {row.property:{width[1]}}"
        lines.append(f"{name}  {deviation:>9}  {tolerance:18}  {row.verdict}")
        if row.verdict == "FAILS":
            lines += [f"    -> {row.meaning}", f"       {row.equation}"]
    return "\n".join(lines)


def count(rows: list[Row]) -> str:
    """How many hold, fail and were not checked, and which functions the file lacks."""
    verdicts = [row.verdict for row in rows]
    line = f"{len(rows)} properties: {verdicts.count('holds')} hold, {verdicts.count('FAILS')} fail, "
    missing = dict.fromkeys(row.meaning for row in rows if row.verdict == "not checked")
    return (
        line
        + f"{verdicts.count('not checked')} not checked"
        + (f" ({'; '.join(missing)})" if missing else "")
    )


def as_json(rows: list[Row]) -> str:
    """The rows as a JSON list of objects. deviation is null where nothing could be compared."""
    finite = [r._replace(deviation=None) if r.deviation in (None, math.inf) else r for r in rows]
    return json.dumps([row._asdict() for row in finite], indent=1, allow_nan=False)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m oracle", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--impl", type=Path, metavar="FILE.py", help="check the functions that this file defines"
    )
    parser.add_argument("--only", metavar="NAME", help="a function, or words of the properties' names")
    parser.add_argument("--list", action="store_true", help="list the properties and their equations")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        properties = select(args.only)
        if args.list:
            fields = [
                {"function": p.function, "property": p.name, "equation": p.equation} for p in properties
            ]
            plain = "\n".join(f"{p}    [{p.equation}]" for p in properties)
            print(json.dumps(fields, indent=1) if args.json else plain)
            return 0
        with contextlib.redirect_stdout(sys.stderr):  # what the checked code prints
            functions = collect(args.impl)
            rows = examine(functions, properties, WRONGS)
        if all(row.verdict == "not checked" for row in rows):
            raise Unusable(f"{args.impl or 'the project'}: nothing to check: {rows[0].meaning}")
    except Unusable as reason:
        print(f"oracle: {reason}", file=sys.stderr)
        return 2
    print(as_json(rows) if args.json else f"{table(rows)}\n\n{count(rows)}")
    return 1 if any(row.verdict == "FAILS" for row in rows) else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
