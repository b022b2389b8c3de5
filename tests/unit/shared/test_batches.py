"""What is to be done next about a batch, what makes its file useless, and how its lines are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.protocols.openai.batch_lines import MAX_ERRORS, LineChecker
from shared.protocols.openai.batches import (
    GRACE_MS,
    MAX_LINES,
    MAX_OPEN_JOBS,
    Batch,
    BatchStatus,
    BatchStep,
    line_job_id,
    next_step,
)
from shared.protocols.openai.files import read_lines
from shared.runtime.clock import id_time_ms

NOW = 1_769_860_800_000
LATER = NOW + 86_400_000


def batch(**fields: Any) -> Batch:
    own = {
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
    return Batch(**{**own, **fields})


@pytest.mark.parametrize(
    ("fields", "now_ms", "step"),
    [
        ({}, NOW, BatchStep.VALIDATE),
        ({}, LATER, BatchStep.FINALIZE),  # never got to it
        ({"status": BatchStatus.IN_PROGRESS, "total": 9}, NOW, BatchStep.SUBMIT),
        ({"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 5, "accepted": 5}, NOW, BatchStep.SUBMIT),
        # The rest stays in its file until some of what is in line has ended.
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
        (
            {"status": BatchStatus.IN_PROGRESS, "total": 9, "read": 9, "accepted": 0},
            NOW,
            BatchStep.FINALIZE,
        ),  # all lines bad
        # Its window is over: nothing more is taken up, and what runs is waited for, but not for ever.
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
        ({"status": BatchStatus.CANCELLING}, NOW, BatchStep.WRITE),  # before it was validated
        ({"status": BatchStatus.CANCELLING, "total": 9, "read": 5, "accepted": 5}, NOW, BatchStep.CANCEL_JOBS),
        # A piece may have put lines in line that it could not note any more.
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
def test_the_next_step_follows_from_what_is_known(fields: dict[str, Any], now_ms: int, step: BatchStep) -> None:
    assert next_step(batch(**fields), now_ms) is step


def test_a_line_is_always_the_same_job() -> None:
    """Whose id sorts as the line does, tells the batch's time, and is that of no other batch's line."""
    made = [line_job_id(batch(), ordinal) for ordinal in range(1, MAX_LINES + 1, 997)]
    assert made == [line_job_id(batch(), ordinal) for ordinal in range(1, MAX_LINES + 1, 997)] == sorted(set(made))
    assert {id_time_ms(one) for one in made} == {NOW}
    assert not set(made) & {line_job_id(batch(id="batch_2"), ordinal) for ordinal in range(1, MAX_LINES + 1, 997)}


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("start", [0, 3, 9])
async def test_lines_are_the_same_however_they_come(size: int, start: int) -> None:
    """In pieces of any size, from any line on; one that is too long is told, and not held."""
    data = b"a\n\nbb \r\n" + b"x" * 20 + b"\nlast"

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(start, len(data), size):
            yield data[at : at + size]

    read = [(line.end, line.raw, line.blank) async for line in read_lines(pieces(), start, 10)]
    whole = [(2, b"a", False), (3, b"", True), (8, b"bb", False), (29, None, False), (33, b"last", False)]
    wanted = {0: whole, 3: whole[2:], 9: [(29, None, False), (33, b"last", False)]}[start]
    assert read == wanted


def test_the_first_errors_are_told_and_no_more() -> None:
    checker = LineChecker("/v1/jobs")
    good = {"custom_id": "a", "method": "POST", "url": "/v1/jobs", "body": {}}
    checker.check(1, json.dumps(good).encode())
    for number in range(2, 2 * MAX_ERRORS):
        checker.check(number, b"[]")
    assert checker.total == 2 * MAX_ERRORS - 1
    assert [error.line for error in checker.errors] == list(range(2, MAX_ERRORS + 2))
    assert {error.code for error in checker.errors} == {"invalid_json_line"}
