"""The spans of a job, from the times that its worker noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.job import Job, Phase, State
from shared.job_record import BatchingStats, Failure, Outcome, Progress, Timings
from shared.queue import Claim
from shared.runtime.tracing import EndedSpan, TraceContext
from shared.signature import signature
from worker.metrics.job_trace import JobSpans, JobTimes, UploadTimes

MS = 1_000_000
BATCH = TraceContext(traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")
EPOCH_NS = 1_700_000_000_000 * MS


def claim_of(job: Job) -> Claim:
    return Claim(job, signature(job), epoch=2, must_run_solo=False, queued_ms=300)


def times(**changes: Any) -> JobTimes:
    usual: dict[str, Any] = {
        "claimed_ns": 1_000 * MS,
        "submitted_ns": 1_010 * MS,
        "decoding_ns": 1_800 * MS,
        "left_engine_ns": 2_000 * MS,
        "settling_ns": 2_100 * MS,
        "uploads": {0: UploadTimes(1_990 * MS, 2_020 * MS, 2_090 * MS)},
        "batch": BATCH,
    }
    return JobTimes(**usual | changes)


def outcome(**changes: Any) -> Outcome:
    usual: dict[str, Any] = {
        "state": State.SUCCEEDED,
        "batching": BatchingStats(
            forwards=6, mean_rows=2.5, max_jobs=3, skipped_steps=2, rows_by_forward=((1, 1), (3, 5))
        ),
        "timings": Timings(queue_ms=300, load_ms=90, inference_ms=900),
        "progress": Progress(step=8, total=8),
    }
    return Outcome(**usual | changes)


def spans_of(claim: Claim, noted: JobTimes, ended: Outcome | None, ended_as: str = "succeeded") -> EndedSpan:
    return JobSpans(claim, noted, ended, ended_as, "w1", ended_ns=2_110 * MS, offset_ns=EPOCH_NS).job()


def named(span: EndedSpan) -> Iterator[EndedSpan]:
    yield span
    for child in span.children:
        yield from named(child)


def shown(span: EndedSpan) -> dict[str, tuple[int, int]]:
    """Return the start and end of each span in ms, from the claim's clock."""
    return {each.name: ((each.start_ns - EPOCH_NS) // MS, (each.end_ns - EPOCH_NS) // MS) for each in named(span)}


def test_spans_cover_the_way_of_a_job(make_job: Callable[..., Job]) -> None:
    span = spans_of(claim_of(make_job()), times(), outcome())
    assert shown(span) == {
        "job": (700, 2_110),
        "queue": (700, 1_000),
        "claim": (1_000, 1_010),
        "slots": (1_010, 2_000),
        "load": (1_010, 1_100),
        "forwards": (1_100, 1_800),
        "decode": (1_800, 2_000),
        "upload": (1_990, 2_090),
        "encode": (1_990, 2_020),
        "settle": (2_100, 2_110),
    }
    assert [child.name for child in span.children] == ["queue", "claim", "slots", "upload", "settle"]


def test_forwards_have_their_figures_and_lead_to_the_batch(make_job: Callable[..., Job]) -> None:
    spans = {each.name: each for each in named(spans_of(claim_of(make_job()), times(), outcome()))}
    forwards = spans["forwards"]
    assert forwards.links == (BATCH,)
    assert forwards.attributes["fusequeue.steps.computed"] == 6
    assert forwards.attributes["fusequeue.steps.skipped"] == 2
    assert forwards.attributes["fusequeue.rows.mean"] == 2.5
    assert forwards.attributes["fusequeue.rows.by_forward"] == ["1 x 1", "3 x 5"]
    assert spans["job"].attributes["fusequeue.epoch"] == 2


def test_no_attribute_has_text_of_the_client(make_job: Callable[..., Job]) -> None:
    job = make_job(prompt="a secret", negative_prompt="another secret", metadata={"name": "a secret"})
    failure = Failure(code="decode_failed", message="a secret")
    for ended in (outcome(), outcome(state=State.FAILED, error=failure)):
        assert "secret" not in repr(spans_of(claim_of(job), times(), ended))


def test_a_failed_job_has_its_code_as_error(make_job: Callable[..., Job]) -> None:
    failed = outcome(state=State.FAILED, error=Failure(code="out_of_memory", message="no memory"))
    span = spans_of(claim_of(make_job()), times(), failed, "failed")
    assert (span.error, span.attributes["error.type"]) == ("out_of_memory", "out_of_memory")


@pytest.mark.parametrize("ended", [None, outcome(timings=Timings(queue_ms=300), batching=BatchingStats())])
def test_a_claim_that_ends_early_has_the_spans_that_it_reached(
    make_job: Callable[..., Job], ended: Outcome | None
) -> None:
    noted = JobTimes(claimed_ns=1_000 * MS)
    assert shown(spans_of(claim_of(make_job()), noted, ended, "released")) == {
        "job": (700, 2_110),
        "queue": (700, 1_000),
        "claim": (1_000, 2_110),
    }


def test_no_span_ends_before_its_start(make_job: Callable[..., Job]) -> None:
    """An engine's events can be handled late: its figures and the worker's clock differ."""
    late = times(decoding_ns=1_015 * MS, left_engine_ns=1_020 * MS, settling_ns=None)
    for span in named(spans_of(claim_of(make_job()), late, outcome())):
        assert span.start_ns <= span.end_ns, span.name


def test_the_first_decoded_image_ends_the_forwards() -> None:
    """Others of the job can have steps left: their progress is no new phase."""
    noted = JobTimes()
    for phase in (Phase.DENOISING, Phase.DECODING):
        noted.note_phase(phase)
    first = noted.decoding_ns
    for phase in (Phase.DENOISING, Phase.DECODING, Phase.UPLOADING):
        noted.note_phase(phase)
    assert noted.decoding_ns == first
    assert noted.left_engine_ns is not None
