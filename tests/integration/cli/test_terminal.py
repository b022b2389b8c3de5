"""Commands on a terminal and in a pipe: progress bars, full ids, and output that ends early."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import httpx
import pytest
from harness.api_process import Server
from harness.http_server import claimed, deliver
from harness.waiting import wait_until

from shared.queue import Queue

TIMEOUT_S = 60.0
PROMPT = "a red circle on a blue ground, left, with a prompt that is longer than any narrow terminal"


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
async def queue(server: Server) -> AsyncIterator[Queue]:
    queue = Queue.connect(server.settings)
    yield queue
    await queue.close()


def environment(server: Server) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FUSEQUEUE_", "COLUMNS"))}
    return inherited | {"FUSEQUEUE_URL": server.url, "TERM": "xterm"}


class Terminal:
    """A command with a terminal as its input, output and errors."""

    def __init__(self, server: Server, folder: Path, *arguments: str, columns: int = 100) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [sys.executable, "-m", "cli.main", *arguments]
        ends = {"stdin": follower, "stdout": follower, "stderr": follower}
        self.process = subprocess.Popen(command, cwd=folder, env=environment(server), start_new_session=True, **ends)  # type: ignore[call-overload]
        os.close(follower)
        self._shown = b""
        self._reader = Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # on Linux the end of a terminal is an error
            while data := os.read(self._leader, 65536):
                self._shown += data

    @property
    def text(self) -> str:
        return self._shown.decode()

    def shows(self, text: str) -> None:
        wait_until(lambda: text in self.text or self.process.poll() is not None, f"the terminal shows {text}")
        assert text in self.text, self.text

    def status(self) -> int:
        """Return the exit status once the command has ended."""
        status: int = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        os.close(self._leader)
        return status


@pytest.fixture(scope="module")
def listing_server(module_server: Server) -> Server:
    """An API process with one queued job."""
    body = {"model": "demo", "prompt": PROMPT}
    httpx.post(f"{module_server.url}/v1/jobs", json=body, timeout=TIMEOUT_S).raise_for_status()
    return module_server


def jobs(server: Server) -> list[str]:
    return [job["id"] for job in httpx.get(f"{server.url}/v1/jobs", timeout=TIMEOUT_S).json()["data"]]


@pytest.mark.parametrize("options", [(), ("--timeout", "60")])
async def test_submit_shows_a_progress_bar(
    server: Server, queue: Queue, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Also with a timeout."""
    terminal = Terminal(server, tmp_path, "submit", PROMPT, *options)
    await asyncio.to_thread(terminal.shows, "queued")
    await asyncio.to_thread(wait_until, lambda: jobs(server), "the job is submitted")
    (job_id,) = jobs(server)
    claim = await claimed(queue, job_id)
    await asyncio.to_thread(terminal.shows, "running")
    assert "━" in terminal.text
    await deliver(queue, tmp_path, claim)
    assert await asyncio.to_thread(terminal.status) == 0, terminal.text
    assert (tmp_path / f"{job_id}-0.png").is_file()


def test_a_timeout_ends_the_progress_bar_and_names_the_job(server: Server, tmp_path: Path) -> None:
    terminal = Terminal(server, tmp_path, "submit", PROMPT, "--timeout", "0.5")
    assert terminal.status() == 6, terminal.text
    assert "━" in terminal.text
    assert f"fusequeue: job {jobs(server)[0]} is queued" in terminal.text


@pytest.mark.parametrize("columns", [20, 60])
def test_ids_are_whole_on_a_narrow_terminal(listing_server: Server, tmp_path: Path, columns: int) -> None:
    """Only the prompt, the last column, is cut."""
    (job_id,) = jobs(listing_server)
    signature = httpx.get(f"{listing_server.url}/v1/queues", timeout=TIMEOUT_S).json()["data"][0]["signature"]
    texts = {}
    for arguments, whole in ((("jobs",), job_id), (("status", job_id), job_id), (("queues",), signature)):
        terminal = Terminal(listing_server, tmp_path, *arguments, columns=columns)
        assert terminal.status() == 0
        assert whole in terminal.text
        texts[arguments[0]] = terminal.text
    assert "…" in texts["jobs"]
    assert PROMPT[:59] not in texts["jobs"]


def test_ids_are_whole_in_a_pipe(listing_server: Server, tmp_path: Path) -> None:
    """Without COLUMNS a pipe has 80; nothing is cut to it."""
    (job_id,) = jobs(listing_server)
    command = [sys.executable, "-m", "cli.main", "jobs"]
    env = {**environment(listing_server), "COLUMNS": "20"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert job_id in done.stdout
    assert PROMPT[:59] in done.stdout


@pytest.mark.parametrize("closed", ["jobs | true", "jobs >&-", "status none 2>&- <&-"])
def test_closed_output_is_no_traceback(listing_server: Server, tmp_path: Path, closed: str) -> None:
    command = ["sh", "-c", f'"$PYTHON" -m cli.main {closed}']
    env = {**environment(listing_server), "PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr == ""


def test_characters_that_the_encoding_lacks_are_escaped(server: Server, tmp_path: Path) -> None:
    """JSON stays JSON."""
    httpx.post(f"{server.url}/v1/jobs", json={"model": "demo", "prompt": "ünï ✨ \u202e\x1b[31m"}, timeout=TIMEOUT_S)
    env = {**environment(server), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for options in ((), ("--json",)):
        command = [sys.executable, "-m", "cli.main", "jobs", *options]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=TIMEOUT_S, check=True)
        assert b"\\u2728" in done.stdout
        assert b"\x1b" not in done.stdout
