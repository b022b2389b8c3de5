"""Jobs as predictions, and what Replicate's bodies and headers mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from harness.http_server import ROOT
from replicate.prediction import Prediction

from api.compat.replicate.predictions import PredictionRequest, deadline_s, webhook_fields
from shared.config import models_file
from shared.errors import InvalidRequest
from shared.job import (
    NEWEST_JOB,
    Artifact,
    Failure,
    InputRef,
    Job,
    JobRecord,
    Progress,
    State,
    Task,
    Timings,
    Webhook,
    decode,
    encode,
    is_newer,
)
from shared.job_builder import Inputs, resolve
from shared.protocols.replicate.prediction_inputs import request_of
from shared.protocols.replicate.predictions import input_of, logs, prediction, webhook_body
from shared.webhooks import MAX_BODY_BYTES, TERMINAL_EVENTS

CATALOG = models_file.load(ROOT / "models.toml")
PICTURE = InputRef(id="in_" + 32 * "a", key="k", content_type="image/png", bytes=1, width=64, height=64)


def told(record: JobRecord, **more: Any) -> Prediction:
    """Return a prediction as the SDK reads it."""
    return Prediction(**prediction(record, "https://a.example", "v", **more))


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (State.QUEUED, "starting"),
        (State.RUNNING, "processing"),
        (State.SUCCEEDED, "succeeded"),
        (State.FAILED, "failed"),
        (State.CANCELED, "canceled"),
        (State.EXPIRED, "failed"),
    ],
)
def test_every_state_is_one_that_clients_know(make_job: Callable[..., Job], state: State, status: str) -> None:
    """What passed its deadline says so: without an error, clients would take it for nothing made."""
    found = told(JobRecord(job=make_job(), state=state), outputs=["u"])
    assert found.status == status
    assert found.output == (["u"] if status == "succeeded" else None)
    assert found.error == {"failed": "the job failed", "expired": "the deadline passed"}.get(state.value)


def test_a_prediction_tells_times_and_why(make_job: Callable[..., Job]) -> None:
    job = make_job(created_at_ms=1_000, task=Task.TEXT_TO_VIDEO)
    record = JobRecord(
        job=job,
        state=State.FAILED,
        started_at_ms=2_000,
        finished_at_ms=5_000,
        error=Failure(code="out_of_memory", message="it does not fit"),
    )
    failed = told(record)
    assert (failed.error, failed.metrics) == ("it does not fit", {"total_time": 4.0, "predict_time": 3.0})
    assert (failed.started_at, failed.completed_at) == ("1970-01-01T00:00:02.000Z", "1970-01-01T00:00:05.000Z")
    done = record.model_copy(update={"state": State.SUCCEEDED, "timings": Timings(inference_ms=2_500)})
    film = told(done, outputs=["https://a.example/film.mp4"])
    assert (film.output, film.metrics) == ("https://a.example/film.mp4", {"total_time": 4.0, "predict_time": 2.5})
    assert told(done, state=State.RUNNING).completed_at is None


@pytest.mark.parametrize(
    ("step", "total", "read"), [(0, 0, None), (0, 12, (0.0, 0, 12)), (6, 12, (0.5, 6, 12)), (12, 12, (1.0, 12, 12))]
)
def test_progress_is_read_from_the_logs(make_job: Callable[..., Job], step: int, total: int, read: Any) -> None:
    """By the pattern of the SDK, which finds it in the last line that looks like one of tqdm."""
    text = logs(make_job(seed=7), Progress(step=step, total=total))
    assert text.startswith("Using seed: 7\n")
    found = Prediction.Progress.parse(text)
    assert (found and (found.percentage, found.current, found.total)) == read


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "n": 3,
            "negative_prompt": "green",
            "scheduler": "DDIMScheduler",
            "output_format": "jpeg",
            "output_quality": 70,
        },
        {"task": Task.IMAGE_TO_IMAGE, "images": (PICTURE,), "strength": 0.4},
        {"task": Task.INPAINT, "images": (PICTURE,), "mask": PICTURE, "strength": 1.0},
    ],
)
def test_the_input_that_is_told_asks_for_the_same_again(make_job: Callable[..., Job], changes: dict[str, Any]) -> None:
    job = make_job(mixed_fields=CATALOG.get("demo").mixed_fields, **changes)
    request, _ = request_of(input_of(job), CATALOG.get("demo"), {})
    again = resolve(
        request,
        CATALOG.get("demo"),
        job.task,
        tenant=job.tenant,
        now_ms=job.created_at_ms,
        inputs=Inputs(images=job.images, mask=job.mask),
    )
    assert again.model_copy(update={"id": job.id}) == job


def test_a_webhook_tells_the_prediction_as_it_was(make_job: Callable[..., Job]) -> None:
    picture = Artifact(index=0, key="k", content_type="image/png", bytes=1, width=64, height=64, seed=7)
    record = JobRecord(job=make_job(), state=State.SUCCEEDED, artifacts=(picture,), finished_at_ms=9)
    began = json.loads(webhook_body(record, "v", "job.running", "https://a.example"))
    assert (began["status"], began["output"], began["completed_at"]) == ("processing", None, None)
    ended = json.loads(webhook_body(record, "v", "job.succeeded", "https://a.example"))
    url = f"https://a.example/v1/jobs/{record.job.id}/artifacts/0"
    assert (ended["status"], ended["output"], ended["version"]) == ("succeeded", [url], "v")
    assert ended["input"]["prompt"] == record.job.prompt


def test_a_webhooks_body_stays_small(make_job: Callable[..., Job]) -> None:
    failure = Failure(code="inference_failed", message=5_000 * "é")
    record = JobRecord(job=make_job(prompt=30_000 * "x"), state=State.FAILED, error=failure)
    body = webhook_body(record, "v", "job.failed", "https://a.example")
    assert len(body) <= MAX_BODY_BYTES
    assert (json.loads(body)["input"], len(json.loads(body)["error"])) == ({}, 1_000)


def test_a_job_of_ours_is_written_as_before(make_job: Callable[..., Job]) -> None:
    """A worker of the version before knows no `version` in a webhook: it is only there where a prediction needs it."""
    ours = make_job(webhook=Webhook(url="https://a.example", states=(State.FAILED,)))
    assert "version" not in json.loads(encode(ours))["webhook"]
    theirs = make_job(webhook=Webhook(url="https://a.example", states=(State.FAILED,), version="v"))
    assert [decode(encode(job)) for job in (ours, theirs)] == [ours, theirs]


def test_form_2_is_read_and_the_next_one_is_newer(make_job: Callable[..., Job]) -> None:
    """What cannot be read of a later form is given back, of a known one buried."""
    wire = json.loads(encode(make_job(schema_version=2)))
    assert decode(json.dumps(wire)).schema_version == NEWEST_JOB == 2
    assert [is_newer(json.dumps({**wire, "schema_version": form})) for form in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize(
    ("body", "events"),
    [
        ({}, None),
        ({"webhook": "u"}, ("job.running", *TERMINAL_EVENTS)),
        ({"webhook": "u", "webhook_events_filter": ["completed"]}, TERMINAL_EVENTS),
        ({"webhook": "u", "webhook_events_filter": ["start"]}, ("job.running",)),
        ({"webhook": "u", "webhook_events_filter": ["output"]}, ("job.succeeded",)),
        ({"webhook": "u", "webhook_events_filter": ["output", "completed"]}, ("job.succeeded", *TERMINAL_EVENTS[1:])),
        ({"webhook_completed": "u"}, TERMINAL_EVENTS),
    ],
)
def test_a_webhook_is_told_what_was_asked(body: dict[str, Any], events: Any) -> None:
    found = webhook_fields(PredictionRequest(**body))
    assert found == ({} if events is None else {"webhook": "u", "webhook_events": events})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"webhook": "u", "webhook_events_filter": ["completed", "logs"]}, "webhook_events_filter"),
        ({"webhook": "u", "webhook_completed": "u"}, "webhook_completed"),
        ({"webhook_events_filter": ["start"]}, "webhook_events_filter"),
        ({"webhook_completed": "u", "webhook_events_filter": ["start"]}, "webhook_events_filter"),
    ],
)
def test_a_webhook_that_cannot_be_told_so_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as fault:
        webhook_fields(PredictionRequest(**body))
    assert fault.value.param == param


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("90", 90), ("90s", 90), ("5m", 300), (" 1H30M ", 5_400), ("1h30m5s", 5_405), ("168h", 604_800)],
)
def test_a_time_to_give_up_at(header: str, seconds: float) -> None:
    assert deadline_s(header) == seconds


@pytest.mark.parametrize("header", ["", "soon", "0", "-5s", "169h", "5s5m", "1.5h", "m"])
def test_what_is_no_time_to_give_up_at(header: str) -> None:
    with pytest.raises(InvalidRequest) as fault:
        deadline_s(header)
    assert fault.value.param == "Cancel-After"
