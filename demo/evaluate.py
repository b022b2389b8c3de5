"""`python -m demo.evaluate`: measure the demo model on its held-out prompts."""

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from demo.checker import matches, read
from demo.drawings import SQUARE_SIZE, WIDE_SIZE, Prompt, split_prompts

ATTRIBUTES = ("colour", "shape", "ground", "place")
MARGIN = 4
SHEET_COLUMNS = 14


@dataclass(frozen=True)
class Sampling:
    steps: int
    guidance: float
    batch: int
    seed: int


def generate(
    pipeline: DiffusionPipeline, prompts: list[Prompt], size: tuple[int, int], sampling: Sampling
) -> list[Image.Image]:
    """Return one image of `size` (width, height) per prompt; the n-th has the seed `seed + n`."""
    images: list[Image.Image] = []
    for first in range(0, len(prompts), sampling.batch):
        batch = prompts[first : first + sampling.batch]
        seeds = range(sampling.seed + first, sampling.seed + first + len(batch))
        images += pipeline(
            [prompt.caption() for prompt in batch],
            width=size[0],
            height=size[1],
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        ).images
    return images


def score(prompts: list[Prompt], images: list[Image.Image]) -> dict[str, float]:
    """Return the share of images with each attribute correct; `all`: with every attribute correct."""
    correct: Counter[str] = Counter()
    for prompt, image in zip(prompts, images, strict=True):
        reading = read(image)
        correct.update(name for name in ATTRIBUTES if getattr(reading, name) == getattr(prompt, name))
        correct["all"] += matches(image, prompt)
    return {name: correct[name] / len(prompts) for name in ("all", *ATTRIBUTES)}


def evaluation_sheet(prompts: list[Prompt], images: list[Image.Image]) -> Image.Image:
    """Return all images in rows, framed green if they match their prompt, otherwise red."""
    width, height = (side + 2 * MARGIN for side in images[0].size)
    rows = -(-len(images) // SHEET_COLUMNS)
    sheet = Image.new("RGB", (width * min(SHEET_COLUMNS, len(images)), height * rows), "gray")
    for n, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        corner = (n % SHEET_COLUMNS * width, n // SHEET_COLUMNS * height)
        frame = "darkgreen" if matches(image, prompt) else "red"
        sheet.paste(frame, (*corner, corner[0] + width, corner[1] + height))
        sheet.paste(image, (corner[0] + MARGIN, corner[1] + MARGIN))
    return sheet


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scheduler", help="a noise scheduler class of diffusers, instead of the model's")
    parser.add_argument("--limit", type=int, help="the maximal number of prompts, evenly chosen")
    parser.add_argument("--sheet", type=Path, help="write contact sheets to PATH-64x64.png and PATH-96x64.png")
    return parser.parse_args()


def main() -> None:
    """Print one line per image size."""
    args = arguments()
    pipeline = DiffusionPipeline.from_pretrained(args.model, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    if args.scheduler:
        scheduler = getattr(diffusers, args.scheduler)
        pipeline.scheduler = scheduler.from_config(pipeline.scheduler.config)
    _, prompts = split_prompts()
    if args.limit:
        prompts = prompts[:: max(1, len(prompts) // args.limit)][: args.limit]
    sampling = Sampling(args.steps, args.guidance, args.batch, args.seed)
    for size in (SQUARE_SIZE, WIDE_SIZE):
        started_at = time.monotonic()
        images = generate(pipeline, prompts, size, sampling)
        seconds = time.monotonic() - started_at
        shares = " ".join(f"{name}={share:.1%}" for name, share in score(prompts, images).items())
        label = f"{size[0]}x{size[1]}"
        print(f"size={label} prompts={len(prompts)} {shares} seconds={seconds:.1f}", flush=True)
        if args.sheet:
            evaluation_sheet(prompts, images).save(args.sheet.with_name(f"{args.sheet.name}-{label}.png"))


if __name__ == "__main__":
    main()
