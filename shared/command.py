"""The command line of an algorithm file: parsing, resuming with the saved settings, errors in one line;
and stopping on a signal."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from accelerate import Accelerator

from shared.args import flag
from shared.errors import InputError, RewardError

MAY_CHANGE_ON_RESUME = {"num_iterations", "eval_every", "checkpoint_every"}


def run_command(train: Callable, args_class: type, argv: list[str] | None = None) -> None:
    """Parse the command line into args_class and train. What the user can mend is one line on stderr, without
    a traceback.

    Exit codes: 2 for unusable input, 1 for a reward that failed or a gradient that is not finite, 130 for a
    run that was stopped (its state is saved).
    """
    try:
        train(parse_args(args_class, sys.argv[1:] if argv is None else argv))
    except InputError as error:
        _leave(f"error: {error}", 2)
    except (RewardError, FloatingPointError) as error:
        _leave(f"error: {error}", 1)
    except KeyboardInterrupt as interrupt:
        _leave(str(interrupt) or "interrupted", 130)


def parse_args(args_class: type, argv: list[str]):
    """The command line as an args_class. With --resume RUN every other option defaults to what RUN was
    started with.

    Raises InputError if RUN holds no settings, or an option is given that would change what the run computes.
    """
    resume = flag_value(argv, "--resume")
    saved = saved_args(args_class, resume) if resume else args_class()
    args = tyro.cli(args_class, args=argv, default=saved)
    changed = [f.name for f in dataclasses.fields(args) if getattr(args, f.name) != getattr(saved, f.name)]
    if resume and (changed := sorted(set(changed) - MAY_CHANGE_ON_RESUME)):
        flags = ", ".join(flag(name) for name in changed)
        raise InputError(f"a resumed run keeps its settings: leave out {flags}, or start a new run")
    return args


def flag_value(argv: list[str], flag: str) -> str | None:
    """The value of one flag in a command line, "--flag value" or "--flag=value"; None where it is not
    given."""
    for i, word in enumerate(argv):
        if word.startswith(flag + "="):
            return word[len(flag) + 1 :]
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
    return None


def saved_args(args_class: type, folder: str):
    """The settings of the run in a folder, ready to resume it. Raises InputError if there are none that fit
    args_class."""
    path = Path(folder) / "args.json"
    try:
        values = json.loads(path.read_text())
        algorithm = values.pop("algorithm")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    except (OSError, ValueError, KeyError, AttributeError):
        raise InputError(
            f"--resume {folder}: no run there (its args.json is missing or unreadable)"
        ) from None
    if algorithm != args_class.algorithm:
        raise InputError(
            f"--resume {folder}: that run is of {algorithm}; resume it with algos/{algorithm}.py"
        )
    try:
        return args_class(**values | {"resume": folder, "output_dir": folder})
    except TypeError as error:
        raise InputError(f"--resume {folder}: its settings are of another version ({error})") from None


class StopSignal:
    """Ctrl-C (SIGINT) or SIGTERM asks the run to stop after the iteration under way; a second signal stops it
    at once."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.signalled, self.previous = accelerator, False, {}

    def __enter__(self) -> "StopSignal":
        with contextlib.suppress(ValueError):  # only the main thread may listen
            self.previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for which, handler in self.previous.items():
            signal.signal(which, handler)

    def _handle(self, *_) -> None:
        if self.signalled:
            raise KeyboardInterrupt("stopped at once; the last checkpoint stands")
        self.signalled = True
        print("\nstopping after this iteration (again: at once)", file=sys.stderr)

    def requested(self) -> bool:
        """Whether any process was asked to stop; all processes get the same answer."""
        flag = torch.tensor(float(self.signalled), device=self.accelerator.device)
        return self.accelerator.reduce(flag, "sum").item() > 0


def _leave(message: str, code: int) -> None:
    if os.environ.get("RANK", "0") == "0":  # of many processes one says it
        print(message, file=sys.stderr)
    sys.exit(code)
