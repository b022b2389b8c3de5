"""Jobs as predictions, and Replicate's request bodies and headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from harness.http_server import ROOT
from replicate.prediction import Prediction

from api.jobs.job_builder import with_inputs
from api.jobs.request_images import Inputs
from api.jobs.resolve import resolve_for_model
from api.protocols.job_logs import logs
from api.protocols.replicate.prediction_inputs import parse_input
from api.protocols.replicate.prediction_routes import PredictionRequest, deadline_s, webhook_fields
from api.protocols.replicate.predictions import input_of, prediction, webhook_body
from api.webhook_messages import MAX_BODY_BYTES
from shared.config import models_file
from shared.errors import InvalidRequest
from shared.job import JOB_FORM, InputRef, Job, State, Webhook, decode, encode, is_newer
from shared.job_record import Artifact, Failure, JobRecord, Progress, Timings
from shared.tasks import Task
from shared.webhooks import TERMINAL_EVENTS

CATALOG = models_file.load(ROOT / "models.toml")
IMAGE = InputRef(id="in_" + 32 * "a", key="k", content_type="image/png", bytes=1, width=64, height=64)


def parsed(record: JobRecord, **options: Any) -> Prediction:
    """Return a prediction as the SDK reads it."""
    return Prediction(**prediction(record, "https://a.example", "v", **options))


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
def test_every_state_maps_to_a_status_known_to_clients(make_job: Callable[..., Job], state: State, status: str) -> None:
    """An expired job has an error; without one, clients would treat it as an empty result."""
    result = parsed(JobRecord(job=make_job(), state=state), outputs=["u"])
    assert result.status == status
    assert result.output == (["u"] if status == "succeeded" else None)
    assert result.error == {"failed": "the job failed", "expired": "the deadline passed"}.get(state.value)


def test_a_prediction_has_times_and_the_error(make_job: Callable[..., Job]) -> None:
    job = make_job(created_at_ms=1_000, task=Task.TEXT_TO_VIDEO)
    record = JobRecord(
        job=job,
        state=State.FAILED,
        started_at_ms=2_000,
        finished_at_ms=5_000,
        error=Failure(code="out_of_memory", message="out of memory"),
    )
    failed = parsed(record)
    assert (failed.error, failed.metrics) == ("out of memory", {"total_time": 4.0, "predict_time": 3.0})
    assert (failed.started_at, failed.completed_at) == ("1970-01-01T00:00:02.000Z", "1970-01-01T00:00:05.000Z")
    done = record.model_copy(update={"state": State.SUCCEEDED, "timings": Timings(inference_ms=2_500)})
    video = parsed(done, outputs=["https://a.example/film.mp4"])
    assert (video.output, video.metrics) == ("https://a.example/film.mp4", {"total_time": 4.0, "predict_time": 2.5})
    assert parsed(done, state=State.RUNNING).completed_at is None


@pytest.mark.parametrize(
    ("step", "total", "read"), [(0, 0, None), (0, 12, (0.0, 0, 12)), (6, 12, (0.5, 6, 12)), (12, 12, (1.0, 12, 12))]
)
def test_progress_is_read_from_the_logs(make_job: Callable[..., Job], step: int, total: int, read: Any) -> None:
    """The SDK matches the last line in the format of tqdm."""
    text = logs(JobRecord(job=make_job(seed=7), state=State.RUNNING), Progress(step=step, total=total))
    assert text.startswith("Using seed: 7\n")
    progress = Prediction.Progress.parse(text)
    assert (progress and (progress.percentage, progress.current, progress.total)) == read


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
        {"task": Task.IMAGE_TO_IMAGE, "images": (IMAGE,), "strength": 0.4},
        {"task": Task.INPAINT, "images": (IMAGE,), "mask": IMAGE, "strength": 1.0},
    ],
)
def test_the_input_of_a_prediction_describes_an_equal_job(
    make_job: Callable[..., Job], changes: dict[str, Any]
) -> None:
    job = make_job(mixed_fields=CATALOG.get("demo").mixed_fields, **changes)
    spec = CATALOG.get("demo")
    request, _ = parse_input(input_of(job), spec, {})
    resolved = resolve_for_model(request, spec, job.tenant, job.created_at_ms)
    rebuilt = with_inputs(resolved, request, spec, Inputs(images=job.images, mask=job.mask))
    assert rebuilt.model_copy(update={"id": job.id}) == job


def test_a_webhook_contains_the_prediction_at_its_event(make_job: Callable[..., Job]) -> None:
    image = Artifact(index=0, key="k", content_type="image/png", bytes=1, width=64, height=64, seed=7)
    record = JobRecord(job=make_job(), state=State.SUCCEEDED, artifacts=(image,), finished_at_ms=9)
    running = json.loads(webhook_body(record, "v", "job.running", "https://a.example"))
    assert (running["status"], running["output"], running["completed_at"]) == ("processing", None, None)
    ended = json.loads(webhook_body(record, "v", "job.succeeded", "https://a.example"))
    url = f"https://a.example/v1/jobs/{record.job.id}/artifacts/0"
    assert (ended["status"], ended["output"], ended["version"]) == ("succeeded", [url], "v")
    assert ended["input"]["prompt"] == record.job.prompt


def test_a_webhook_body_is_bounded(make_job: Callable[..., Job]) -> None:
    failure = Failure(code="inference_failed", message=5_000 * "é")
    record = JobRecord(job=make_job(prompt=30_000 * "x"), state=State.FAILED, error=failure)
    body = webhook_body(record, "v", "job.failed", "https://a.example")
    assert len(body) <= MAX_BODY_BYTES
    assert (json.loads(body)["input"], len(json.loads(body)["error"])) == ({}, 1_000)


def test_a_job_without_prediction_webhook_keeps_its_wire_format(make_job: Callable[..., Job]) -> None:
    """Workers of the previous version do not know `version`: it is written only for predictions."""
    native = make_job(webhook=Webhook(url="https://a.example", states=(State.FAILED,)))
    assert "version" not in json.loads(encode(native))["webhook"]
    replicate = make_job(webhook=Webhook(url="https://a.example", states=(State.FAILED,), version="v"))
    assert [decode(encode(job)) for job in (native, replicate)] == [native, replicate]


def test_schema_2_is_read_and_schema_3_is_newer(make_job: Callable[..., Job]) -> None:
    """An unreadable job of a newer schema is released; one of a known schema becomes a dead letter."""
    wire = json.loads(encode(make_job()))
    assert decode(json.dumps(wire)).schema_version == JOB_FORM == 3
    assert [is_newer(json.dumps({**wire, "schema_version": version})) for version in (2, 3, 4)] == [False, False, True]


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
def test_the_events_filter_selects_webhook_events(body: dict[str, Any], events: Any) -> None:
    fields = webhook_fields(PredictionRequest(**body))
    assert fields == ({} if events is None else {"webhook": "u", "webhook_events": events})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"webhook": "u", "webhook_events_filter": ["completed", "logs"]}, "webhook_events_filter"),
        ({"webhook": "u", "webhook_completed": "u"}, "webhook_completed"),
        ({"webhook_events_filter": ["start"]}, "webhook_events_filter"),
        ({"webhook_completed": "u", "webhook_events_filter": ["start"]}, "webhook_events_filter"),
    ],
)
def test_an_unsupported_webhook_request_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        webhook_fields(PredictionRequest(**body))
    assert error.value.param == param


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("90", 90), ("90s", 90), ("5m", 300), (" 1H30M ", 5_400), ("1h30m5s", 5_405), ("168h", 604_800)],
)
def test_cancel_after_is_parsed(header: str, seconds: float) -> None:
    assert deadline_s(header) == seconds


@pytest.mark.parametrize("header", ["", "soon", "0", "-5s", "169h", "5s5m", "1.5h", "m"])
def test_an_invalid_cancel_after_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        deadline_s(header)
    assert error.value.param == "Cancel-After"
