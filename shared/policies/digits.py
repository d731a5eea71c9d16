"""`digits`: a class-conditional rectified flow on the 8x8 handwritten digits of scikit-learn, small enough
for any CPU.

Its weights were trained by scripts/pretrain_toys.py with half of the labels replaced by random ones, so that
it draws the prompted digit about half the time and reinforcement learning has something real to teach; those
of `digits-faithful` with a fifth.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared.prompts import Prompt, digit_of
from shared.sde import shifted_sigmas

ASSETS = Path(__file__).parents[1] / "assets"
LATENT_SHAPE = (1, 8, 8)  # pixel = (latent + 1) / 2
NUM_CLASSES = 10
NUM_FREQUENCIES = 16


class DigitsNetwork(nn.Module):
    """Velocity of a 64-dimensional latent: a residual MLP that sigma and label modulate in every block."""

    def __init__(self, width: int = 256, hidden: int = 128, blocks: int = 3):
        super().__init__()
        self.inputs = nn.Linear(math.prod(LATENT_SHAPE), width)
        self.sigma = nn.Linear(2 * NUM_FREQUENCIES, width)
        self.label = nn.Embedding(NUM_CLASSES, width)
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
        self.outputs = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, math.prod(LATENT_SHAPE)))

    def forward(self, x: Tensor, sigma: Tensor, label: Tensor) -> Tensor:
        """x (B, 1, 8, 8), sigma (B,) in [0, 1], label (B,) integers. Returns the velocity (B, 1, 8, 8)."""
        angles = sigma[:, None] * math.pi * torch.arange(1, NUM_FREQUENCIES + 1, device=x.device)  # (B, F)
        c = self.sigma(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.label(label)  # (B, width)
        h = self.inputs(x.flatten(1))
        for block in self.blocks:
            h = h + block["down"](nn.functional.silu(block["up"](block["norm"](h) + c)))
        return self.outputs(h).view_as(x)


class DigitsPolicy:
    """The contract of a continuous policy, on the digits. All weights are trained."""

    def __init__(self, device: str | torch.device = "cpu", weights: Path = ASSETS / "digits.safetensors"):
        self.device = torch.device(device)
        self.module = DigitsNetwork()
        self.module.load_state_dict(load_file(weights))
        self.module.to(self.device)
        self._before_rl = copy.deepcopy(self.module).requires_grad_(False)

    def sigmas(self, num_steps: int) -> Tensor:
        """The sigma grid of a sampler with num_steps steps, (num_steps + 1,): linear."""
        return shifted_sigmas(num_steps)

    def check(self, prompts: list[Prompt]) -> None:
        """Raise InputError if `encode` does not take the prompts."""
        self.encode(prompts)

    def encode(self, prompts: list[Prompt]) -> dict[str, Tensor]:
        """The network's condition for B prompts: {"label": (B,)}. Raises InputError if a prompt does not name
        one digit."""
        return {"label": torch.tensor([digit_of(p.text) for p in prompts], device=self.device)}

    def noise(self, n: int, generator: torch.Generator) -> Tensor:
        """n standard normal latents, (n, 1, 8, 8), drawn on the CPU so that devices agree."""
        return torch.randn((n, *LATENT_SHAPE), generator=generator).to(self.device)

    def velocity(self, x: Tensor, sigma: Tensor | float, cond: dict[str, Tensor]) -> Tensor:
        """The velocity dx/dsigma at latents x (B, 1, 8, 8) of noise level sigma (). Returns float32 (B, 1, 8,
        8)."""
        sigmas = torch.full((len(x),), float(sigma), device=x.device)
        return self.module(x.float(), sigmas, cond["label"]).float()

    def decode(self, x: Tensor) -> Tensor:
        """Latents (B, 1, 8, 8) to grey RGB pixels (B, 3, 8, 8) in [0, 1]."""
        return ((x.float() + 1) / 2).clamp(0, 1).expand(-1, 3, -1, -1)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context, `velocity` is that of the weights before RL."""
        trained, self.module = self.module, self._before_rl
        try:
            yield
        finally:
            self.module = trained

    def export(self, folder: Path) -> Path:
        """Write the current weights to folder/digits.safetensors, which `DigitsPolicy(weights=...)` loads.
        Returns the path."""
        path = Path(folder) / "digits.safetensors"
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in self.module.state_dict().items()},
            path,
        )
        return path
