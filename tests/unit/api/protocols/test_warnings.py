"""Warnings of a job in the responses of each protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from harness.engine import a_job
from harness.http_server import BODY, serving, working

from api.protocols.openai.video_requests import video_object
from fusequeue import Job
from shared.job import State
from shared.job_record import FieldWarning, JobRecord
from shared.queue import Queue

WARNING = FieldWarning(param="mask", message="mask: repaints nothing")


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A service whose every job ends with a warning."""
    async with serving(fake_queue, tmp_path) as client, working(fake_queue, tmp_path, warnings=(WARNING,)):
        yield client


async def ended_job(api: httpx.AsyncClient, job_id: str) -> httpx.Response:
    async with asyncio.timeout(60):
        while (response := await api.get(f"/v1/jobs/{job_id}")).json()["status"] != "succeeded":
            await asyncio.sleep(0.01)
    return response


async def test_the_warnings_of_a_job_are_in_the_responses_of_every_protocol(api: httpx.AsyncClient) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    native = await ended_job(api, job_id)
    assert native.json()["warnings"] == [WARNING.model_dump()]
    assert Job.model_validate_json(native.content).warnings[0].message == WARNING.message

    images = (await api.post("/v1/images/generations", json={**BODY, "flow_shift": 3})).json()
    assert [warning["param"] for warning in images["warnings"]] == ["flow_shift", "mask"]
    stream = await api.post("/v1/images/generations", json={**BODY, "stream": True})
    assert WARNING.message in stream.text

    prediction = (await api.get(f"/compat/replicate/v1/predictions/{job_id}")).json()
    assert WARNING.message in prediction["logs"]
    assert WARNING.message in (await api.get(f"/compat/replicate/v1/predictions/{job_id}/stream")).text

    status = (await api.get(f"/compat/fal/fusequeue/demo/requests/{job_id}/status?logs=1")).json()
    assert status["logs"][-1]["message"] == f"Warning: {WARNING.message}"

    image = await api.post("/compat/huggingface/demo", json={"inputs": BODY["prompt"]})
    assert image.headers["x-warning"] == WARNING.message


def test_the_warnings_of_a_video_are_in_its_object() -> None:
    record = JobRecord(job=a_job("clip", frames=9, fps=24), state=State.SUCCEEDED, warnings=(WARNING,))
    assert video_object(record)["warnings"] == [WARNING.model_dump()]
