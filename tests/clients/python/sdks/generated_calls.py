"""A client that openapi-python-client makes from `/openapi.json`."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import checks
from checks import KEY, MODEL, PROMPT, URL, VIDEO_MODEL, call, check_image, check_video, same

FILES = ("image/png", "image/jpeg", "image/webp", "image/*", "video/mp4", "application/safetensors", "application/zip")
SETTINGS = {
    "content_type_overrides": {**dict.fromkeys(FILES, "application/octet-stream"), "application/jsonl": "text/plain"},
    "post_hooks": [],
}


def operation(name: str) -> Any:
    return importlib.import_module(f"generated.api.jobs.{name}")


def client() -> Any:
    made = importlib.import_module("generated.client").AuthenticatedClient(base_url=URL, token=KEY)
    return made.with_timeout(importlib.import_module("httpx").Timeout(60))


@call("openapi-python-client generate")
def generate() -> None:
    with urllib.request.urlopen(f"{URL}/openapi.json", timeout=30) as response:
        Path("openapi.json").write_bytes(response.read())
    Path("config.json").write_text(json.dumps(SETTINGS))
    options = ["--path", "openapi.json", "--output-path", "generated", "--meta", "none", "--config", "config.json"]
    command = ["openapi-python-client", "generate", *options]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    # The generator knows no NDJSON.
    same(re.findall(r"(?:GET|POST|PATCH|DELETE) \S+", made.stdout + made.stderr), ["POST /v1/jobs:bulk"])
    sys.path.insert(0, str(Path.cwd()))
    importlib.import_module("generated.models")


def finished(**fields: Any) -> Any:
    """Submit a job, wait until it has ended, and return it."""
    models = importlib.import_module("generated.models")
    submitted = operation("submit_job").sync(client=client(), body=models.JobRequest(**fields))
    ended = operation("get_job").sync(submitted.id, client=client(), wait=30.0)
    same((ended.id, ended.status), (submitted.id, "succeeded"))
    return ended


def download(job: Any) -> bytes:
    artifact = operation("get_artifact").sync(job.id, job.artifacts[0].index, client=client())
    return bytes(artifact.payload.read())


@call("submit_job, get_job, get_artifact: an image, a video")
def image_and_video() -> None:
    check_image(download(finished(model=MODEL, prompt=PROMPT, seed=7)))
    check_video(download(finished(model=VIDEO_MODEL, prompt="a wave")))


@call("list_jobs, cancel_job, delete_job")
def others() -> None:
    job = finished(model=MODEL, prompt=PROMPT)
    assert job.id in [entry.id for entry in operation("list_jobs").sync(client=client()).data]
    same(operation("cancel_job").sync(job.id, client=client()).status, "succeeded")
    assert operation("delete_job").sync_detailed(job.id, client=client()).status_code in (200, 204)


@call("errors: a problem that names the field")
def errors() -> None:
    models = importlib.import_module("generated.models")
    body = models.JobRequest(model=MODEL, prompt=PROMPT, steps=1_000)
    problem = operation("submit_job").sync(client=client(), body=body)
    same([fault.param for fault in problem.errors], ["steps"])


checks.main()
