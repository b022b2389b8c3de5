"""Padding is the company's doing: a reproducible picture must not depend on it by a single bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_room import DIFFUSERS_AND_NUMPY, Room, a_job, a_spec
from parity.cells import LONG
from tiny import shelf

from shared.job import Task

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

PROMPTS = ("a dog", LONG, "fog", f"{LONG}, and back", "ten boats", "a cat")


@pytest.mark.parametrize(
    "tiny",
    [
        "qwen-image",
        pytest.param("z-image", marks=pytest.mark.parity),
        pytest.param("ernie-image", marks=pytest.mark.parity),
    ],
)
def test_reproducible_pictures_do_not_depend_on_the_longest_prompt_beside_them(tiny: str, shelf_folder: Path) -> None:
    """Prompts are padded to the longest of a forward, or masked: reproducible ones share forwards with their likes."""
    source = shelf_folder / tiny
    if not (source / "model_index.json").exists():
        shelf.put(tiny, source)
    spec = a_spec(source, tasks=(Task.TEXT_TO_IMAGE,))
    jobs = [a_job(f"job{at}", prompt=prompt, seed=at, steps=3, reproducible=True) for at, prompt in enumerate(PROMPTS)]
    together = Room(spec).run(*jobs)
    like = a_job("like", prompt="a cow", seed=6, steps=3, reproducible=True)
    assert not [job.id for job in jobs if together.ended[job.id].error]
    for job in jobs[:2]:
        alone = Room(spec).run(job, like)
        assert np.array_equal(alone.pictures[job.id, 0], together.pictures[job.id, 0])
    assert together.ended["job0"].fusing.max_jobs > 1, "of one length with another"
