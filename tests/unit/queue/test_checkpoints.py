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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"images": [{"key": "a"}]}', '{"images": 3}'])
def test_a_checkpoint_that_cannot_be_read_is_none(text: str) -> None:
    """The job begins anew; another version can have written it."""
    assert JobCheckpoint.parsed(text) is None


def test_the_files_of_checkpoints_are_below_their_job_and_of_no_claim() -> None:
    assert IMAGE.key == "jobs/job_1/checkpoints/2-3-0.safetensors"
    assert IMAGE.key.startswith(checkpoint_prefix("job_1"))
