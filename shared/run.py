"""The folder of a training run: its metrics, checkpoints and pictures; and stopping on a signal."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from tqdm import tqdm

from shared.errors import InputError
from shared.pictures import save_reward_curve, save_samples
from shared.training import EMA, Evaluated, set_values

CHECKPOINTS_KEPT = 2


class Run:
    """The folder of one run, its metrics, checkpoints and pictures. Only the main process writes."""

    def __init__(self, args, accelerator: Accelerator):
        """Open a new folder (args.output_dir, or runs/<algorithm>-<model>-<reward>-<seed>-<time>) or the one
        to resume.

        Raises InputError if it cannot be written or already holds a run that is not being resumed.
        """
        self.args, self.accelerator = args, accelerator
        self.history: list[dict] = []
        self.eval_before = 0.0
        self.writer, self.bar = None, None
        answer: list = [None]
        if accelerator.is_main_process:
            try:
                answer = [self._open()]
            except InputError as error:
                answer = [error]
        broadcast_object_list(answer)  # the name holds the time, and every process must stop if one must
        if isinstance(answer[0], InputError):
            raise answer[0]
        self.folder = Path(answer[0])

    def _open(self) -> str:
        args = self.args
        if args.resume:
            done, finished = self._newest_checkpoint(Path(args.resume))[1], Path(args.resume, "summary.json")
            if done > args.num_iterations or (done == args.num_iterations and finished.exists()):
                more = "go on with a larger --num-iterations"
                raise InputError(f"--resume {args.resume}: its {done} iterations are done; {more}")
        folder = args.resume or args.output_dir
        if folder is None:
            reward = re.sub(r"[^\w.+-]", "", args.reward.replace(",", "+"))
            now = f"{datetime.now():%Y%m%d-%H%M%S}"
            folder = f"runs/{args.algorithm}-{args.model}-{reward}-{args.seed}-{now}"
            while Path(folder).exists():
                folder += "-again"
        path = Path(folder)
        if not args.resume and (path / "args.json").exists():
            others = f"continue it with --resume {folder}, or give another --output-dir"
            raise InputError(f"{folder} already holds a run: {others}")
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            settings = dataclasses.asdict(args) | {"output_dir": folder, "resume": None}
            if Path(args.prompts).exists():
                settings["prompts"] = str(Path(args.prompts).resolve())  # to be resumed from any folder
            text = json.dumps({"algorithm": args.algorithm} | settings, indent=2) + "\n"
            write_beside(path / "args.json", lambda file: file.write_text(text))
        except OSError as error:
            raise InputError(f"output folder {folder} cannot be written: {error.strerror}") from None
        return folder

    @staticmethod
    def _newest_checkpoint(folder: Path) -> tuple[Path, int]:
        """The newest checkpoint of a run and its iteration. Raises InputError if there is none."""
        checkpoints = _checkpoints(folder)
        if not checkpoints:
            raise InputError(f"--resume {folder}: it has no checkpoint; start anew with another --output-dir")
        return checkpoints[-1], int(checkpoints[-1].stem)

    def restore(self, module: nn.Module, optimizer, ema: EMA) -> int:
        """Load the newest checkpoint of a resumed run and cut metrics.jsonl back to it.

        Returns the iterations that are done, 0 for a new run. Raises InputError if the checkpoint's keys are
        not the trainable weights of the module.
        """
        if not self.args.resume:
            return 0
        path, iteration = self._newest_checkpoint(self.folder)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever the unpickler makes of a damaged file
            again = "delete it to resume from the one before"
            raise InputError(f"{path} cannot be read ({type(error).__name__}): {again}") from None
        weights = _trainable(self.accelerator.unwrap_model(module))
        if differing := sorted(state["module"].keys() ^ weights.keys()):
            raise InputError(f"{path} does not fit the model: only one of them has {', '.join(differing)}")
        set_values(weights.values(), [state["module"][name] for name in weights])
        set_values(ema.average, state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        self.eval_before = state["eval_before"]
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True)[:iteration] if metrics.exists() else []
        if len(lines) < iteration:
            raise InputError(f"{metrics} lacks iterations: it has {len(lines)}, the checkpoint {iteration}")
        self.history = [json.loads(line) for line in lines]
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_beside(metrics, lambda file: file.write_text("".join(lines)))
        return iteration

    def begin(self, evaluated: Evaluated) -> None:
        """Keep what the model does before training: samples_before.png and its evaluation reward."""
        self.eval_before = evaluated.rewards.mean().item()
        if self.accelerator.is_main_process:
            save_samples(self.folder / "samples_before.png", *evaluated, "before training")

    def progress(self, start: int) -> tqdm:
        """The iterations to do, start + 1 .. num_iterations, with a progress bar on the main process."""
        last = self.args.num_iterations
        quiet = not self.accelerator.is_main_process
        self.bar = tqdm(range(start + 1, last + 1), initial=start, total=last, unit="it", disable=quiet)
        return self.bar

    def log(self, metrics: dict, seconds: dict[str, float]) -> None:
        """Append an iteration and its parts' seconds to history, metrics.jsonl, TensorBoard; show its reward.

        A metric that is None is null in metrics.jsonl and left out of TensorBoard.
        """
        metrics = metrics | {f"seconds_{name}": value for name, value in seconds.items()}
        self.history.append(metrics)
        evaluated = [m["eval_reward"] for m in self.history if m["eval_reward"] is not None]
        latest = ([self.eval_before] + evaluated)[-1]
        self.bar.set_postfix(reward=f"{metrics['reward_mean']:.3f}", eval=f"{latest:.3f}")
        if not self.accelerator.is_main_process:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder / "tensorboard", purge_step=metrics["iteration"])
        for name, value in metrics.items():
            if value is not None and name != "iteration":
                self.writer.add_scalar(name, value, metrics["iteration"])

    def save(self, iteration: int, module: nn.Module, optimizer, ema: EMA) -> None:
        """Write the state after `iteration` updates, beside and renamed, and keep the newest
        CHECKPOINTS_KEPT."""
        if self.accelerator.is_main_process:
            state = {
                "eval_before": self.eval_before,
                "module": _trainable(self.accelerator.unwrap_model(module)),
                "optimizer": optimizer.state_dict(),
                "ema": ema.average,
            }
            folder = self.folder / "checkpoints"
            write_beside(folder / f"{iteration:06d}.pt", lambda file: torch.save(state, file))
            for old in _checkpoints(self.folder)[:-CHECKPOINTS_KEPT]:
                old.unlink()
        self.accelerator.wait_for_everyone()

    def finish(self, policy, ema: EMA, evaluated: Evaluated) -> None:
        """Write the pictures, the weights and summary.json, and print the summary."""
        if not self.accelerator.is_main_process:
            return
        if self.writer is not None:
            self.writer.close()
        title = f"after {self.args.num_iterations} iterations"
        save_samples(self.folder / "samples_after.png", *evaluated, title)
        save_reward_curve(self.folder / "reward.png", self.history, self.eval_before)
        policy.module = self.accelerator.unwrap_model(policy.module)
        with ema.applied():
            weights = policy.export(self.folder)
        summary = {
            "eval_reward_before": self.eval_before,
            "eval_reward_after": evaluated.rewards.mean().item(),
            "iterations": self.args.num_iterations,
            "seconds": sum(m["seconds"] for m in self.history),
            "nfe_rows": sum(m["nfe_rows"] for m in self.history),
        }
        text = json.dumps(summary, indent=2) + "\n"
        write_beside(self.folder / "summary.json", lambda file: file.write_text(text))
        print(
            f"\n{self.args.algorithm} on {self.args.model}, reward {self.args.reward}: evaluation reward"
            f" {summary['eval_reward_before']:.3f} before, {summary['eval_reward_after']:.3f} after"
            f" {summary['iterations']} iterations ({summary['seconds']:.0f} s)\n"
            f"pictures in {self.folder}: {', '.join(sorted(p.name for p in self.folder.glob('*.png')))}\n"
            f"weights: {weights}"
        )


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


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, then rename it: a reader sees the old file or the new one, never a torn
    one."""
    beside = path.with_name(path.name + ".tmp")
    write(beside)
    os.replace(beside, path)


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted((folder / "checkpoints").glob("[0-9]*.pt"), key=lambda path: int(path.stem))


def _trainable(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
