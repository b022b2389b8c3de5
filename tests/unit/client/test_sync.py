"""The blocking client: its thread, its callbacks, and the end of its script."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from harness import canned

from fusequeue import (
    AsyncBatches,
    AsyncClient,
    AsyncJobHandle,
    AsyncKeys,
    AsyncMatching,
    AsyncOperations,
    AsyncWebhooks,
    Client,
    Event,
    InvalidArgument,
    JobHandle,
    SyncBatches,
    SyncKeys,
    SyncMatching,
    SyncOperations,
    SyncWebhooks,
)

ROOT = Path(__file__).resolve().parents[3]
JOB = {**canned.JOB, "status": "queued"}
SCRIPTS = {
    "open": "client.wait('job_1')",
    "a module's": "client.wait('job_1'); import builtins; builtins.kept = client",
    "reading events": "events = client.events('job_1'); next(events)",
    "with an exception": "client.wait('job_1'); raise SystemExit(3)",
    "in a request of another thread": (
        "import contextlib, threading\n"
        "def get():\n"
        "    with contextlib.suppress(RuntimeError): client.get('hang')\n"
        "threading.Thread(target=get, daemon=True).start()\n"
        "client.get('job_after_hang')"
    ),
}


class CannedService:
    """A service on a port of this machine: `responses` by path, or a request that gets none until the end."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.hanging = threading.Event()
        self.ended = threading.Event()
        self.responses: dict[str, tuple[str, bytes]] = {
            "/v1/jobs": ("application/json", json.dumps(JOB).encode()),
            "/v1/jobs/job_1": ("application/json", json.dumps({**JOB, "status": "succeeded"}).encode()),
            "/v1/jobs/job_after_hang": ("application/json", json.dumps(JOB).encode()),
            "/v1/jobs/job_1/events": ("text/event-stream", self.events()),
        }
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                service.requests.append(path)
                self.rfile.read(int(self.headers.get("content-length", 0)))
                if path not in service.responses:
                    service.hanging.set()
                    service.ended.wait(60)
                    self.close_connection = True
                    return
                if path.endswith("after_hang"):
                    service.hanging.wait(60)
                kind, content = service.responses[path]
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @staticmethod
    def events() -> bytes:
        """Return a stream of events: queued, two steps, and the whole job."""
        states: list[dict[str, Any]] = [{"id": "job_1", "status": "queued"}]
        states += [{"id": "job_1", "status": "running", "progress": {"step": step, "total": 2}} for step in (1, 2)]
        states.append({**JOB, "status": "succeeded"})
        return "".join(f"data: {json.dumps(state)}\n\n" for state in states).encode()


@pytest.fixture
def service() -> Iterator[CannedService]:
    """A service that answers as for one job, `job_1`; other paths get no response."""
    service = CannedService()
    thread = threading.Thread(target=service.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield service
    service.ended.set()
    service.server.shutdown()
    thread.join()
    service.server.server_close()


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_client_that_stays_open_keeps_no_script_from_exiting(service: CannedService, kind: str) -> None:
    script = f"from fusequeue import Client\nclient = Client({service.url!r})\n{SCRIPTS[kind]}\nprint('end')"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", script]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (3 if kind == "with an exception" else 0, "")
    assert run.stdout == ("" if kind == "with an exception" else "end\n")


def test_progress_is_passed_in_the_thread_of_the_caller(service: CannedService) -> None:
    """A callback can draw a progress bar, or use the client itself."""
    threads: list[threading.Thread] = []
    events: list[Event] = []

    with Client(service.url) as client:

        def note(event: Event) -> None:
            threads.append(threading.current_thread())
            events.append(event)
            assert client.get("job_1").status == "succeeded"

        result = client.run("demo", "x", on_progress=note)
        assert client.wait("job_1", on_progress=note) == result.job
    assert set(threads) == {threading.current_thread()}
    assert [(event.status, event.progress.step) for event in events[:4]] == [
        ("queued", 0),
        ("running", 1),
        ("running", 2),
        ("succeeded", 0),
    ]


def test_a_fault_of_a_callback_reaches_the_caller(service: CannedService) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError(event.status)

    with Client(service.url) as client:
        with pytest.raises(ZeroDivisionError, match="queued"):
            client.wait("job_1", on_progress=fail)
        assert client.wait("job_1").status == "succeeded"


def test_a_coroutine_function_is_refused_as_a_callback(service: CannedService) -> None:
    """No event loop of the caller's would run it."""

    async def note(event: Event) -> None: ...

    with Client(service.url) as client:
        for wrong in (note, "bar"):
            callback: Any = wrong
            with pytest.raises(InvalidArgument, match=r"^on_progress: "):
                client.run("demo", "x", on_progress=callback)
            with pytest.raises(InvalidArgument, match=r"^on_progress: "):
                client.wait("job_1", on_progress=callback)
    assert service.requests == []


def test_iterators_yield_and_can_be_left(service: CannedService) -> None:
    with Client(service.url) as client:
        assert [event.status for event in client.events("job_1")] == ["queued", "running", "running", "succeeded"]
        events = client.events("job_1")
        assert next(events).status == "queued"
        events.close()
        assert client.get("job_1").status == "succeeded"


def test_a_closed_client_says_so(service: CannedService) -> None:
    with Client(service.url) as client:
        events = client.events("job_1")
        next(events)
    client.close()  # again
    calls: list[Callable[[], object]] = [
        lambda: client.get("job_1"),
        lambda: next(events),
        lambda: client.wait("job_1", on_progress=print),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="the client is closed"):
            call()


def test_a_call_in_progress_ends_when_the_client_is_closed(service: CannedService) -> None:
    client = Client(service.url)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            client.get("hang")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert service.hanging.wait(30)
    client.close()
    thread.join(30)
    assert [str(error) for error in errors] == ["the client is closed"]


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let threads take turns after a few instructions, so that a race is met within seconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_calls_while_the_client_is_closed_end() -> None:
    """A call that starts as the loop stops is run or refused, and never forgotten."""

    def call(client: Client, ends: list[str]) -> None:
        while True:
            try:
                client.get("")
            except InvalidArgument:
                continue
            except RuntimeError as error:
                return ends.append(str(error))

    for _ in range(50):
        client = Client("http://127.0.0.1:1")
        ends: list[str] = []
        threads = [threading.Thread(target=call, args=(client, ends), daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        client.close()
        for thread in threads:
            thread.join(10)
        assert ends == ["the client is closed"] * 6


def test_the_thread_ends_with_the_client(service: CannedService) -> None:
    before = {*threading.enumerate()}
    client = Client(service.url)
    client.get("job_1")
    (thread,) = {thread for thread in threading.enumerate() if thread.name == "fusequeue"} - before
    del client
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_client_of_another_process_is_an_error_and_does_not_hang(service: CannedService) -> None:
    with Client(service.url) as client:
        client.get("job_1")
        child = os.fork()
        if child == 0:
            try:
                client.get("job_1")
            except RuntimeError as error:
                os._exit(7 if "another process" in str(error) else 8)
            os._exit(9)
        deadline = time.monotonic() + 30
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                pytest.fail("the child hangs")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 7


def test_help_names_the_types_of_the_blocking_client() -> None:
    for method in (Client.map, Client.jobs, Client.groups, JobHandle.events, SyncBatches.results):
        signature = str(inspect.signature(method))
        assert "Generator[" in signature
        assert "AsyncGenerator" not in signature


def test_the_methods_are_those_of_the_asynchronous_client() -> None:
    """A method that one of them has and the other lacks is an oversight."""
    for blocking, asynchronous in (
        (Client, AsyncClient),
        (SyncWebhooks, AsyncWebhooks),
        (SyncKeys, AsyncKeys),
        (SyncBatches, AsyncBatches),
        (SyncMatching, AsyncMatching),
        (SyncOperations, AsyncOperations),
        (JobHandle, AsyncJobHandle),
    ):
        names = {name for name in dir(asynchronous) if not name.startswith("_")} - {"aclose"}
        assert {name for name in vars(blocking) if not name.startswith("_")} - {"close", "id", "latest"} == names


def test_a_handle_of_a_job_blocks(service: CannedService) -> None:
    with Client(service.url) as client:
        handle = client.job(client.submit("demo", "a red circle"))
        seen: list[Event] = []
        assert handle.wait(on_progress=seen.append).status == "succeeded"
        assert [event.status for event in seen] == [event.status for event in handle.events()]
        assert repr(handle) == "<JobHandle job_1: succeeded>"


def test_what_makes_the_bodies_of_a_bulk_submit_can_use_the_client(service: CannedService) -> None:
    """They are made in the calling thread, a request at a time."""
    rows = b"".join(json.dumps({"line": at, "id": "job_1"}).encode() + b"\n" for at in (1, 2))
    service.responses["/v1/jobs:bulk"] = ("application/x-ndjson", rows)
    with Client(service.url) as client:
        bodies = ({"prompt": client.get("job_1").prompt} for _ in range(2))
        assert [result.line for result in client.submit_many(bodies)] == [1, 2]


def test_code_in_the_thread_of_the_client_cannot_wait_for_it(service: CannedService) -> None:
    """It would wait for ever."""
    with Client(service.url) as client:
        waits = client._thread.start(_in_thread_of(client))
        with pytest.raises(RuntimeError, match="its own thread cannot call the client"):
            waits.result(30)


async def _in_thread_of(client: Client) -> None:
    client.get("job_1")
