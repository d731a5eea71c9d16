"""`sd3.5-m`: Stable Diffusion 3.5 Medium (arXiv 2403.03206), with a LoRA that is trained.

diffusers' own classes load, encode and decode, so that what is trained here is what a plain
`StableDiffusion3Pipeline` samples from. They are imported when a policy is made.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import InputError
from shared.prompts import Prompt

HUB_ID = "stabilityai/stable-diffusion-3.5-medium"
LORA_TARGETS = tuple(  # of Flow-GRPO (arXiv 2505.05470): all projections of the joint attention
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
PROMPT_TOKENS = 256  # of T5, the pipeline's default
PROMPTS_KEPT = 1024  # embeddings of so many prompts are kept; one takes 2.7 MB in 16 bits


class SD3Policy:
    """The contract of a continuous policy, on SD3.5 Medium. Only the LoRA of the transformer is trained.

    model_path: a folder in diffusers' format, or an id of the hub.
    lora_rank: r of the LoRA, whose output counts alpha / r = 2 times, as in Flow-GRPO.
    resolution: height and width of the images in pixels, multiples of 16; or one number for both.
    guidance_scale: w of classifier-free guidance v = v(empty prompt) + w (v(prompt) - v(empty prompt)), in
        sampling and in training, with gradient through both; 1 is v(prompt), without the other half.
    mixed_precision: dtype of the frozen transformer and of the text encoders, "no" (float32) or "bf16". The
        LoRA, the velocity and the VAE are float32.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        model_path: str = HUB_ID,
        lora_rank: int = 32,
        lora_targets: tuple[str, ...] = LORA_TARGETS,
        resolution: tuple[int, ...] = (512, 512),
        guidance_scale: float = 4.5,
        mixed_precision: str = "bf16",
    ):
        self.device, self.guidance_scale = torch.device(device), guidance_scale
        self.dtype = {"no": torch.float32, "bf16": torch.bfloat16}[mixed_precision]
        self._pipeline = load_pipeline(model_path, self.dtype)
        self._pipeline.vae.enable_slicing()  # image by image: the memory of one, the same pixels in any batch
        sides = (resolution[0], resolution[-1])
        height, width = (side // self._pipeline.vae_scale_factor for side in sides)
        self.latent_shape = (self._pipeline.transformer.config.in_channels, height, width)
        self.module = self._lora = add_lora(self._pipeline.transformer, lora_rank, lora_targets)
        self._pipeline.to(self.device)
        self._embeddings = functools.lru_cache(PROMPTS_KEPT)(self._embed)
        self._negative = [value.to(self.device) for value in self._embed("")]

    def sigmas(self, num_steps: int) -> Tensor:
        """The sigma grid of the scheduler, (num_steps + 1,) float64."""
        self._pipeline.scheduler.set_timesteps(num_steps)
        return self._pipeline.scheduler.sigmas.double().cpu()

    def check(self, prompts: list[Prompt]) -> None:
        """Any prompt will do; the text encoders cut a long one off."""

    def encode(self, prompts: list[Prompt]) -> dict[str, Tensor]:
        """The condition for B prompts: {"embeddings": (B, 77 + 256, C), "pooled": (B, C')}, the three text
        encoders' of the pipeline. Each prompt is encoded alone, so that a batch cannot change its numbers."""
        embeddings, pooled = zip(*[self._embeddings(p.text) for p in prompts], strict=True)
        return {
            "embeddings": torch.stack(embeddings).to(self.device),
            "pooled": torch.stack(pooled).to(self.device),
        }

    def _embed(self, text: str) -> tuple[Tensor, Tensor]:
        """Embeddings (77 + 256, C) and pooled embeddings (C',) of one text, on the CPU."""
        with torch.no_grad():
            embeddings, _, pooled, _ = self._pipeline.encode_prompt(
                text, None, None, do_classifier_free_guidance=False, max_sequence_length=PROMPT_TOKENS
            )
        return embeddings[0].cpu(), pooled[0].cpu()

    def noise(self, n: int, generator: torch.Generator) -> Tensor:
        """n standard normal latents, (n, 16, H/8, W/8), drawn on the CPU so that devices agree."""
        return torch.randn((n, *self.latent_shape), generator=generator).to(self.device)

    def velocity(self, x: Tensor, sigma: Tensor | float, cond: dict[str, Tensor]) -> Tensor:
        """The guided velocity dx/dsigma at latents x (B, 16, h, w) of noise level sigma (), from one call of
        the network. Returns float32 (B, 16, h, w)."""
        embeddings, pooled = cond["embeddings"], cond["pooled"]
        guided = self.guidance_scale != 1
        if guided:  # the first half of the rows has the empty prompt
            empty = [value.expand(len(x), *value.shape) for value in self._negative]
            embeddings, pooled = torch.cat([empty[0], embeddings]), torch.cat([empty[1], pooled])
            x = torch.cat([x, x])
        v = self.module(
            hidden_states=x.to(self.dtype),
            timestep=torch.full((len(x),), 1000 * float(sigma), device=x.device),
            encoder_hidden_states=embeddings,
            pooled_projections=pooled,
            return_dict=False,
        )[0].float()
        if not guided:
            return v
        v_empty, v_prompt = v.chunk(2)
        return v_empty + self.guidance_scale * (v_prompt - v_empty)

    def decode(self, x: Tensor) -> Tensor:
        """Latents (B, 16, h, w) to pixels (B, 3, 8h, 8w) in [0, 1], without gradient."""
        vae = self._pipeline.vae
        with torch.no_grad():
            pixels = vae.decode(x.float() / vae.config.scaling_factor + vae.config.shift_factor).sample
        return (pixels / 2 + 0.5).clamp(0, 1)

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context, `velocity` is that of the model without the LoRA."""
        with self._lora.disable_adapter():
            yield

    def export(self, folder: Path) -> Path:
        """Write the LoRA to folder/pytorch_lora_weights.safetensors, which diffusers'
        `pipeline.load_lora_weights(folder)` loads. Returns the path."""
        from peft import get_peft_model_state_dict

        config, weights = self._lora.peft_config["default"], get_peft_model_state_dict(self._lora)
        self._pipeline.save_lora_weights(
            folder,
            {name.removeprefix("base_model.model."): weight.cpu() for name, weight in weights.items()},
            transformer_lora_adapter_metadata={  # without it the reader takes alpha = r
                "r": config.r,
                "lora_alpha": config.lora_alpha,
                "target_modules": sorted(config.target_modules),
            },
        )
        return Path(folder) / "pytorch_lora_weights.safetensors"


def load_pipeline(model_path: str, dtype: torch.dtype):
    """The StableDiffusion3Pipeline of a folder or hub id, on the CPU; its VAE in float32. Raises
    InputError, in one line, if it or diffusers is not there."""
    try:
        from diffusers import StableDiffusion3Pipeline
    except ImportError:
        raise InputError(
            "--model sd3.5-m needs Python 3.11 and more packages:"
            ' pip install -c scripts/constraints.txt ".[models]"'
        ) from None
    try:
        return StableDiffusion3Pipeline.from_pretrained(
            model_path, dtype={"default": dtype, "vae": torch.float32}
        )
    except (OSError, ValueError) as error:
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(
            f"--model-path {model_path}: it cannot be loaded ({why}): give a folder in diffusers' format, or"
            f" accept the licence at https://huggingface.co/{HUB_ID}, log in with `hf auth login`,"
            f" and give {HUB_ID}"
        ) from None


def add_lora(transformer, rank: int, targets: tuple[str, ...]):
    """The transformer with a LoRA whose output is 0 at first, the same for every process and run. Its weights
    are float32, and the only ones with a gradient."""
    from peft import LoraConfig, get_peft_model

    unused = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}.attn.add_q_proj"  # by the output
    names = [name for name, _ in transformer.named_modules() if name.endswith(targets) and name != unused]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights="gaussian", target_modules=names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(transformer, config)
