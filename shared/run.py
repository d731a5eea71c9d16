"""The folder of a training run: its iterations, metrics, checkpoints and pictures."""

import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from tqdm import tqdm

from shared.command import StopSignal
from shared.errors import InputError
from shared.evaluation import Evaluation
from shared.pictures import save_confusion, save_reward_curve, save_samples
from shared.prompts import load_prompts
from shared.rewards import Reward, Scores
from shared.rollout import Rollout
from shared.training import EMA, gather, set_values, timed

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
        self.iteration = 0  # the one under way; between two of them the last that is done
        self.eval_before = 0.0  # evaluation reward before training
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
            for name in ("prompts", "eval_prompts", "model_path"):
                if settings.get(name) and Path(settings[name]).exists():
                    settings[name] = str(Path(settings[name]).resolve())  # to be resumed from any folder
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

    def start(
        self, policy, rewards: list[Reward], optimizer, ema: EMA, evaluation: Evaluation, buffer=None
    ) -> None:
        """Load the newest checkpoint of a resumed run; of a new one, evaluate the model and write the first.

        Checkpoints keep policy, optimizer and ema, and the state_dict of the buffer if there is one.
        Raises InputError if a checkpoint does not fit the model, or the run's files are damaged.
        """
        self.policy, self.optimizer, self.ema, self.buffer = policy, optimizer, ema, buffer
        self.rewards, self.evaluation = rewards, evaluation
        self.prompts_digest = self._prompts_digest()
        if self.args.resume:
            self._restore()
        if self.iteration in (0, self.args.num_iterations):  # new, or all trained but its end not written
            self._evaluate()
        if self.iteration == 0:
            self.eval_before = self.evaluated.rewards.mean().item()
            if self.accelerator.is_main_process:
                self._save_samples("before", "before training")
            self._save()

    def _restore(self) -> None:
        """Load the newest checkpoint and cut metrics.jsonl back to it."""
        path, self.iteration = self._newest_checkpoint(self.folder)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever the unpickler makes of a damaged file
            again = "delete it to resume from the one before"
            raise InputError(f"{path} cannot be read ({type(error).__name__}): {again}") from None
        weights = self._trainable()
        if differing := sorted(state["module"].keys() ^ weights.keys()):
            raise InputError(f"{path} does not fit the model: only one of them has {', '.join(differing)}")
        set_values(weights.values(), [state["module"][name] for name in weights])
        set_values(self.ema.average, state["ema"])
        if state["prompts"] != self.prompts_digest:
            raise InputError(
                "the prompts have changed since the run began: restore the file, or start a new run"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        if self.buffer is not None:
            self.buffer.load_state_dict(state["buffer"])
        self.eval_before = state["eval_before"]
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True)[: self.iteration] if metrics.exists() else []
        if len(lines) < self.iteration:
            raise InputError(
                f"{metrics} lacks iterations: it has {len(lines)}, the checkpoint {self.iteration}"
            )
        self.history = [json.loads(line) for line in lines]
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_beside(metrics, lambda file: file.write_text("".join(lines)))

    def iterations(self) -> Iterator[int]:
        """The iterations to do, up to num_iterations, with a progress bar on the main process.

        After each one a checkpoint is written if it is due. Ctrl-C and SIGTERM save after the iteration under
        way and raise KeyboardInterrupt.
        """
        first, last = self.iteration + 1, self.args.num_iterations
        quiet = not self.accelerator.is_main_process
        bar = tqdm(range(first, last + 1), initial=self.iteration, total=last, unit="it", disable=quiet)
        with StopSignal(self.accelerator) as stop, bar as self.bar:
            for self.iteration in bar:
                self.began = time.perf_counter()
                yield self.iteration
                stopping = stop.requested()
                if self.iteration % self.args.checkpoint_every == 0 or self.iteration == last or stopping:
                    self._save()
                if stopping and self.iteration < last:
                    raise KeyboardInterrupt(f"stopped and saved; continue with --resume {self.folder}")

    def _evaluate(self) -> float:
        with self.ema.applied():
            self.evaluated = self.evaluation.run(self.rewards)
        return self.evaluated.rewards.mean().item()

    def log(
        self,
        rewards: Tensor,
        scores: Scores,
        rollouts: list[Rollout],
        metrics: dict,
        seconds: dict[str, float],
    ) -> None:
        """Evaluate if it is due, and append the iteration to history, metrics.jsonl and TensorBoard.

        rewards: (P, G) of all processes; scores, rollouts: of this one; metrics: the algorithm's own;
        seconds: of the iteration's parts. A metric that is None is null in metrics.jsonl and left out of
        TensorBoard.
        """
        eval_reward, processes = None, self.accelerator.num_processes
        if self.iteration % self.args.eval_every == 0 or self.iteration == self.args.num_iterations:
            with timed(seconds, "evaluate"):
                eval_reward = self._evaluate()
        parts = {name: gather(self.accelerator, values).mean() for name, values in scores.parts.items()}
        metrics = {
            "iteration": self.iteration,
            "reward_mean": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "eval_reward": eval_reward,
            **{f"reward_{name}": mean.item() for name, mean in parts.items()},
            "equal_groups": (rewards.amax(1) == rewards.amin(1)).float().mean().item(),
            **metrics,
            "seconds": time.perf_counter() - self.began,
            "nfe_rows": sum(r.nfe_rows for r in rollouts) * processes,
            "nfe_calls": sum(r.nfe_calls for r in rollouts) * processes,
            "reward_calls": scores.calls * processes,
            **{f"seconds_{name}": value for name, value in seconds.items()},
        }
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

    def _save(self) -> None:
        """Write the state after `iteration` iterations, beside and renamed, and keep the newest
        CHECKPOINTS_KEPT."""
        if self.accelerator.is_main_process:
            state = {
                "eval_before": self.eval_before,
                "prompts": self.prompts_digest,
                "module": self._trainable(),
                "optimizer": self.optimizer.state_dict(),
                "ema": self.ema.average,
            }
            if self.buffer is not None:
                state["buffer"] = self.buffer.state_dict()
            folder = self.folder / "checkpoints"
            write_beside(folder / f"{self.iteration:06d}.pt", lambda file: torch.save(state, file))
            for old in _checkpoints(self.folder)[:-CHECKPOINTS_KEPT]:
                old.unlink()
        self.accelerator.wait_for_everyone()

    def _save_samples(self, name: str, title: str) -> None:
        """The picture of the latest evaluation: a sheet of its images, or what it answered."""
        if isinstance(self.evaluated.samples, list):
            save_confusion(self.folder / f"confusion_{name}.png", *self.evaluated, title)
        else:
            save_samples(self.folder / f"samples_{name}.png", *self.evaluated, title)

    def _prompts_digest(self) -> str:
        sets = [load_prompts(source) for source in (self.args.prompts, self.args.eval_prompts) if source]
        text = json.dumps(sets, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _trainable(self) -> dict[str, Tensor]:
        """The trained weights by name, as they are in the model."""
        module = self.accelerator.unwrap_model(self.policy.module)
        return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def finish(self) -> None:
        """Write the pictures, the weights and summary.json, and print the summary."""
        if not self.accelerator.is_main_process:
            return
        if self.writer is not None:
            self.writer.close()
        title = f"after {self.args.num_iterations} iterations"
        self._save_samples("after", title)
        save_reward_curve(self.folder / "reward.png", self.history, self.eval_before)
        self.policy.module = self.accelerator.unwrap_model(self.policy.module)
        with self.ema.applied():
            weights = self.policy.export(self.folder)
        summary = {
            "eval_reward_before": self.eval_before,
            "eval_reward_after": self.evaluated.rewards.mean().item(),
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


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, then rename it: a reader sees the old file or the new one, never a torn
    one."""
    beside = path.with_name(path.name + ".tmp")
    write(beside)
    os.replace(beside, path)


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted((folder / "checkpoints").glob("[0-9]*.pt"), key=lambda path: int(path.stem))
