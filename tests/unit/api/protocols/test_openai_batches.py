"""Next step of a batch, validation of its input file, and reading of its lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.protocols.openai.batches.batch_lines import MAX_ERRORS, LineChecker
from api.protocols.openai.batches.batch_steps import (
    GRACE_MS,
    MAX_LINES,
    MAX_OPEN_JOBS,
    BatchStep,
    line_job_id,
    next_step,
)
from api.protocols.openai.stored_files import read_lines
from shared.batch import Batch, BatchError, BatchStatus
from shared.runtime.clock import id_time_ms

NOW = 1_769_860_800_000
LATER = NOW + 86_400_000
LOST = BatchError(code="input_file_lost", message="no longer in storage")


def batch(**fields: Any) -> Batch:
    defaults = {
        "id": "batch_1",
        "tenant": "default",
        "endpoint": "/v1/jobs",
        "input_file_id": "file_1",
        "output_file_id": "file_2",
        "error_file_id": "file_3",
        "base_url": "http://localhost",
        "created_at_ms": NOW,
        "expires_at_ms": LATER,
    }
    return Batch(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("fields", "now_ms", "step"),
    [
        ({}, NOW, BatchStep.VALIDATE),
        ({}, LATER, BatchStep.FINALIZE),  # expired before its validation
        ({"status": BatchStatus.IN_PROGRESS, "total": 9}, NOW, BatchStep.SUBMIT),
        ({"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 5, "accepted": 5}, NOW, BatchStep.SUBMIT),
        # Given up: jobs of a step that was never committed are canceled, the others end, and what they made is written.
        ({"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 5, "errors": [LOST]}, NOW, BatchStep.CANCEL_JOBS),
        ({"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 5, "errors": [LOST]}, LATER, BatchStep.CANCEL_JOBS),
        (
            {"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 5, "accepted": 5, "canceled": 9, "errors": [LOST]},
            NOW,
            BatchStep.WAIT,
        ),
        (
            {"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 5, "canceled": 9, "errors": [LOST]},
            NOW,
            BatchStep.FINALIZE,
        ),
        # Further lines stay in the file until open jobs have ended.
        (
            {"status": BatchStatus.IN_PROGRESS, "total": 9_999, "read": MAX_OPEN_JOBS, "accepted": MAX_OPEN_JOBS},
            NOW,
            BatchStep.WAIT,
        ),
        ({"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 9, "accepted": 8, "ended": 7}, NOW, BatchStep.WAIT),
        (
            {"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 9, "accepted": 8, "ended": 8},
            NOW,
            BatchStep.FINALIZE,
        ),
        # All lines were rejected.
        ({"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 9, "accepted": 0}, NOW, BatchStep.FINALIZE),
        # After its window no line is submitted, and running jobs are waited for until the grace period ends.
        ({"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 5, "accepted": 5}, LATER, BatchStep.WAIT),
        (
            {"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 5, "accepted": 5, "ended": 5},
            LATER,
            BatchStep.FINALIZE,
        ),
        (
            {"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 5, "accepted": 5},
            LATER + GRACE_MS,
            BatchStep.FINALIZE,
        ),
        ({"status": BatchStatus.FINALIZING, "total": 9, "read": 9, "accepted": 9}, NOW, BatchStep.WRITE),
        ({"status": BatchStatus.CANCELLING}, NOW, BatchStep.WRITE),  # before its validation
        ({"status": BatchStatus.CANCELLING, "total": 9, "read": 5, "accepted": 5}, NOW, BatchStep.CANCEL_JOBS),
        # The last chunk may be submitted without being committed.
        (
            {"status": BatchStatus.CANCELLING, "total": 9, "read": 5, "accepted": 5, "canceled": 5},
            NOW,
            BatchStep.CANCEL_JOBS,
        ),
        ({"status": BatchStatus.CANCELLING, "total": 9, "read": 5, "accepted": 5, "canceled": 9}, NOW, BatchStep.WAIT),
        (
            {"status": BatchStatus.CANCELLING, "total": 9, "read": 5, "accepted": 5, "ended": 5, "canceled": 9},
            NOW,
            BatchStep.WRITE,
        ),
        ({"status": BatchStatus.COMPLETED}, LATER, BatchStep.DONE),
        ({"status": BatchStatus.FAILED}, NOW, BatchStep.DONE),
    ],
)
def test_the_next_step_depends_on_status_counts_and_time(fields: dict[str, Any], now_ms: int, step: BatchStep) -> None:
    assert next_step(batch(**fields), now_ms) is step


def test_the_job_id_of_a_line_is_deterministic() -> None:
    """Ids sort like lines, contain the time of the batch, and differ between batches."""
    ids = [line_job_id(batch(), ordinal) for ordinal in range(1, MAX_LINES + 1, 997)]
    assert ids == [line_job_id(batch(), ordinal) for ordinal in range(1, MAX_LINES + 1, 997)] == sorted(set(ids))
    assert {id_time_ms(job_id) for job_id in ids} == {NOW}
    assert not set(ids) & {line_job_id(batch(id="batch_2"), ordinal) for ordinal in range(1, MAX_LINES + 1, 997)}


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("start", [0, 3, 9])
async def test_lines_do_not_depend_on_the_chunks(size: int, start: int) -> None:
    """In chunks of any size, from any line; a line that is too long is reported and not buffered."""
    data = b"a\n\nbb \r\n" + b"x" * 20 + b"\nlast"

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(start, len(data), size):
            yield data[at : at + size]

    read = [(line.end, line.raw, line.blank) async for line in read_lines(chunks(), start, 10)]
    lines = [(2, b"a", False), (3, b"", True), (8, b"bb", False), (29, None, False), (33, b"last", False)]
    expected = {0: lines, 3: lines[2:], 9: [(29, None, False), (33, b"last", False)]}[start]
    assert read == expected


def test_the_number_of_reported_errors_is_bounded() -> None:
    checker = LineChecker("/v1/jobs")
    valid = {"custom_id": "a", "method": "POST", "url": "/v1/jobs", "body": {}}
    checker.check(1, json.dumps(valid).encode())
    for number in range(2, 2 * MAX_ERRORS):
        checker.check(number, b"[]")
    assert checker.total == 2 * MAX_ERRORS - 1
    assert [error.line for error in checker.errors] == list(range(2, MAX_ERRORS + 2))
    assert {error.code for error in checker.errors} == {"invalid_json_line"}
