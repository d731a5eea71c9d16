"""`digit-tokens`: a discrete flow on the 8x8 handwritten digits of scikit-learn as 64 pixel tokens of 17 grey
levels and one label token, small enough for any CPU.

One network goes both ways: "generation" samples the pixel tokens of a given label, "understanding" the label
token of given pixels. scripts/pretrain_toys.py trained it with half of the labels replaced by random ones, so
that reinforcement learning has something real to teach in both. `digit-tokens` moves tokens along a metric
path and sees no time, as FUDOKI (arXiv 2505.20147); `digit-tokens-timed` sees the time;
`digit-tokens-masked` unmasks tokens (a mixture path).
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from shared.ctmc import MetricPath, MixturePath
from shared.errors import InputError
from shared.policies.digits import ASSETS
from shared.prompts import DIGIT_WORDS, Prompt, digit_of

SIDE = 8  # pixels
LEVELS = 17  # grey levels of a pixel token, 0 to 16; the mask token is 17
NUM_CLASSES = 10  # of the label token; the mask token is 10
NUM_FREQUENCIES = 16
NUM_TOKENS = {"generation": SIDE * SIDE, "understanding": 1}


class DigitTokensNetwork(nn.Module):
    """Posterior of the clean tokens of a task: a residual MLP over the pixel tokens that the label token, the
    task and, with time_input, the time modulate in every block."""

    def __init__(
        self,
        time_input: bool = False,
        width: int = 160,
        hidden: int = 320,
        blocks: int = 3,
        embedding: int = 4,
        rank: int = 8,
    ):
        super().__init__()
        self.level = nn.Embedding(LEVELS + 1, embedding)
        self.inputs = nn.Linear(SIDE * SIDE * embedding, width)
        self.label = nn.Embedding(NUM_CLASSES + 1, width)
        self.task = nn.Embedding(len(NUM_TOKENS), width)
        self.time = nn.Linear(2 * NUM_FREQUENCIES, width) if time_input else None
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "up": nn.Linear(width, hidden),
                    "down": nn.Linear(hidden, width),
                }
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.pixel_head = nn.ModuleDict(
            {
                "factors": nn.Linear(width, SIDE * SIDE * rank),
                "levels": nn.Linear(rank, LEVELS, bias=False),  # one map for all pixels
                "bias": nn.Embedding(SIDE * SIDE, LEVELS),  # one row a pixel
            }
        )
        self.label_head = nn.Linear(width, NUM_CLASSES)
        nn.init.zeros_(self.pixel_head["bias"].weight)

    def forward(self, pixels: Tensor, label: Tensor, t: Tensor, task: str) -> Tensor:
        """pixels (B, 64), label (B,), one of them noised; t (B,) in [0, 1]. Returns logits of the clean
        tokens of the task: (B, 64, 17) or (B, 1, 10)."""
        tasks = torch.full_like(label, list(NUM_TOKENS).index(task))  # (B,)
        c = self.label(label) + self.task(tasks)  # (B, width)
        if self.time is not None:
            angles = t[:, None] * math.pi * torch.arange(1, NUM_FREQUENCIES + 1, device=t.device)  # (B, F)
            c = c + self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        h = self.inputs(self.level(pixels).flatten(1))
        for block in self.blocks:
            h = h + block["down"](nn.functional.silu(block["up"](block["norm"](h) + c)))
        h = self.norm(h)
        if task == "understanding":
            return self.label_head(h)[:, None]
        factors = self.pixel_head["factors"](h).unflatten(1, (SIDE * SIDE, -1))  # (B, 64, rank)
        return self.pixel_head["levels"](factors) + self.pixel_head["bias"].weight


def token_path(path: str, task: str, device: str | torch.device = "cpu"):
    """The path of a task's tokens. "metric": grey levels are points on a quarter circle, in order, and labels
    are all equally far apart; "mask": tokens are revealed one by one."""
    symbols = LEVELS if task == "generation" else NUM_CLASSES
    if path == "mask":
        return MixturePath(symbols + 1, "mask", mask_id=symbols)
    angles = torch.arange(LEVELS, dtype=torch.float64) / (LEVELS - 1) * math.pi / 2
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)  # (17, 2)
    points = circle if task == "generation" else torch.eye(NUM_CLASSES, dtype=torch.float64)
    return MetricPath.from_embeddings(points.to(device), c=3.0, a=0.9)


def carry_over(logits: Tensor, x: Tensor) -> Tensor:
    """The posterior on a masked path: a mask token never is clean, a revealed token keeps itself.

    logits: (..., V), of the V clean symbols; x: (...,), whose mask token is V. Returns (..., V + 1), with
    -inf where a symbol is impossible. The gradient in the logits of a revealed token is exactly 0.
    """
    mask_id = logits.shape[-1]
    kept = torch.where(one_hot(x, mask_id + 1).bool(), 0.0, -math.inf)
    return torch.where(x[..., None] == mask_id, pad(logits, (0, 1), value=-math.inf), kept)


class DigitTokensPolicy:
    """The contract of a discrete policy, on the digits. All weights are trained, except those of the other
    task's head."""

    def __init__(
        self,
        device: str | torch.device = "cpu",
        weights: Path = ASSETS / "digit_tokens.safetensors",
        path: str = "metric",
        time_input: bool = False,
        task: str = "generation",
    ):
        self.device, self.task, self.num_tokens = torch.device(device), task, NUM_TOKENS[task]
        self.path = token_path(path, task, self.device)
        self._cpu_path = token_path(path, task)
        self.module = DigitTokensNetwork(time_input)
        self.module.load_state_dict(load_file(weights))
        self.module.to(self.device)
        self._before_rl = copy.deepcopy(self.module).requires_grad_(False)
        other_head = self.module.label_head if task == "generation" else self.module.pixel_head
        other_head.requires_grad_(False)

    def times(self, num_steps: int) -> Tensor:
        """The grid of t of a sampler with num_steps steps, (num_steps + 1,) float64: uniform."""
        return torch.linspace(0, 1, num_steps + 1, dtype=torch.float64)

    def check(self, prompts: list[Prompt]) -> None:
        """Raise InputError if `encode` does not take the prompts."""
        self.encode(prompts)

    def encode(self, prompts: list[Prompt]) -> dict[str, Tensor]:
        """The condition for B prompts, and "mask": True for the tokens to sample, here all.

        generation: {"label": (B,), "mask": (B, 64)}; understanding: {"pixels": (B, 64), "mask": (B, 1)}, of
        the prompts' metadata. Raises InputError if a prompt does not name one digit, or lacks its image or
        answer.
        """
        if self.task == "generation":
            cond = {"label": torch.tensor([digit_of(p.text) for p in prompts])}
        else:
            cond = {"pixels": torch.tensor([_pixels_of(p) for p in prompts])}
        cond["mask"] = torch.ones(len(prompts), self.num_tokens, dtype=torch.bool)
        return {name: value.to(self.device) for name, value in cond.items()}

    def source(self, n: int, generator: torch.Generator) -> Tensor:
        """n states at t = 0, (n, D), drawn on the CPU so that devices agree."""
        return self._cpu_path.draw_source((n, self.num_tokens), generator).to(self.device)

    def posterior_logits(self, x: Tensor, t: Tensor | float, cond: dict[str, Tensor]) -> Tensor:
        """Logits of the clean tokens given tokens x (B, D) at time t (), which only a network with time_input
        sees. Returns float32 (B, D, V), V of the path; -inf where a symbol is impossible."""
        pixels, label = (x, cond["label"]) if self.task == "generation" else (cond["pixels"], x[:, 0])
        times = torch.full((len(x),), float(t), device=x.device)
        logits = self.module(pixels, label, times, self.task).float()
        return carry_over(logits, x) if isinstance(self.path, MixturePath) else logits

    def decode(self, x: Tensor, cond: dict[str, Tensor]) -> Tensor | list[str]:
        """generation: tokens (B, 64) to grey RGB pixels (B, 3, 8, 8) in [0, 1], mid grey where masked;
        understanding: tokens (B, 1) to B answers, digits in words, "?" where masked."""
        if self.task == "understanding":
            return [(*DIGIT_WORDS, "?")[token] for token in x[:, 0].tolist()]
        grey = torch.where(x == LEVELS, 0.5, x / (LEVELS - 1)).float()
        return grey.view(-1, 1, SIDE, SIDE).expand(-1, 3, -1, -1)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context, `posterior_logits` is that of the weights before RL."""
        trained, self.module = self.module, self._before_rl
        try:
            yield
        finally:
            self.module = trained

    def export(self, folder: Path) -> Path:
        """Write the current weights to folder/digit_tokens.safetensors, which
        `DigitTokensPolicy(weights=...)` loads. Returns the path."""
        path = Path(folder) / "digit_tokens.safetensors"
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in self.module.state_dict().items()},
            path,
        )
        return path


def _pixels_of(prompt: Prompt) -> list[int]:
    """The 64 grey levels of a prompt's image, row by row. Raises InputError unless its metadata holds an
    image and an answer."""
    image, answer = prompt.metadata.get("image"), prompt.metadata.get("answer")
    rows = image if isinstance(image, list) else []
    levels = [level for row in rows if isinstance(row, list) and len(row) == SIDE for level in row]
    good = len(rows) == SIDE and len(levels) == SIDE * SIDE
    if not good or not all(type(level) is int and 0 <= level < LEVELS for level in levels):
        raise InputError(
            f'prompt "{prompt.text}" needs an "image": {SIDE} rows of {SIDE} integers, 0 to {LEVELS - 1}, '
            'in a .jsonl file or from the built-in set "digit-images"'
        )
    if not isinstance(answer, str) or answer.strip().casefold() not in DIGIT_WORDS:
        raise InputError(
            f'prompt "{prompt.text}" needs an "answer" out of {", ".join(DIGIT_WORDS)}, not {answer!r}'
        )
    return levels
