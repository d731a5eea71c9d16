"""Rewards that read the image alone."""

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shared.prompts import Prompt

JPEG_QUALITY = 95  # as in DDPO (arXiv 2305.13301)


def make_jpeg(device="cpu"):
    """`jpeg`: compressibility, minus the size of the image as JPEG of quality 95, in kilobytes (1000 bytes),
    as in DDPO."""

    def jpeg(pixels: Tensor, prompts: list[Prompt]) -> Tensor:
        return torch.tensor([-_jpeg_bytes(image) / 1000 for image in pixels])

    return jpeg


def bytes_of(image: Tensor) -> np.ndarray:
    """One image (3, H, W) in [0, 1] as (H, W, 3) uint8, rounded."""
    return (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()


def _jpeg_bytes(image: Tensor) -> int:
    """Size of one image (3, H, W) in [0, 1] as JPEG, in bytes."""
    buffer = io.BytesIO()
    Image.fromarray(bytes_of(image)).save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.tell()
