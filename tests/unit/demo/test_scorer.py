"""The scorer of the demo model: what it is trained on, and that it tells right images from wrong ones."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import CLIPModel, CLIPTokenizer

from demo.drawings import SQUARE_SIZE, draw_batch, split_prompts
from demo.train_scorer import image_tensor, near_misses

FOLDER = Path(__file__).resolve().parents[3] / "demo" / "scorer"


def test_a_near_miss_differs_in_one_word() -> None:
    rng = random.Random(1)
    prompts, _ = split_prompts()
    for prompt in prompts[::100]:
        for miss in near_misses(prompt, rng):
            differing = [name for name, value in asdict(prompt).items() if asdict(miss)[name] != value]
            assert len(differing) == 1
            assert miss.colour != miss.ground


def test_most_drawings_are_most_like_their_own_caption() -> None:
    """Of 28 held-out prompts, which it was not trained on."""
    _, prompts = split_prompts()
    prompts = prompts[::4]
    model, tokenizer = CLIPModel.from_pretrained(FOLDER, dtype=torch.float32), CLIPTokenizer.from_pretrained(FOLDER)
    captions = [prompt.caption() for prompt in prompts]
    tokens = tokenizer(captions, padding="max_length", max_length=24, return_tensors="pt").input_ids
    with torch.no_grad():
        texts = model.get_text_features(tokens).pooler_output
        images = model.get_image_features(image_tensor(draw_batch(prompts, SQUARE_SIZE, 3))).pooler_output
    similar = torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(texts).T
    right = np.mean(similar.argmax(dim=1).numpy() == np.arange(len(prompts)))
    assert right >= 0.5
