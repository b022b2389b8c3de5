"""A hub that refuses, stalls, fails and drops connections: no job is lost, and all succeed once it is back."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from harness.ports import free_port
from harness.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "demo" / "model"
pytestmark = pytest.mark.slow
"""Processes with another cache are not forked. The default suite has tests/unit/engine/weights/test_load_failures.py
and tests/integration/worker/test_failed_loads.py."""

REVISION = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "org/demo"
JOBS = 30
PROMPT = "a red circle on a blue ground, left"

Mode = Literal["refuses", "stalls", "fails", "drops", "serves"]


class Hub:
    """The requests of huggingface.co that a download of the demo model makes, on one port in several modes."""

    def __init__(self) -> None:
        self.port = free_port()
        self.mode: Mode = "refuses"
        self.requests: Counter[str] = Counter()  # by mode
        self._server: http.server.ThreadingHTTPServer | None = None
        self._changed = threading.Event()

    def become(self, mode: Mode) -> None:
        """Change the mode; requests that stall end without a response."""
        self.close()
        self.mode, self._changed = mode, threading.Event()
        if mode != "refuses":
            handler = type("Handler", (HubHandler,), {"hub": self})
            self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), handler)
            self._server.daemon_threads = True
            threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._changed.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def wait_for_change(self) -> None:
        self._changed.wait()


class HubHandler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        mode = self.hub.mode
        self.hub.requests[mode] += 1
        if mode == "stalls":
            self.hub.wait_for_change()
            self.close_connection = True
        elif mode == "fails":
            self.reply(503, b"")
        elif self.path.startswith(f"/{REPOSITORY}/resolve/"):
            self.send_file(FILES / self.path.partition(f"{REVISION}/")[2], cut=mode == "drops")
        elif self.path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            self.reply(200, json.dumps([entry(file) for file in model_files()]).encode())
        elif self.path.startswith(f"/api/models/{REPOSITORY}"):
            names = [{"rfilename": str(file.relative_to(FILES))} for file in model_files()]
            self.reply(200, json.dumps({"id": REPOSITORY, "sha": REVISION, "siblings": names}).encode())
        else:
            self.reply(404, b"")

    do_HEAD = do_GET

    def send_file(self, file: Path, cut: bool) -> None:
        """Send a file, or of a large one only the first half."""
        content = file.read_bytes()
        cut = cut and len(content) > 10_000 and self.command == "GET"
        self.reply(200, content[: len(content) // 2] if cut else content, length=len(content))
        self.close_connection = self.close_connection or cut

    def reply(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


def model_files() -> list[Path]:
    return sorted(file for file in FILES.rglob("*") if file.is_file())


def entry(file: Path) -> dict[str, object]:
    name = str(file.relative_to(FILES))
    return {"type": "file", "path": name, "size": file.stat().st_size, "oid": hashlib.sha1(name.encode()).hexdigest()}


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def make_hub_stack(make_stack: Callable[..., Any], hub: Hub, tmp_path: Path) -> Callable[..., Any]:
    """Create stacks with the model `demo` in the hub, and with more models."""

    def make(more: str = "") -> Any:
        entries = (ROOT / "models.toml").read_text().replace('source = "demo/model"', f'source = "{REPOSITORY}"')
        assert REPOSITORY in entries
        models = tmp_path / "models.toml"
        models.write_text(entries + more)
        stack = make_stack(models=str(models), load_retry_s="0.05").start(workers=0)
        cache = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        seconds = {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}
        # Of the workers only: a process whose environment names another cache is not forked.
        stack.env.update(cache, **seconds, HF_ENDPOINT=f"http://127.0.0.1:{hub.port}", NO_PROXY="*")
        return stack

    return make


def wait_for_state(stack: Any, state: str) -> dict[str, Any]:
    """Wait until the only worker reports a state; return its record."""
    wait_until(lambda: [one["state"] for one in stack.workers()] == [state], f"the worker is {state}", 120)
    record: dict[str, Any] = stack.workers()[0]
    return record


def failed_loads(worker: Any) -> int:
    return int(worker.text().count("model_unavailable"))


def test_no_job_fails_while_the_hub_cannot_be_reached(make_hub_stack: Any, hub: Hub) -> None:
    """Refused connections, silence, 503 and half files: jobs wait without an attempt, and run when it is back."""
    stack = make_hub_stack()
    ids = [stack.submit(prompt=f"{PROMPT} {number}", steps=2) for number in range(JOBS)]
    worker = stack.worker()
    record = wait_for_state(stack, "unavailable")
    assert (record["loaded"], record["ready_s"]) == ([], None)
    assert "refused" in record["unavailable"]["demo"]["reason"]
    assert record["unavailable"]["demo"]["permanent"] is False
    modes: tuple[Mode, ...] = ("stalls", "fails", "drops")
    for mode in modes:
        hub.become(mode)
        wait_until(lambda: hub.requests[mode] > 0, "the load is repeated", 60)  # noqa: B023
        loads = failed_loads(worker)
        wait_until(lambda: failed_loads(worker) > loads, f"it fails: the hub {mode}", 120)  # noqa: B023
        assert stack.read("/v1/scale/default")["alive"] == 0
        assert {(stack.job(name)["status"], stack.job(name)["attempts"]) for name in ids} == {("queued", 0)}
    hub.become("serves")
    jobs = [stack.finish(name, 120) for name in ids]
    assert {(job["status"], job["attempts"]) for job in jobs} == {("succeeded", 1)}
    assert stack.terminal_events() == dict.fromkeys(ids, 1)
    assert wait_for_state(stack, "ready")["unavailable"] == {}
    assert "gpu_thread_hung" not in worker.text()

    hub.become("refuses")
    assert worker.stop() == 0
    stack.worker()
    assert stack.finish(stack.submit(prompt=PROMPT, steps=2), 120)["status"] == "succeeded", "the cached files serve"


def test_other_models_are_served_while_the_hub_stalls(make_hub_stack: Any, hub: Hub) -> None:
    """Also at the start of the worker, while the hub does not respond."""
    hub.become("stalls")
    entry = (ROOT / "models.toml").read_text().replace('id = "demo"', 'id = "local"')
    more = entry[entry.index("\n[[model]]") :].replace('source = "demo/model"', f'source = "{os.fspath(FILES)}"')
    stack = make_hub_stack(more)
    lost, served = stack.submit(prompt=PROMPT, steps=2), stack.submit(model="local", prompt=PROMPT, steps=2)
    stack.worker()
    assert stack.finish(served, 120)["status"] == "succeeded"
    wait_until(lambda: "demo" in stack.workers()[0]["unavailable"], "the other load is repeated", 60)
    assert (stack.job(lost)["status"], stack.job(lost)["attempts"]) == ("queued", 0)
    hub.become("serves")
    assert stack.finish(lost, 120)["status"] == "succeeded"
