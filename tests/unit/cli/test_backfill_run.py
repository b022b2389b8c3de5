"""A backfill against a service that refuses lines, and artifacts that cannot be read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from harness.backfill import ARTIFACT, FakeService, resume, rows, run
from harness.canned import JOB

from cli.backfill.ledger import EntryState, Ledger
from cli.backfill.pipeline import (
    CHUNK_LINES,
    DOWNLOADS,
    EveryLineRefused,
    lines_to_submit,
    made_with,
)
from fusequeue import Busy, Job, Unauthorized

NOT_FETCHED = {"code": "url_not_fetched", "message": "image: cannot reach a.test", "status": 422}
QUOTA = {"code": "quota_exceeded", "message": "the tenant keeps 9 jobs", "status": 429, "retry_after_s": 0}

pytestmark = pytest.mark.usefixtures("no_pauses")


async def test_a_line_whose_image_cannot_be_fetched_fails_after_its_attempts(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    """More of them than a request has lines keep none of the later lines waiting."""
    service.refused = {f"p{number}": (NOT_FETCHED, 100) for number in range(300)}
    await run(service, ledger, tmp_path, 310, attempts=2)
    assert (ledger.counts()[EntryState.DONE], ledger.counts()[EntryState.FAILED]) == (10, 300)
    assert Counter(service.prompts) == {f"p{number}": 2 if number < 300 else 1 for number in range(310)}
    assert service.prompts.index("p309") < len(service.prompts) - 300, "before the second attempts"
    assert rows(ledger, tmp_path)["p7"]["error"] == "image: cannot reach a.test (url_not_fetched)"


async def test_a_line_is_submitted_again_after_a_refusal_that_ends(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    service.refused = {"p1": (NOT_FETCHED, 1), "p2": (NOT_FETCHED, 1)}
    await run(service, ledger, tmp_path, 4, attempts=2)
    assert ledger.counts()[EntryState.DONE] == 4
    assert {row["error"] for row in rows(ledger, tmp_path).values()} == {None}


async def test_delays_count_from_the_start_of_the_backfill_also_when_it_is_continued(
    service: FakeService, tmp_path: Path
) -> None:
    """So a line that is sent again is the same request, and lines that are sent after others wait no longer."""
    bodies = [{"prompt": f"p{number}", "not_before": 600} for number in range(3)]
    bodies += [{"prompt": "at", "not_before": "2099-01-31T22:00:00Z"}, {"prompt": "odd", "not_before": "soon"}]
    before = datetime.now(UTC)
    with closing(Ledger(tmp_path)) as ledger:
        ledger.begin(enumerate(bodies))
    after = datetime.now(UTC)
    with closing(Ledger(tmp_path)) as ledger:
        ledger.begin(enumerate(bodies))
        await resume(service, ledger, tmp_path, in_flight=1)
    (start,) = {service.bodies[f"p{number}"]["not_before"] for number in range(3)}
    began = datetime.fromisoformat(start) - timedelta(minutes=10)
    assert before - timedelta(milliseconds=1) <= began <= after
    assert [service.bodies[prompt]["not_before"] for prompt in ("at", "odd")] == ["2099-01-31T22:00:00Z", "soon"]


async def test_a_full_service_counts_no_attempt_and_is_reported(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    service.refused = {"p1": (QUOTA, 5)}
    refusals = await run(service, ledger, tmp_path, 3, attempts=1)
    assert [(one.code, one.message) for one in refusals] == [("quota_exceeded", QUOTA["message"])] * 5
    assert ledger.counts()[EntryState.DONE] == 3


@pytest.mark.parametrize("limited", ["/v1/jobs:bulk", "/v1/jobs", "/artifacts/p1"])
async def test_a_limited_rate_is_waited_for(service: FakeService, ledger: Ledger, tmp_path: Path, limited: str) -> None:
    """Whichever request it refuses; no attempt of a line is counted."""
    service.limited = Counter({limited: 3})
    refusals = await run(service, ledger, tmp_path, 3, attempts=1)
    assert [(one.code, one.message) for one in refusals] == [("rate_limited", "too many requests")] * 3
    assert ledger.counts()[EntryState.DONE] == 3


async def test_a_fault_of_every_line_ends_the_run_before_any_is_recorded(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    wrong = {"code": "invalid_request", "message": "colour: there is no such field", "param": "colour", "status": 422}
    service.refused = {f"p{number}": (wrong, -1) for number in range(3)}
    with pytest.raises(EveryLineRefused, match=r"colour: there is no such field \(invalid_request\)"):
        await run(service, ledger, tmp_path, 3)
    assert ledger.counts()[EntryState.NEW] == 3
    del service.refused["p2"]
    await run(service, ledger, tmp_path, 3)
    assert (ledger.counts()[EntryState.DONE], ledger.counts()[EntryState.FAILED]) == (1, 2)


PRIVATE = {"code": "invalid_request", "message": "seed: at most 9", "param": "seed", "status": 422}


async def test_a_fault_of_the_first_lines_only_does_not_keep_the_others(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    """More than a request has lines: their seeds differ from the one of the last line."""
    count = CHUNK_LINES + 1
    service.refused = {f"p{number}": (PRIVATE, -1) for number in range(count - 1)}
    ledger.begin((number, {"prompt": f"p{number}", "seed": number}) for number in range(count))
    await resume(service, ledger, tmp_path)
    assert (ledger.counts()[EntryState.DONE], ledger.counts()[EntryState.FAILED]) == (1, count - 1)


@pytest.mark.parametrize(("common", "code"), [({"seed": 99}, "seed"), ({"colour": 1}, "colour")])
async def test_a_fault_that_all_lines_have_in_common_ends_the_run(
    service: FakeService, ledger: Ledger, tmp_path: Path, common: dict[str, int], code: str
) -> None:
    count = CHUNK_LINES + 1
    service.refused = {f"p{number}": ({**PRIVATE, "param": code}, -1) for number in range(count)}
    ledger.begin((number, {"prompt": f"p{number}", **common}) for number in range(count))
    with pytest.raises(EveryLineRefused, match=f"the first {CHUNK_LINES} of {count} lines are refused: seed: at most"):
        await resume(service, ledger, tmp_path)
    assert ledger.counts()[EntryState.NEW] == count


async def test_no_line_runs_twice_after_a_kill_and_a_correction(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    """The service has accepted the lines, and the process ended before it was recorded."""
    ledger.begin((number, {"prompt": f"p{number}"}) for number in range(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "submitted", lambda _: (_ for _ in ()).throw(KeyError("killed")))
        with pytest.raises(KeyError, match="killed"):
            await resume(service, ledger, tmp_path)
    assert (len(service.jobs), ledger.counts()[EntryState.NEW]) == (4, 4)
    corrected = ["new", "p0", "p1", "another", "p3"]
    ledger.begin((number, {"prompt": prompt}) for number, prompt in enumerate(corrected))
    await resume(service, ledger, tmp_path)
    assert ledger.counts()[EntryState.DONE] == 5
    made = Counter(job["prompt"] for job in service.jobs.values())
    assert made == dict.fromkeys(("p0", "p1", "p2", "p3", "new", "another"), 1)


async def test_the_manifest_says_what_an_image_was_made_with(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    cache = {"every": 2, "first": 3, "last": 1, "order": "linear", "of": "residual"}
    service.chosen = {"refiner_start": 0.8, "layers": 3, "step_cache": cache, "scheduler_options": {"karras": True}}
    await run(service, ledger, tmp_path, 1)
    made = rows(ledger, tmp_path)["p0"]["made"]
    assert (made["refiner_start"], made["layers"]) == (0.8, 3)
    assert made["step_cache"]["every"] == 2
    assert made["scheduler_options"]["karras"] is True
    assert (made["model"], made["seed"], made["width"], made["steps"]) == tuple(
        JOB[name] for name in ("model", "seed", "width", "steps")
    )
    assert "device_seconds" in made


def test_a_manifest_has_no_fields_that_the_model_would_refuse() -> None:
    """With those of the line they are a request for the same."""
    image = Job.model_validate({**JOB, "frames": 1, "layers": 0})
    assert not {"frames", "layers", "duration_s"} & made_with(image).keys()
    sound = Job.model_validate({**JOB, "duration_s": 2.0, "artifacts": [{**ARTIFACT, "url": "/a", "kind": "audio"}]})
    assert made_with(sound)["duration_s"] == 2.0
    assert not {"width", "height"} & made_with(sound).keys()


async def test_lines_are_submitted_while_images_are_downloaded_and_bounded(
    service: FakeService, ledger: Ledger, tmp_path: Path, eventually: Callable[..., Awaitable[None]]
) -> None:
    """As many results as jobs in flight wait to be saved, so that a slow download bounds the client's memory."""
    service.sends_images.clear()
    running = asyncio.create_task(run(service, ledger, tmp_path, 40, in_flight=3))
    bound = 3 + 3 + DOWNLOADS
    await eventually(lambda: len(service.jobs) == bound or running.done(), "lines are submitted")
    service.sends_images.set()
    await running
    assert ledger.counts()[EntryState.DONE] == 40
    assert service.most_unsaved == bound


@pytest.mark.parametrize(
    ("in_flight", "limit", "lines"),
    [
        (0, 1_000, CHUNK_LINES),
        (750, 1_000, CHUNK_LINES),
        (751, 1_000, 0),
        (0, 12, 12),
        (9, 12, 3),  # without waiting for all of them
        (10, 12, 0),
        (0, 1, 1),
        (1, 1, 0),
        (30, 12, 0),  # resumed with a smaller limit
    ],
)
def test_lines_are_submitted_when_a_part_of_the_limit_is_free(in_flight: int, limit: int, lines: int) -> None:
    assert lines_to_submit(in_flight, limit) == lines


@pytest.mark.parametrize("status", [403, 404, 500])
async def test_an_image_that_cannot_be_read_fails_its_line_only(
    service: FakeService, ledger: Ledger, tmp_path: Path, status: int
) -> None:
    service.unreadable = {"p1": status}
    await run(service, ledger, tmp_path, 3)
    assert (ledger.counts()[EntryState.DONE], ledger.counts()[EntryState.FAILED]) == (2, 1)
    row = rows(ledger, tmp_path)["p1"]
    assert (row["state"], row["files"]) == ("failed", [])
    assert row["error"] == "its image cannot be read: gone (not_found)"


@pytest.mark.parametrize(("status", "error"), [(401, Unauthorized), (503, Busy)])
async def test_a_refusal_that_is_no_fault_of_the_line_ends_the_run(
    service: FakeService, ledger: Ledger, tmp_path: Path, status: int, error: type[Exception]
) -> None:
    """The line is saved by the next run."""
    service.unreadable = {"p1": status}
    with pytest.raises(error):
        await run(service, ledger, tmp_path, 2)
    assert ledger.counts()[EntryState.FAILED] == 0
    service.unreadable = {}
    await run(service, ledger, tmp_path, 2)
    assert ledger.counts()[EntryState.DONE] == 2


async def test_the_manifest_has_the_indexes_of_flagged_images(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    service.flagged = "p1"
    await run(service, ledger, tmp_path, 3)
    assert {prompt: row["flagged"] for prompt, row in rows(ledger, tmp_path).items()} == {"p0": [], "p1": [0], "p2": []}
    assert ledger.flagged() == 1


def test_a_failure_of_an_earlier_job_changes_nothing(ledger: Ledger) -> None:
    ledger.begin([(1, {"prompt": "a"})])
    ledger.submitted([(1, "job_1", None)])
    (entry,) = ledger.entries(EntryState.SUBMITTED, 1)
    ledger.submitted([(1, "job_2", None)])
    ledger.failed([(entry, "lost", False)])
    assert [one.job for one in ledger.entries(EntryState.SUBMITTED, 1)] == ["job_2"]
