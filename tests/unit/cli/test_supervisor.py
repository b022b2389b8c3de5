"""Supervision of small scripts: start, restart, failed start, and stop in order."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cli.up.child_process import Process
from cli.up.command import print_status
from cli.up.supervisor import ProcessSpec, RestartBackoff, StartFailed, StatusPrinter, Supervisor

QUICK = RestartBackoff(first_s=0.01, max_s=0.05, reset_after_s=60.0, start_attempts=3)
# Prints "up", and appends its name to the journal on SIGTERM.
GRACEFUL = """
import signal, sys, time
def end(*_):
    with open({journal!r}, "a") as journal:
        print({name!r}, file=journal)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
while True:
    time.sleep(600)
"""
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


async def printed_up(process: Process) -> bool:
    return "up" in process.log.tail()


class SupervisorHarness:
    """A supervisor, its status messages, and the process ids of each name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.messages: list[str] = []
        self.pids: dict[str, list[int]] = {}
        self.ready = asyncio.Event()
        self.supervisor: Supervisor

    def spec(
        self, name: str, code: str | None = None, *, rank: int = 0, grace_s: float = 20.0, **options
    ) -> ProcessSpec:
        code = GRACEFUL.format(journal=str(self.folder / "journal"), name=name) if code is None else code

        async def ready(process: Process) -> bool:
            pids = self.pids.setdefault(name, [])
            if process.pid not in pids:
                pids.append(process.pid)
            return await printed_up(process)

        command = (sys.executable, "-c", code)
        return ProcessSpec(name, command, ready, stop_rank=rank, stop_grace_s=grace_s, **options)

    def start(
        self, *specs: ProcessSpec, backoff: RestartBackoff = QUICK, print_status: StatusPrinter | None = None
    ) -> asyncio.Task[None]:
        self.supervisor = Supervisor(
            specs,
            env=os.environ,
            log_dir=self.folder / "logs",
            print_status=print_status or self.messages.append,
            backoff=backoff,
        )
        return asyncio.create_task(self.supervisor.run(self.ready.set))

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"timeout waiting until {what}: {self.messages}"
            await asyncio.sleep(0.01)


@pytest.fixture
def harness(tmp_path):
    return SupervisorHarness(tmp_path)


async def test_processes_stop_in_the_order_of_their_rank(harness):
    """Workers drain while the API and Redis still run; Redis stops last."""
    running = harness.start(harness.spec("redis", rank=2), harness.spec("api", rank=1), harness.spec("worker", rank=0))
    async with asyncio.timeout(60):
        await harness.ready.wait()
        harness.supervisor.stop()
        await running
    assert (harness.folder / "journal").read_text().split() == ["worker", "api", "redis"]


async def test_processes_stop_in_order_when_their_messages_cannot_be_printed(harness, monkeypatch):
    """The terminal was closed, or `| tee` ended by the same Ctrl-C."""
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        specs = (harness.spec("redis", rank=1), harness.spec("worker", rank=0))
        running = harness.start(*specs, print_status=print_status)
        async with asyncio.timeout(60):
            await harness.ready.wait()
            harness.supervisor.stop()
            await running
    assert (harness.folder / "journal").read_text().split() == ["worker", "redis"]


async def test_a_killed_process_is_restarted(harness):
    """The other process is not restarted."""
    running = harness.start(harness.spec("a"), harness.spec("b"))
    async with asyncio.timeout(60):
        await harness.ready.wait()
        os.kill(harness.pids["a"][0], signal.SIGKILL)
        await harness.until(lambda: len(harness.pids["a"]) == 2, "a is restarted")
        harness.supervisor.stop()
        await running
    assert len(harness.pids["b"]) == 1
    assert any("SIGKILL" in line for line in harness.messages)


async def test_readiness_is_reset_on_a_restart(harness):
    """The log lines of the previous process do not count."""
    flag = harness.folder / "mute"
    code = f"import pathlib, time; pathlib.Path({str(flag)!r}).exists() or print('up', flush=True); time.sleep(600)"
    running = harness.start(harness.spec("a", code))
    async with asyncio.timeout(60):
        await harness.ready.wait()
        flag.touch()
        os.kill(harness.pids["a"][0], signal.SIGKILL)
        await harness.until(lambda: len(harness.pids["a"]) == 2, "a is restarted")
        await asyncio.sleep(0.2)
        harness.supervisor.stop()
        await running
    assert sum("ready after" in line for line in harness.messages) == 1


async def test_a_process_waits_for_the_one_it_needs(harness):
    """A process starts only when the one it needs is ready."""
    slow = "import time; time.sleep(0.2); print('up', flush=True); time.sleep(600)"
    running = harness.start(harness.spec("api", needs="redis"), harness.spec("redis", slow, rank=1))
    async with asyncio.timeout(60):
        await harness.ready.wait()
        harness.supervisor.stop()
        await running
    order = [line.split(":")[0] for line in harness.messages if "ready after" in line]
    assert order == ["redis", "api"]


async def test_a_process_that_never_becomes_ready_fails_the_start(harness):
    """After the last attempt the error contains the end of its log, and the others are stopped."""
    running = harness.start(harness.spec("good"), harness.spec("bad", "import sys; sys.exit('no models file')"))
    async with asyncio.timeout(60):
        with pytest.raises(StartFailed, match="no models file"):
            await running
    assert sum("restarting" in line for line in harness.messages) == QUICK.start_attempts - 1
    assert not harness.ready.is_set()


async def test_a_process_that_refuses_its_settings_fails_the_start_at_once(harness):
    """With its sentence, without the log around it; `pool` keeps trying, as its models file can be corrected."""
    refusal = '{"code": "configuration_error", "error": "there are no API keys", "event": "api_failed"}'
    specs = (harness.spec("good"), harness.spec("api", f"import sys; sys.exit({refusal!r})"))
    async with asyncio.timeout(60):
        with pytest.raises(StartFailed, match=r"^api: there are no API keys$"):
            await harness.start(*specs)
    assert not [line for line in harness.messages if "restarting" in line]


async def test_a_process_that_ends_late_but_was_never_ready_fails_the_start(harness):
    """A worker can load a model for minutes before it runs out of memory."""
    running = harness.start(
        harness.spec("bad", "import time; time.sleep(0.05)"), backoff=replace(QUICK, reset_after_s=0.01)
    )
    async with asyncio.timeout(60):
        with pytest.raises(StartFailed):
            await running


async def test_a_process_that_does_not_exit_is_killed_after_its_grace(harness):
    """A hung process delays the stop by its grace period at most."""
    running = harness.start(harness.spec("stubborn", STUBBORN, grace_s=0.1))
    async with asyncio.timeout(60):
        await harness.ready.wait()
        harness.supervisor.stop()
        await running
    assert any("killed" in line for line in harness.messages)


async def test_a_second_stop_kills(harness):
    """A second Ctrl-C does not wait for the grace period."""
    running = harness.start(harness.spec("stubborn", STUBBORN, grace_s=600))
    async with asyncio.timeout(60):
        await harness.ready.wait()
        harness.supervisor.stop()
        harness.supervisor.stop()
        await running


async def test_a_stop_during_the_start_stops_all(harness):
    """Processes that wait for another one, or for a restart, stop too."""
    silent = "import time; time.sleep(600)"
    running = harness.start(harness.spec("redis", silent, rank=1), harness.spec("api", needs="redis"))
    async with asyncio.timeout(60):
        await harness.until(lambda: "redis" in harness.pids, "redis is started")
        harness.supervisor.stop()
        await running
    assert "api" not in harness.pids
    assert not harness.ready.is_set()


async def test_each_start_inherits_the_descriptors_until_the_stop(harness):
    """A listening socket of several processes stays open while one is restarted, and is closed for their drain."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = f"import os, time; os.fstat({listener.fileno()}); print('up', flush=True); time.sleep(600)"
        spec = harness.spec("api", code, descriptors=(listener.fileno(),), on_stop=listener.close)
        running = harness.start(spec)
        async with asyncio.timeout(60):
            await harness.ready.wait()
            os.kill(harness.pids["api"][0], signal.SIGKILL)
            await harness.until(lambda: sum("ready" in line for line in harness.messages) == 2, "it is restarted")
            assert listener.fileno() >= 0
            harness.supervisor.stop()
            await running
        assert listener.fileno() == -1


@pytest.mark.parametrize(
    ("failures", "delay_s"),
    [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (20, 15.0), (10_000, 15.0)],
)
def test_restart_delays_double_up_to_a_bound(failures, delay_s):
    """The first restart is immediate."""
    assert RestartBackoff().delay_s(failures) == delay_s
