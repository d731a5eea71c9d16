"""Make tiny models with random weights of the classes of the real ones, so that what trains the real ones can
be tried and tested on any machine, without a download.

    python scripts/make_tiny_models.py FOLDER        # writes FOLDER/sd3.5-m, in diffusers' format
    python algos/flow_grpo.py --model sd3.5-m --model-path FOLDER/sd3.5-m --resolution 64 --reward jpeg

sd3.5-m has what distinguishes SD3.5 Medium: normalised queries and keys, dual attention in the first layers,
16 latent channels, the three text encoders, and a sigma grid of shift 3.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

WIDTHS = {
    "clip_l": 24,
    "clip_g": 40,
    "t5": 72,
}  # of the text encoders; T5 is the widest


@dataclass
class Args:
    output_dir: tyro.conf.Positional[Path]
    """Folder for the models, one folder each."""
    seed: int = 0
    """Seed of the weights."""


def clip_tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer without merges: one token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [letter + "</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    """T5's tokenizer with one token a character of ASCII."""
    scores = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "\u2581": -2.0}  # the order is T5's
    scores |= {chr(code): -3.0 for code in range(33, 127)}
    return T5Tokenizer(vocab=list(scores.items()), extra_ids=0, model_max_length=512)


def clip_encoder(width: int, activation: str, tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """A text encoder of CLIP with two layers."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def sd3(seed: int) -> StableDiffusion3Pipeline:
    """The pipeline of a tiny SD3.5 Medium; latents have an eighth of the image's height and width."""
    torch.manual_seed(seed)
    tokenizers = [clip_tokenizer(), clip_tokenizer(), t5_tokenizer()]
    t5 = T5Config(
        vocab_size=len(tokenizers[2]),
        d_model=WIDTHS["t5"],
        d_kv=18,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=WIDTHS["t5"],
        pooled_projection_dim=WIDTHS["clip_l"] + WIDTHS["clip_g"],
        pos_embed_max_size=32,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=16,
        sample_size=128,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=clip_encoder(WIDTHS["clip_l"], "quick_gelu", tokenizers[0]).eval(),
        text_encoder_2=clip_encoder(WIDTHS["clip_g"], "gelu", tokenizers[1]).eval(),
        text_encoder_3=T5EncoderModel(t5).eval(),
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        tokenizer_3=tokenizers[2],
    )


def main(args: Args) -> None:
    sd3(args.seed).save_pretrained(args.output_dir / "sd3.5-m")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
