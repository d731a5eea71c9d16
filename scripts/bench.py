"""How long parts of the project take on one core, and how much memory: a table for each subcommand.

    python scripts/bench.py ratio                                # the size of FUDOKI's images
    python scripts/bench.py ratio --vocab-size 512 --tokens 64   # quicker
    python scripts/bench.py dflow                                # an iteration of dFlowGRPO, by its ratio

ratio: the exact likelihood ratio of one state on a metric path of a random codebook (shared/ctmc.py).
dflow: rollout and update of algos/dflow_grpo.py on the digits, with each of its ratios.
"""

import contextlib
import io
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bundle: drop

import torch
import tyro

from algos import dflow_grpo
from shared.ctmc import MetricPath, draw_symbols, sample_step, transition_log_prob

GIB = 2**20  # of ru_maxrss, in KiB


@dataclass
class Ratio:
    """The exact ratio of one state at the middle step of a grid, for every token."""

    vocab_size: int = 16384
    """Symbols of the codebook; up to 2048 of them, distances are a matrix."""
    tokens: int = 576
    embedding: int = 8
    """Width of the codebook."""
    num_steps: int = 8
    """Steps of the grid: a table is built at every t but the first and the last."""
    draws: int = 24
    """Draws of the clean token from every posterior, for the Monte-Carlo ratio."""
    repeat: int = 3
    """Each time is the best of so many, but for tables, which are built once."""
    threads: int = 1
    seed: int = 0

    def run(self) -> dict[str, float]:
        """Seconds by what was done."""
        generator = torch.Generator().manual_seed(self.seed)
        codebook = torch.randn(self.vocab_size, self.embedding, generator=generator)
        logits = torch.randn(self.tokens, self.vocab_size, generator=generator) * 3
        path, h, middle = MetricPath.from_embeddings(codebook), 1 / self.num_steps, self.num_steps // 2
        t = middle * h
        clean = torch.randint(self.vocab_size, (self.tokens,), generator=generator)
        x = path.sample(clean, t, generator)
        steps = range(1, self.num_steps - 1)
        build = [seconds(lambda k=k: path.log_kernel_column(x[:1], x[:1], k * h, h), 1) for k in steps]
        x_next, x1 = sample_step(path, logits, x, t, h, generator=generator)
        uniforms = torch.rand(self.draws, self.tokens, generator=generator, dtype=torch.float64)

        def log_prob():
            return transition_log_prob(path, logits, x, x_next, t, h)

        def gradient():
            leaf = logits.clone().requires_grad_()
            transition_log_prob(path, leaf, x, x_next, t, h).sum().backward()

        def draws():
            symbols = draw_symbols(logits.softmax(-1), uniforms)
            return path.log_kernel_column(x, x_next, t, h).gather(-1, symbols.T)

        timed = {
            "transition_log_prob, forward": log_prob,
            "transition_log_prob, forward and backward": gradient,
            "sample_step": lambda: sample_step(path, logits, x, t, h, generator=generator),
            f"log_kernel_column at {self.draws} draws": draws,
        }
        found = {"tables, for each t": sum(build) / max(1, len(build))}
        return found | {name: seconds(function, self.repeat) for name, function in timed.items()}


@dataclass
class Dflow:
    """Rollout and update of an iteration for each ratio of dFlowGRPO."""

    model: str = "digit-tokens"
    num_prompts: int = 8
    group_size: int = 16
    iterations: int = 12
    """Iterations of a run; each time is the median of all but the first two."""
    threads: int = 1
    seed: int = 0

    def run(self) -> dict[str, float]:
        """Seconds of an iteration by ratio."""
        ratios = {
            "exact": {},
            "mc, 24 draws": {"ratio": "mc"},
            "mc, 4 draws": {"ratio": "mc", "num_draws": 4},
            "joint": {"ratio": "joint"},
            "mean_field": {"ratio": "mean_field"},
            "released sampler, 24 draws": {"ratio": "mc", "sampler": "released"},
        }
        found = {}
        for name, options in ratios.items():
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
                settings = {"model": self.model, "num_iterations": self.iterations, "seed": self.seed}
                settings |= {"num_prompts": self.num_prompts, "group_size": self.group_size}
                settings |= {"output_dir": f"{folder}/run", "eval_every": 10**6, "eval_samples": 1}
                with contextlib.redirect_stdout(io.StringIO()):
                    history = dflow_grpo.train(dflow_grpo.Args(**settings, **options))
            for part in ("rollout", "update"):
                times = [m[f"seconds_{part}"] for m in history[2:]]
                found[f"{name}: {part}"] = statistics.median(times)
        return found


def seconds(function: Callable, repeat: int) -> float:
    """The shortest of so many runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def peak() -> float:
    """The largest memory this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB


BENCHES = {"ratio": Ratio, "dflow": Dflow}


def main() -> None:
    bench = tyro.extras.subcommand_cli_from_dict(BENCHES, prog="bench.py")
    torch.set_num_threads(bench.threads)
    before = peak()
    found = bench.run()
    print(", ".join(f"{name} {value}" for name, value in vars(bench).items()))
    for name, value in found.items():
        print(f"{name:<44}{value:10.4f} s")
    print(f"{'peak memory, beyond that of the imports':<44}{peak() - before:10.2f} GiB")


if __name__ == "__main__":
    main()
