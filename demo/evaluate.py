"""Measures the demo model on the prompts it never saw: `python -m demo.evaluate`."""

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
from demo.pictures import SQUARE_SIZE, WIDE_SIZE, Prompt, split_prompts

ATTRIBUTES = ("colour", "shape", "ground", "place")
MARGIN = 4
SHEET_COLUMNS = 14


@dataclass(frozen=True)
class Sampling:
    """How pictures are made."""

    steps: int
    guidance: float
    batch: int
    seed: int


def generate(
    pipeline: DiffusionPipeline, prompts: list[Prompt], size: tuple[int, int], sampling: Sampling
) -> list[Image.Image]:
    """One picture of `size` (width, height) for each prompt; the n-th is seeded with seed + n."""
    pictures: list[Image.Image] = []
    for first in range(0, len(prompts), sampling.batch):
        part = prompts[first : first + sampling.batch]
        seeds = range(sampling.seed + first, sampling.seed + first + len(part))
        pictures += pipeline(
            [prompt.caption() for prompt in part],
            width=size[0],
            height=size[1],
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        ).images
    return pictures


def score(prompts: list[Prompt], pictures: list[Image.Image]) -> dict[str, float]:
    """The share of pictures with each attribute right, and under `all` with every one right."""
    right: Counter[str] = Counter()
    for prompt, picture in zip(prompts, pictures, strict=True):
        seen = read(picture)
        right.update(name for name in ATTRIBUTES if getattr(seen, name) == getattr(prompt, name))
        right["all"] += matches(picture, prompt)
    return {name: right[name] / len(prompts) for name in ("all", *ATTRIBUTES)}


def contact_sheet(prompts: list[Prompt], pictures: list[Image.Image]) -> Image.Image:
    """All pictures in rows, on green where they match their prompt and on red where not."""
    width, height = (side + 2 * MARGIN for side in pictures[0].size)
    rows = -(-len(pictures) // SHEET_COLUMNS)
    sheet = Image.new("RGB", (width * min(SHEET_COLUMNS, len(pictures)), height * rows), "gray")
    for n, (prompt, picture) in enumerate(zip(prompts, pictures, strict=True)):
        corner = (n % SHEET_COLUMNS * width, n // SHEET_COLUMNS * height)
        frame = "darkgreen" if matches(picture, prompt) else "red"
        sheet.paste(frame, (*corner, corner[0] + width, corner[1] + height))
        sheet.paste(picture, (corner[0] + MARGIN, corner[1] + MARGIN))
    return sheet


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scheduler", help="a scheduler class of diffusers, in place of the model's own")
    parser.add_argument("--limit", type=int, help="at most so many prompts, evenly chosen")
    parser.add_argument("--sheet", type=Path, help="write contact sheets to PATH-64x64.png and PATH-96x64.png")
    return parser.parse_args()


def main() -> None:
    """Prints one line for each picture size."""
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
        begun = time.monotonic()
        pictures = generate(pipeline, prompts, size, sampling)
        seconds = time.monotonic() - begun
        shares = " ".join(f"{name}={share:.1%}" for name, share in score(prompts, pictures).items())
        label = f"{size[0]}x{size[1]}"
        print(f"size={label} prompts={len(prompts)} {shares} seconds={seconds:.1f}", flush=True)
        if args.sheet:
            contact_sheet(prompts, pictures).save(args.sheet.with_name(f"{args.sheet.name}-{label}.png"))


if __name__ == "__main__":
    main()
