"""The options that all algorithms have, and their checks. Each algorithm file adds its own and sets its
defaults."""

import math
from dataclasses import dataclass
from typing import Literal

from shared.errors import InputError

IMAGE_OPTIONS = (  # of real models
    "model_path",
    "resolution",
    "guidance_scale",
    "lora_rank",
    "lora_targets",
    "mixed_precision",
    "gradient_checkpointing",
    "text_encoders",
    "vae_tiling",
)
MODEL_OPTIONS = {"sd3.5-m": IMAGE_OPTIONS, "wan2.1": (*IMAGE_OPTIONS, "num_frames")}


@dataclass
class RunArgs:
    """The options of a run that are no part of an algorithm."""

    # run
    output_dir: str | None = None
    """Folder of the run (upstream: save_dir). Default: runs/<algorithm>-<model>-<reward>-<seed>-<time>."""
    resume: str | None = None
    """Folder of a run to continue exactly; it needs no other option."""
    seed: int = 0
    """Seed of the prompts' order and of all training noise (upstream: seed)."""
    num_iterations: int = 60
    """Training iterations: rollout, reward, update (upstream: num_epochs)."""
    eval_every: int = 2
    """Evaluate every so many iterations, and before the first and after the last (upstream: eval_freq)."""
    eval_samples: int = 400
    """Samples of an evaluation: the prompts in turn, with noise that is the same in all runs."""
    eval_steps: int = 20
    """Sampling steps of an evaluation (upstream: sample.eval_num_steps)."""
    checkpoint_every: int = 10
    """Save the state every so many iterations, and at the end and on Ctrl-C (upstream: save_freq)."""

    # model, prompts and reward
    model: str = "digits"
    """The generator: digits; digits-faithful, which draws the prompted digit more often; or sd3.5-m, Stable
    Diffusion 3.5 Medium (upstream: pretrained.model)."""
    prompts: str = "digits"
    """A built-in set (digits) or a file: text, one prompt a line, or .jsonl (upstream: dataset)."""
    eval_prompts: str | None = None
    """Prompts of the evaluations, a set or a file. Default: those of training."""
    reward: str = "label"
    """label, ink, next, jpeg, ocr (the quoted text of the prompt), remote (of a server:
    scripts/reward_server.py), or a weighted sum as "label:1,jpeg:0.5" (upstream: reward_fn)."""
    reward_batch_size: int | None = None
    """Samples in one call of the reward. Default: all of an iteration."""

    # optimisation
    learning_rate: float = 4e-4
    """AdamW's learning rate (upstream: train.learning_rate)."""
    weight_decay: float = 1e-4
    """AdamW's weight decay (upstream: train.adam_weight_decay)."""
    adam_eps: float = 1e-15
    """AdamW's epsilon, below the gradients of per_dim, about 1e-8 (upstream: train.adam_epsilon = 1e-8)."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm (upstream: train.max_grad_norm)."""
    ema_decay: float = 0.0
    """Decay of the averaged weights that are evaluated and exported; 0: no average (upstream: train.ema)."""
    micro_batch_size: int | None = None
    """Trajectories in one network call. Default: all of an iteration. It changes the result by rounding only
    (upstream: train.batch_size)."""


@dataclass
class FlowArgs(RunArgs):
    """And those of sampling a continuous flow."""

    # sampling
    sampler: Literal["flow", "dance", "cps"] = "flow"
    """Stochastic step: flow (the paper), dance (DanceGRPO), cps (Flow-CPS) (upstream: sample.sde_type)."""
    num_steps: int = 10
    """T: steps of a training trajectory (upstream: sample.num_steps)."""
    noise_level: float = 0.7
    """a: strength of the noise (upstream: sample.noise_level)."""
    sde_window: tuple[int, int] | None = None
    """START STOP: steps START .. STOP-1 are stochastic and trained. Default: all but the last
    (upstream: sample.sde_window_range)."""
    storage_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Trajectories are rounded to and kept in this dtype (upstream: mixed_precision)."""

    # real models
    model_path: str | None = None
    """Weights of a real model: a folder in diffusers' format, or a hub id. Default: the model's id on the hub
    (upstream: pretrained.model)."""
    resolution: tuple[int, ...] | None = None
    """Height and width in pixels, or one number for both (upstream: resolution, or height and width)."""
    num_frames: int | None = None
    """Frames of a video, 4 k + 1 (upstream: frames)."""
    guidance_scale: float | None = None
    """Classifier-free guidance, in sampling and in training; 1: none
    (upstream: sample.guidance_scale and train.cfg)."""
    lora_rank: int | None = None
    """Rank of the LoRA that is trained; alpha is twice the rank (upstream: 32 and 64, in code)."""
    lora_targets: tuple[str, ...] | None = None
    """Layers of the transformer that get one, by the end of their names. Default: the projections of
    attention (upstream: in code)."""
    mixed_precision: Literal["no", "bf16"] | None = None
    """Dtype of the frozen weights: no is float32. What is trained is float32 (upstream: mixed_precision)."""
    gradient_checkpointing: bool = False
    """Compute activations anew in the backward pass: less memory, more time
    (upstream: activation_checkpointing)."""
    text_encoders: Literal["gpu", "cpu", "precomputed"] | None = None
    """gpu: they come to the device for new prompts and leave it. cpu: they work on the CPU. precomputed: all
    prompts are encoded before training, then they are freed."""
    vae_tiling: bool = False
    """Decode in tiles: less memory for large images and videos."""


def check_args(args, **own: tuple[bool, str]) -> None:
    """Raise InputError for settings that no algorithm can run. Reads the fields that all of them have.

    own: further fields by name: (whether the value will do, what it must be).
    """
    bounds = {  # name: (holds, what it must be)
        "output_dir": (args.output_dir != "", "the name of a folder"),
        "resume": (args.resume != "", "the folder of a run"),
        "seed": (0 <= args.seed < 2**32, "0 or more and below 2^32"),
        "num_iterations": (args.num_iterations >= 1, "at least 1"),
        "eval_every": (args.eval_every >= 1, "at least 1"),
        "eval_samples": (args.eval_samples >= 1, "at least 1"),
        "eval_steps": (args.eval_steps >= 1, "at least 1"),
        "checkpoint_every": (args.checkpoint_every >= 1, "at least 1"),
        "updates_per_rollout": (args.updates_per_rollout >= 1, "at least 1"),
        "num_prompts": (args.num_prompts >= 1, "at least 1"),
        "group_size": (args.group_size >= 2, "at least 2: rewards are compared within their group"),
        "reward_batch_size": (args.reward_batch_size is None or args.reward_batch_size >= 1, "at least 1"),
        "micro_batch_size": (args.micro_batch_size is None or args.micro_batch_size >= 1, "at least 1"),
        "beta": (0 <= args.beta < math.inf, "0 or more"),
        "learning_rate": (0 < args.learning_rate < math.inf, "above 0"),
        "weight_decay": (0 <= args.weight_decay < math.inf, "0 or more"),
        "adam_eps": (0 < args.adam_eps < math.inf, "above 0"),
        "max_grad_norm": (0 < args.max_grad_norm < math.inf, "above 0 and finite"),
        "ema_decay": (0 <= args.ema_decay < 1, "at least 0 and below 1"),
        **own,
    }
    for name, (holds, need) in bounds.items():
        if not holds:
            value = getattr(args, name)
            text = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise InputError(f"{flag(name)} {repr(value) if value == '' else text}: it must be {need}")


def check_flow_args(args, **own: tuple[bool, str]) -> None:
    """`check_args` for settings of a continuous flow."""
    bounds = {
        "num_steps": (args.num_steps >= 2, "at least 2, since the last step is never trained"),
        "noise_level": (0 < args.noise_level < math.inf, "above 0: training needs stochastic steps"),
        "clip_range": (0 < args.clip_range < math.inf, "above 0"),
        "model_path": (args.model_path != "", "a folder or a hub id"),
        "resolution": (
            args.resolution is None
            or (
                len(args.resolution) in (1, 2)
                and all(side > 0 and side % 16 == 0 for side in args.resolution)
            ),
            "one or two multiples of 16",
        ),
        "num_frames": (
            args.num_frames is None or (args.num_frames > 0 and args.num_frames % 4 == 1),
            "4 k + 1: the VAE makes one latent frame of the first, and one of every four after it",
        ),
        "lora_targets": (args.lora_targets != (), "one or more names"),
        "lora_rank": (args.lora_rank is None or args.lora_rank >= 1, "at least 1"),
        "guidance_scale": (args.guidance_scale is None or 1 <= args.guidance_scale < math.inf, "at least 1"),
    }
    check_args(args, **bounds, **own)
    if args.sampler == "cps" and args.noise_level > 1:
        raise InputError(f"--noise-level {args.noise_level}: it must be at most 1 for --sampler cps")
    if args.sde_window is not None:
        (start, stop), last = args.sde_window, args.num_steps - 1
        if not 0 <= start < stop <= last:
            need = f"0 <= START < STOP <= {last}, since the last of {args.num_steps} steps is never trained"
            raise InputError(f"--sde-window {start} {stop}: it must satisfy {need}")


def model_options(args) -> dict:
    """The options of real models that were given, by name."""
    names = MODEL_OPTIONS["wan2.1"]
    return {n: value for n, value in vars(args).items() if n in names and value not in (None, False)}


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")
