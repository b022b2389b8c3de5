"""The jobs of `make demo`: several signatures, tasks, priorities and lengths, the same every time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from PIL import Image

from demo.pictures import COLOURS, SQUARE_SIZE, WIDE_SIZE, Prompt, all_prompts, draw

SQUARES, WIDES, STARTED = 28, 16, 8
PAIRS = 2  # jobs that ask for two pictures
PRIORITIES = ("interactive", "standard", "standard", "bulk")
# High enough to repaint a shape, low enough that its place can still be seen to come from the picture.
STRENGTH = 0.8


@dataclass(frozen=True)
class Planned:
    """One job: its body but for `image`, and the picture it starts from, if any."""

    prompt: str
    body: Mapping[str, object]
    start: Image.Image | None = None


def planned(seed: int = 7) -> list[Planned]:
    """Return the demo's jobs in the order in which they are submitted."""
    rng = random.Random(seed)
    prompts = rng.sample(all_prompts(), SQUARES + WIDES + STARTED)
    jobs = []
    for number, prompt in enumerate(prompts):
        size = WIDE_SIZE if SQUARES <= number < SQUARES + WIDES else SQUARE_SIZE
        start = _repainted(prompt, rng) if number >= SQUARES + WIDES else None
        jobs.append(_job(prompt, size, start, pictures=2 if number < PAIRS else 1, rng=rng))
    rng.shuffle(jobs)
    return jobs


def _job(
    prompt: Prompt, size: tuple[int, int], start: Image.Image | None, *, pictures: int, rng: random.Random
) -> Planned:
    body: dict[str, object] = {
        "model": "demo",
        "prompt": prompt.caption(),
        "width": size[0],
        "height": size[1],
        "steps": rng.randint(10, 20),
        "guidance_scale": rng.choice((1.5, 2.0, 2.5, 3.0)),
        "seed": rng.randrange(2**32),
        "n": pictures,
        "priority": rng.choice(PRIORITIES),
    }
    if start is not None:
        body["strength"] = STRENGTH
    return Planned(prompt.caption(), body, start)


def _repainted(prompt: Prompt, rng: random.Random) -> Image.Image:
    """Return a drawing of the prompt with its shape in another colour: the job has to repaint it."""
    others = [colour for colour in COLOURS if colour not in (prompt.colour, prompt.ground)]
    return draw(replace(prompt, colour=rng.choice(others)), SQUARE_SIZE, rng.randrange(2**32))
