"""`fusequeue submit` when the service is lost, or the job fails, after the submit: the output names the job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from click.testing import Result
from harness import canned
from typer.testing import CliRunner

from cli.main import app

ARTIFACT = {"index": 0, "url": "/a.png", "content_type": "image/png", "bytes": 3, "width": 64, "height": 64, "seed": 1}
JOB = {**canned.JOB, "prompt": "a red circle", "artifacts": [ARTIFACT]}
FAILED = {**JOB, "status": "failed", "artifacts": [], "error": {"code": "inference_failed", "message": "no memory"}}


@pytest.fixture
def ended() -> dict[str, Any]:
    """The job at the end of its event stream; none if it is empty."""
    return {}


@pytest.fixture
def url(ended: dict[str, Any]) -> Iterator[str]:
    """A service that accepts a job and has its events; everything else is 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._respond(202, "application/json", json.dumps({**JOB, "status": "queued", "artifacts": []}))

        def do_GET(self) -> None:
            if self.path == "/v1/jobs/job_1/events" and ended:
                self._respond(200, "text/event-stream", f"data: {json.dumps(ended)}\n\n")
            else:
                self._respond(404, "application/json", json.dumps({"detail": "it is gone", "code": "not_found"}))

        def _respond(self, status: int, content_type: str, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def submit(url: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["submit", "a red circle", "--url", url, *options])


def test_an_error_of_the_wait_names_the_job_and_how_to_wait_for_it(url: str) -> None:
    result = submit(url)
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.splitlines() == [
        "fusequeue: job job_1 is submitted; `fusequeue watch job_1` waits for it again",
        "fusequeue: it is gone",
    ]


def test_an_error_of_the_download_names_the_job(url: str, ended: dict[str, Any]) -> None:
    ended.update(JOB)
    result = submit(url)
    assert (result.exit_code, result.stdout) == (4, "")
    named, error = result.stderr.splitlines()
    assert named.startswith("fusequeue: job job_1 succeeded; its images are not saved; `fusequeue watch job_1 --json`")
    assert error == "fusequeue: it is gone"


def test_a_failed_job_is_printed(url: str, ended: dict[str, Any]) -> None:
    """As `fusequeue watch` does."""
    ended.update(FAILED)
    result = submit(url, "--json")
    assert (result.exit_code, json.loads(result.stdout)["error"]["message"]) == (1, "no memory")
    shown = submit(url)
    assert (shown.exit_code, "no memory" in shown.stdout, "job job_1 failed" in shown.stderr) == (1, True, True)
