"""Requests with candidates: how many results they have, what refuses them, and what they count as in the queue."""

from __future__ import annotations

from typing import Any

import pytest

from api.jobs.request import parse
from api.jobs.resolve import resolve_for_model
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.errors import InvalidRequest
from shared.job import Job
from shared.job_fields import MAX_SEED
from shared.tasks import Task

BEST = {"candidates": 6, "keep": 2}


def a_model(**fields: Any) -> ModelSpec:
    tasks = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE)
    values = {"id": "m", "source": "acme/model", "tasks": tasks, "scorer": "acme/clip", "limits": Limits(max_images=8)}
    return ModelSpec(**{**values, **fields})


def job_of(spec: ModelSpec, **body: Any) -> Job:
    return resolve_for_model(parse({"model": "m", "prompt": "x", **body}), spec, "t", 0)


def test_a_job_has_as_many_results_as_it_keeps_and_takes_a_slot_for_each_candidate() -> None:
    job = job_of(a_model(), best_of=BEST, steps=12)
    assert (job.n, job.slots) == (2, 6)
    assert job_of(a_model(), best_of=BEST, n=2).n == 2


@pytest.mark.parametrize(
    ("body", "steps"), [({}, 6), ({"best_of": {**BEST, "at": [1.0]}}, 12), ({"image": "i", "strength": 0.5}, 3)]
)
def test_its_steps_for_the_queue_are_those_of_the_mean_candidate(body: dict[str, Any], steps: int) -> None:
    task = {"task": "image_to_image"} if "image" in body else {}
    assert job_of(a_model(), **{"best_of": BEST, "steps": 12, **task, **body}).computed_steps_per_image == steps


@pytest.mark.parametrize(
    ("spec", "body", "param", "message"),
    [
        ({"scorer": None}, {}, "best_of", "best_of: model 'm' has no scorer of candidates"),
        ({}, {"best_of": {"candidates": 9}}, "best_of.candidates", "best_of.candidates is at most 8 for model 'm'"),
        ({}, {"best_of": {"candidates": 2, "keep": 2}}, "best_of", "best_of: keep must be below candidates 2, not 2"),
        ({}, {"best_of": {"candidates": 4, "at": [2]}}, "best_of.at.0", None),
        ({}, {"n": 3}, "n", "n is best_of.keep, 2, with best_of; leave it out"),
        ({}, {"seed": MAX_SEED - 3}, "seed", f"seed is at most {MAX_SEED - 6}"),
        ({}, {"output": {"put_urls": ["https://x.example/a"]}}, "output", None),
    ],
)
def test_what_a_model_cannot_compare_is_refused_with_its_field(
    spec: dict[str, Any], body: dict[str, Any], param: str, message: str | None
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job_of(a_model(**spec), **{"best_of": BEST, **body})
    assert caught.value.param == param
    assert message is None or caught.value.message == message


@pytest.mark.parametrize("field", [{"output_format": "latent"}, {"denoising_end": 0.5}, {"refiner_start": 0.5}])
def test_parts_of_a_denoising_are_not_compared(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job_of(a_model(), best_of=BEST, **field)
    assert any(fault.message.startswith("best_of excludes") for fault in caught.value.faults)


def test_a_video_has_no_candidates() -> None:
    spec = a_model(tasks=(Task.TEXT_TO_VIDEO, Task.TEXT_TO_IMAGE), limits=Limits(max_frames=5, max_images=8))
    with pytest.raises(InvalidRequest, match="best_of: not for text_to_video, only for images"):
        job_of(spec, best_of=BEST, task="text_to_video", frames=5)


def test_a_model_without_images_has_no_scorer() -> None:
    with pytest.raises(ValueError, match="scorer: none of its tasks makes images"):
        a_model(tasks=(Task.TEXT_TO_VIDEO,), limits=Limits(max_frames=5))
