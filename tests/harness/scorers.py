"""Scorers for tests: a CLIP model of images of 64 x 64 that knows nothing, so that its scores are as good as any."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import CLIPImageProcessorPil

from demo.components import new_tokenizer
from demo.train_scorer import new_scorer

SIDE = 64


def save_scorer(folder: Path) -> Path:
    """Write a scorer into a folder, and return it."""
    torch.manual_seed(5)
    tokenizer = new_tokenizer()
    new_scorer(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size=size, crop_size=size, image_std=[0.5] * 3).save_pretrained(folder)
    return folder
