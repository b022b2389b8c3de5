"""What a record says of a checkpoint."""

from __future__ import annotations

import pytest

from shared.queue.checkpoints import JobCheckpoint, StoredImage, checkpoint_key, checkpoint_prefix

IMAGE = StoredImage(key=checkpoint_key("job_1", 2, 3, 0), bytes=10, sha256="ab", step=7)
CHECKPOINT = JobCheckpoint(images=(IMAGE, None, IMAGE))


def test_a_checkpoint_is_read_as_it_was_written() -> None:
    assert JobCheckpoint.parsed(CHECKPOINT.wire()) == CHECKPOINT
    assert (CHECKPOINT.step, CHECKPOINT.bytes) == (14, 20)
    assert CHECKPOINT.size() == f"0,{len(CHECKPOINT.wire())},2,20"


def image_at(step: int, total: int) -> StoredImage:
    return IMAGE.model_copy(update={"step": step, "total": total})


@pytest.mark.parametrize(
    ("images", "left"),
    [
        ((), 1.0),
        ((image_at(5, 20),), 0.75),
        ((image_at(5, 20), image_at(15, 20)), 0.75),  # they run together: the one with most counts
        ((image_at(15, 20), None), 1.0),  # it begins anew
        ((image_at(20, 20),), 0.05),  # its decode is left
        ((image_at(2, 2), image_at(15, 20)), 0.25),  # the first is a candidate that was dropped
        ((image_at(2, 2), image_at(20, 20)), 0.05),
        ((IMAGE,), 1.0),  # an earlier version wrote no total
    ],
)
def test_what_is_left_is_that_of_the_image_with_most_steps(images: tuple[StoredImage | None, ...], left: float) -> None:
    assert JobCheckpoint(images=images).left == left


@pytest.mark.parametrize("text", ["", "{", "[]", '{"images": [{"key": "a"}]}', '{"images": 3}'])
def test_a_checkpoint_that_cannot_be_read_is_none(text: str) -> None:
    """The job begins anew; another version can have written it."""
    assert JobCheckpoint.parsed(text) is None


def test_the_files_of_checkpoints_are_below_their_job_and_of_no_claim() -> None:
    assert IMAGE.key == "jobs/job_1/checkpoints/2-3-0.safetensors"
    assert IMAGE.key.startswith(checkpoint_prefix("job_1"))
