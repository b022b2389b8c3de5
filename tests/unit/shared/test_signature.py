"""Signatures and size classes of jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest

from api.jobs.request import JobRequest
from api.jobs.resolve import resolve_for_model
from shared.config.candidates import BestOf
from shared.config.controls import Control
from shared.config.destinations import Destination
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.config.scheduler_choices import SchedulerOptions
from shared.config.step_schedules import StepSchedule
from shared.job import Adapter, InputRef, Job, State, Webhook, matching
from shared.job_fields import MAY_DIFFER, Matching, OnDeadline, Priority
from shared.runtime.tracing import TraceContext
from shared.signature import shape, signature, size_class
from shared.tasks import OutputFormat

A_REF = InputRef(id="in_1", key="k", content_type="image/png", bytes=1, width=8, height=8)
OTHER: dict[str, Any] = {
    "id": "job_other",
    "tenant": "other",
    "created_at_ms": 1,
    "priority": Priority.BULK,
    "time_limit_ms": 5,
    "not_before_ms": 5,
    "after": ("job_01ja3v5c8zq3m7x2r4t6w8y0ab",),
    "on_parent_failure": "run",
    "on_deadline": OnDeadline.RUN,
    "metadata": {"a": "b"},
    "batch_id": "b1",
    "webhook": Webhook(url="https://example.com/hook", states=(State.FAILED,)),
    "model": "other",
    "lyrics": "la",
    "duration_s": 1.5,
    "repaint_start_s": 0.5,
    "repaint_end_s": 1.0,
    "audio": InputRef(id="in_3", key="k", content_type="audio/wav", bytes=1, width=0, height=0, duration_s=1.5),
    "width": 128,
    "height": 128,
    "frames": 2,
    "adapters": (Adapter(id="lora"),),
    "mixed_fields": ("adapters",),
    "task": "image_to_image",
    "prompt": "another",
    "negative_prompt": "blurry",
    "n": 3,
    "best_of": BestOf(candidates=4),
    "seed": 99,
    "steps": 30,
    "guidance_scale": 9.5,
    "scheduler": "ddim",
    "keep_unmasked": False,
    "mask_blur": 4,
    "mask_padding": 32,
    "scheduler_options": SchedulerOptions(karras=True),
    "prompt_2": "second",
    "extra": {"eta": 0.5},
    "clip_skip": 2,
    "group": "nightly",
    "max_sequence_length": 64,
    "true_cfg_scale": 4.0,
    "guidance_rescale": 0.7,
    "denoising_end": 0.8,
    "denoising_start": 0.7,
    "refiner_start": 0.8,
    "upscale_factor": 2.25,
    "strength": 0.4,
    "images": (A_REF,),
    "mask": A_REF,
    "last_image": A_REF,
    "video": A_REF,
    "face_video": A_REF,
    "fps": 30,
    "layers": 3,
    "reference_sizes": ((64, 64),),
    "guidance_scale_2": 3.0,
    "reproducible": True,
    "output_format": OutputFormat.WEBP,
    "output_quality": 50,
    "embed_parameters": True,
    "previews": 2,
    "step_cache": StepSchedule(every=3),
    "control_ids": ("edges",),
    "controls": (Control(id="edges"),),
    "control_images": (A_REF,),
    "output": Destination(bucket="renders"),
    "trace": TraceContext(traceparent=f"00-{'1' * 32}-{'1' * 16}-01"),
}


def test_table_covers_every_field() -> None:
    """A new field of `Job` must be added to the table above."""
    assert set(OTHER) == set(Job.model_fields) - {"schema_version"}


@pytest.mark.parametrize("name", OTHER)
def test_only_a_field_that_must_match_changes_the_signature(name: str, make_job: Callable[..., Job]) -> None:
    job = make_job()
    other = job.model_copy(update={name: OTHER[name]})
    assert (signature(job) != signature(other)) == (matching(name) is Matching.MUST_MATCH)


def test_reproducible_jobs_are_claimed_by_themselves_and_mix_no_sizes() -> None:
    """They share no forwards with others, also of a model that mixes sizes in a forward."""
    spec = ModelSpec(id="m", source="/m", mixed_fields=("adapters", "size"), limits=Limits(multiple_of=16))

    def job(width: int, **fields: Any) -> Job:
        request = JobRequest(model="m", prompt="a", width=width, height=1024, **fields)
        return resolve_for_model(request, spec, "t", 0)

    assert signature(job(1024)) == signature(job(1040))
    assert signature(job(1024, reproducible=True)) != signature(job(1040, reproducible=True))
    assert signature(job(1024, reproducible=True)) == signature(job(1024, reproducible=True)) != signature(job(1024))


SHAPES = [(1024, 1024), (832, 1216), (1216, 832), (1344, 768), (1536, 640), (1280, 720)]


def test_sizes_with_similar_pixel_counts_share_a_signature_if_mixed(make_job: Callable[..., Job]) -> None:
    """Images are padded to the longest of their forward, so much smaller ones would cost as much."""
    mixed = {(width, height): make_job(width=width, height=height, mixed_fields=("size",)) for width, height in SHAPES}
    assert len({signature(job) for job in mixed.values()}) == 1
    others = [make_job(width=side, height=side, mixed_fields=("size",)) for side in (512, 768, 1440, 2048)]
    assert len({signature(job) for job in (*mixed.values(), *others)}) == 1 + len(others)
    assert {shape(job) for job in mixed.values()} == {"~1024x1024"}
    separate = {signature(make_job(width=width, height=height)) for width, height in SHAPES}
    assert len(separate) == len(SHAPES), "only if the model mixes sizes"
    longer = make_job(width=1024, height=1024, frames=5, mixed_fields=("size",))
    assert signature(longer) != signature(mixed[1024, 1024])


@pytest.mark.parametrize("side", [16, 64, 100, 512, 720, 1024, 2048, 4096, 8192])
def test_size_class_limits_the_ratio_of_pixel_counts(side: int) -> None:
    """Classes grow with the pixel count."""
    pixels = side * side
    heights = [height for height in range(1, 2 * side) if size_class(side, height) == size_class(side, side)]
    assert max(heights) * side <= 1.42 * min(heights) * side
    assert 0.84 * pixels < size_class(side, side) ** 2 < 1.2 * pixels
    classes = [size_class(side, height) for height in range(1, 2 * side)]
    assert classes == sorted(classes)


def test_unmarked_field_must_match() -> None:
    """A forgotten mark costs speed, not correctness."""

    class Extended(Job):
        unmarked: int = 0
        marked: Annotated[int, MAY_DIFFER] = 0

    marks = {name: field.metadata for name, field in Extended.model_fields.items()}
    assert not [mark for mark in marks["unmarked"] if isinstance(mark, Matching)]
    assert MAY_DIFFER in marks["marked"]


def test_signature_is_readable_and_safe_in_redis_keys(make_job: Callable[..., Job]) -> None:
    """`|` separates the parts of a key."""
    text = signature(make_job(model="org/model-1.0", width=512, height=768))
    assert "|" not in text
    assert text.startswith("org/model-1.0:512x768x1:")


def test_a_field_at_its_default_is_not_part_of_a_signature(make_job: Callable[..., Job]) -> None:
    """So a new field does not part the jobs that programs of two versions queue."""
    assert signature(make_job(model="demo", width=64, height=64)) == "demo:64x64x1:f21517afe7cf"
