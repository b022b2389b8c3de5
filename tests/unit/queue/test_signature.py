"""The signature: equal exactly when all shared fields are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest

from shared.job import PER_JOB, Adapter, InputRef, Job, OutputFormat, Priority, Sharing, State, Webhook, sharing
from shared.signature import shape, signature, size_class

A_REF = InputRef(id="in_1", key="k", content_type="image/png", bytes=1, width=8, height=8)
OTHER: dict[str, Any] = {
    "id": "job_other",
    "tenant": "other",
    "created_at_ms": 1,
    "priority": Priority.BULK,
    "deadline_at_ms": 5,
    "metadata": {"a": "b"},
    "batch_id": "b1",
    "webhook": Webhook(url="https://example.com/hook", states=(State.FAILED,)),
    "model": "other",
    "width": 128,
    "height": 128,
    "frames": 2,
    "adapters": (Adapter(id="lora"),),
    "mixed_fields": ("adapters",),
    "task": "image_to_image",
    "prompt": "another",
    "negative_prompt": "blurry",
    "n": 3,
    "seed": 99,
    "steps": 30,
    "guidance_scale": 9.5,
    "scheduler": "ddim",
    "strength": 0.4,
    "images": (A_REF,),
    "mask": A_REF,
    "last_image": A_REF,
    "fps": 30,
    "layers": 3,
    "reference_sizes": ((64, 64),),
    "guidance_scale_2": 3.0,
    "reproducible": True,
    "output_format": OutputFormat.WEBP,
    "output_quality": 50,
    "embed_parameters": True,
    "previews": 2,
}


def test_every_field_is_tried() -> None:
    """A new field of Job must be added to the table above."""
    assert set(OTHER) == set(Job.model_fields) - {"schema_version"}


@pytest.mark.parametrize("name", OTHER)
def test_only_a_shared_field_changes_the_signature(name: str, make_job: Callable[..., Job]) -> None:
    """Jobs that differ in one field part ways exactly when that field is shared by a fused forward."""
    job = make_job()
    other = job.model_copy(update={name: OTHER[name]})
    assert (signature(job) != signature(other)) == (sharing(name) is Sharing.SHARED)


SHAPES = [(1024, 1024), (832, 1216), (1216, 832), (1344, 768), (1536, 640), (1280, 720)]


def test_a_model_that_mixes_sizes_claims_those_of_about_as_many_pixels_together(make_job: Callable[..., Job]) -> None:
    """Each picture is padded to the longest of its forward: much smaller ones would cost as much as the largest."""
    mixed = {(width, height): make_job(width=width, height=height, mixed_fields=("size",)) for width, height in SHAPES}
    assert len({signature(job) for job in mixed.values()}) == 1
    others = [make_job(width=side, height=side, mixed_fields=("size",)) for side in (512, 768, 1440, 2048)]
    assert len({signature(job) for job in (*mixed.values(), *others)}) == 1 + len(others)
    assert {shape(job) for job in mixed.values()} == {"~1024x1024"}
    apart = {signature(make_job(width=width, height=height)) for width, height in SHAPES}
    assert len(apart) == len(SHAPES), "only where the model can"
    longer = make_job(width=1024, height=1024, frames=5, mixed_fields=("size",))
    assert signature(longer) != signature(mixed[1024, 1024])


@pytest.mark.parametrize("side", [16, 64, 100, 512, 720, 1024, 2048, 4096, 8192])
def test_sizes_of_one_class_differ_by_less_than_half(side: int) -> None:
    """What is learned of one holds for the others; and the class grows with the pixels."""
    pixels = side * side
    of_class = [height for height in range(1, 2 * side) if size_class(side, height) == size_class(side, side)]
    assert max(of_class) * side <= 1.42 * min(of_class) * side
    assert 0.84 * pixels < size_class(side, side) ** 2 < 1.2 * pixels
    classes = [size_class(side, height) for height in range(1, 2 * side)]
    assert classes == sorted(classes)


def test_an_unmarked_field_counts_as_shared() -> None:
    """A forgotten mark costs speed, never a wrong picture."""

    class Extended(Job):
        unmarked: int = 0
        marked: Annotated[int, PER_JOB] = 0

    marks = {name: field.metadata for name, field in Extended.model_fields.items()}
    assert not [mark for mark in marks["unmarked"] if isinstance(mark, Sharing)]
    assert PER_JOB in marks["marked"]


def test_the_signature_can_stand_in_a_key(make_job: Callable[..., Job]) -> None:
    """It holds no bar, which parts the names in a key, and tells an operator what waits."""
    made = signature(make_job(model="org/model-1.0", width=512, height=768))
    assert "|" not in made
    assert made.startswith("org/model-1.0:512x768x1:")
