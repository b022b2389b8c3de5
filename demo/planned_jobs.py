"""The jobs of `make demo`: several signatures, tasks, priorities and step counts, the same every time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from PIL import Image

from demo.drawings import COLOURS, SQUARE_SIZE, WIDE_SIZE, Prompt, all_prompts, draw

SQUARE_JOBS, WIDE_JOBS, IMAGE_TO_IMAGE_JOBS = 28, 16, 8
TWO_IMAGE_JOBS = 2
PRIORITIES = ("interactive", "standard", "standard", "bulk")
# High enough to repaint a shape, low enough that its place in the output still depends on the input image.
STRENGTH = 0.8


@dataclass(frozen=True)
class PlannedJob:
    """A request body without its `image`, and the input image, if any."""

    prompt: str
    body: Mapping[str, object]
    input_image: Image.Image | None = None


def planned_jobs() -> list[PlannedJob]:
    """Return the demo's jobs in the order of their submission."""
    rng = random.Random(7)
    text_to_image_jobs = SQUARE_JOBS + WIDE_JOBS
    prompts = rng.sample(all_prompts(), text_to_image_jobs + IMAGE_TO_IMAGE_JOBS)
    jobs = []
    for number, prompt in enumerate(prompts):
        size = WIDE_SIZE if SQUARE_JOBS <= number < text_to_image_jobs else SQUARE_SIZE
        input_image = _in_another_colour(prompt, rng) if number >= text_to_image_jobs else None
        jobs.append(_job(prompt, size, input_image, images=2 if number < TWO_IMAGE_JOBS else 1, rng=rng))
    rng.shuffle(jobs)
    return jobs


def _job(
    prompt: Prompt, size: tuple[int, int], input_image: Image.Image | None, *, images: int, rng: random.Random
) -> PlannedJob:
    body: dict[str, object] = {
        "model": "demo",
        "prompt": prompt.caption(),
        "width": size[0],
        "height": size[1],
        "steps": rng.randint(10, 20),
        "guidance_scale": rng.choice((1.5, 2.0, 2.5, 3.0)),
        "seed": rng.randrange(2**32),
        "n": images,
        "priority": rng.choice(PRIORITIES),
    }
    if input_image is not None:
        body["strength"] = STRENGTH
    return PlannedJob(prompt.caption(), body, input_image)


def _in_another_colour(prompt: Prompt, rng: random.Random) -> Image.Image:
    """Return a drawing of the prompt with its shape in another colour, which the job has to repaint."""
    others = [colour for colour in COLOURS if colour not in (prompt.colour, prompt.ground)]
    return draw(replace(prompt, colour=rng.choice(others)), SQUARE_SIZE, rng.randrange(2**32))
