"""What `fusequeue batches` shows of a batch."""

from __future__ import annotations

from typing import Any

import pytest

from cli.batches import COLUMNS, batch_row
from fusequeue import Batch

RUNNING = {"status": "in_progress", "in_progress_at": 1000}


@pytest.mark.parametrize(
    ("fields", "completed", "failed", "ended", "left"),
    [
        (RUNNING, 20, 5, "25 of 100", "0:05:00"),
        (RUNNING, 0, 50, "50 of 100", "0:01:40"),
        (RUNNING, 0, 0, "0 of 100", ""),
        (RUNNING | {"in_progress_at": 1200}, 50, 0, "50 of 100", "0:00:00"),  # the service's clock is ahead
        ({"status": "validating"}, 0, 0, "0 of 100", ""),
        (RUNNING | {"status": "completed"}, 100, 0, "100 of 100", ""),
        (RUNNING | {"status": "cancelling"}, 50, 0, "50 of 100", ""),
    ],
)
def test_a_batch_is_one_row(fields: dict[str, Any], completed: int, failed: int, ended: str, left: str) -> None:
    counts = {"total": 100, "completed": completed, "failed": failed}
    known = {"id": "batch_1", "endpoint": "/v1/jobs", "input_file_id": "file_1", "created_at": 900}
    batch = Batch(**known, **fields, request_counts=counts)
    row = dict(zip(COLUMNS, batch_row(batch, 1100.0), strict=True))
    assert (row["id"], row["status"], row["created"]) == ("batch_1", fields["status"], "1970-01-01 00:15:00")
    assert (row["ended"], row["failed"], row["time left"]) == (ended, failed, left)
