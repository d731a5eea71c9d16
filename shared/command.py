"""The command line of an algorithm file: parsing, resuming with the saved settings, checks, and errors in one
line."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import tyro

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
        flags = ", ".join(_flag(name) for name in changed)
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


def check_args(args, **own: tuple[bool, str]) -> None:
    """Raise InputError for settings that cannot be run. Reads the fields that all algorithms have.

    own: an algorithm's further fields by name: (whether the value will do, what it must be).
    """
    finite = float("inf")
    bounds = {  # name: (holds, what it must be)
        "output_dir": (args.output_dir != "", "the name of a folder"),
        "resume": (args.resume != "", "the folder of a run"),
        "seed": (0 <= args.seed < 2**32, "0 or more and below 2^32"),
        "num_iterations": (args.num_iterations >= 1, "at least 1"),
        "eval_every": (args.eval_every >= 1, "at least 1"),
        "eval_samples": (args.eval_samples >= 1, "at least 1"),
        "eval_steps": (args.eval_steps >= 1, "at least 1"),
        "checkpoint_every": (args.checkpoint_every >= 1, "at least 1"),
        "num_steps": (args.num_steps >= 2, "at least 2, since the last step is never trained"),
        "noise_level": (0 < args.noise_level < finite, "above 0: training needs stochastic steps"),
        "num_prompts": (args.num_prompts >= 1, "at least 1"),
        "group_size": (args.group_size >= 2, "at least 2: rewards are compared within their group"),
        "reward_batch_size": (args.reward_batch_size is None or args.reward_batch_size >= 1, "at least 1"),
        "micro_batch_size": (args.micro_batch_size is None or args.micro_batch_size >= 1, "at least 1"),
        "clip_range": (0 < args.clip_range < finite, "above 0"),
        "beta": (0 <= args.beta < finite, "0 or more"),
        "learning_rate": (0 < args.learning_rate < finite, "above 0"),
        "weight_decay": (0 <= args.weight_decay < finite, "0 or more"),
        "adam_eps": (0 < args.adam_eps < finite, "above 0"),
        "max_grad_norm": (0 < args.max_grad_norm < finite, "above 0 and finite"),
        "ema_decay": (0 <= args.ema_decay < 1, "at least 0 and below 1"),
        **own,
    }
    for name, (holds, need) in bounds.items():
        if not holds:
            value = getattr(args, name)
            raise InputError(f"{_flag(name)} {repr(value) if value == '' else value}: it must be {need}")
    if args.sampler == "cps" and args.noise_level > 1:
        raise InputError(f"--noise-level {args.noise_level}: it must be at most 1 for --sampler cps")
    if args.sde_window is not None:
        (start, stop), last = args.sde_window, args.num_steps - 1
        if not 0 <= start < stop <= last:
            need = f"0 <= START < STOP <= {last}, since the last of {args.num_steps} steps is never trained"
            raise InputError(f"--sde-window {start} {stop}: it must satisfy {need}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _leave(message: str, code: int) -> None:
    if os.environ.get("RANK", "0") == "0":  # of many processes one says it
        print(message, file=sys.stderr)
    sys.exit(code)
