"""`python -m api.chores`: its processes end and start again independently, and all end with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT
from harness.queue import claim, end, put

from shared.job import State, Webhook
from shared.queue import Queue
from shared.webhooks import DeliveryState

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests read /proc")

Eventually = Callable[..., Awaitable[None]]


class Chores:
    """A running chores worker with its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log events with this name."""
        rows = [json.loads(row) for row in self.log.read_text().splitlines() if row.startswith("{")]
        return [row for row in rows if row["event"] == name]

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def ready(self) -> list[str]:
        return [event["queue"] for event in self.events("chores_ready")]


@contextmanager
def _chores(url: str, namespace: str, folder: Path, **more: str) -> Iterator[Chores]:
    values = {"REDIS_URL": url, "NAMESPACE": namespace, "STORAGE_DIR": str(folder / "objects"), **more}
    log = folder / "chores.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "api.chores"],
            cwd=ROOT,
            env={**os.environ, **{f"FUSEQUEUE_{name}": value for name, value in values.items()}},
            stdout=out,
            stderr=out,
        )
    try:
        yield Chores(process, log)
    finally:
        process.kill()
        process.wait(60)
        print(log.read_text()[-3000:])


@pytest.fixture
async def queue(durable_server: Any, settings_for: Callable[..., Any]) -> AsyncIterator[Queue]:
    queue = Queue.connect(settings_for(durable_server.url))
    yield queue
    await queue.close()


@pytest.fixture
def chores(queue: Queue, tmp_path: Path) -> Iterator[Chores]:
    settings = queue.client.settings
    with _chores(settings.redis_url, settings.namespace, tmp_path) as running:
        yield running


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _reclaims(queue: Queue, make_submission: Any, eventually: Eventually) -> None:
    """Lose a job, and wait until upkeep has put it back into the queue."""
    (job_id,) = await put(queue, make_submission())
    await claim(queue)
    await queue.client.redis.zadd(queue.client.redis_keys.leases, {job_id: 1})

    async def queued() -> bool:
        record = await queue.jobs.get(job_id)
        return record is not None and record.state is State.QUEUED

    await eventually(queued, "the job is queued again", 60)


async def test_a_killed_process_starts_again(
    chores: Chores, queue: Queue, make_submission: Any, eventually: Eventually
) -> None:
    """Each of the three, after a second; upkeep continues after its own end."""
    await eventually(lambda: sorted(chores.ready()) == ["batches", "upkeep", "webhooks"], "all are ready", 60)
    killed = chores.children()
    assert len(killed) == 3
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: sorted(chores.ready()) == sorted(2 * ["batches", "upkeep", "webhooks"]), "again", 60)
    assert {event["status"] for event in chores.events("chores_process_ended")} == {-signal.SIGKILL}
    assert not set(killed) & set(chores.children())
    await _reclaims(queue, make_submission, eventually)
    chores.process.send_signal(signal.SIGTERM)
    assert chores.process.wait(60) == 0
    assert {event["queue"] for event in chores.events("chores_stopped")} == {"batches", "upkeep", "webhooks"}


async def test_frozen_webhooks_and_batches_hold_up_no_upkeep(
    chores: Chores, queue: Queue, make_submission: Any, eventually: Eventually
) -> None:
    """As when their processes are out of memory, or hang."""
    await eventually(lambda: len(chores.ready()) == 3, "all are ready", 60)
    first, second, _ = chores.children()  # in the order of their start: webhooks, batches, upkeep
    for pid in (first, second):
        os.kill(pid, signal.SIGSTOP)
    try:
        await _reclaims(queue, make_submission, eventually)
    finally:
        for pid in (first, second):
            os.kill(pid, signal.SIGCONT)


async def test_all_processes_end_with_the_first(chores: Chores, eventually: Eventually) -> None:
    """Also when that one is killed, and a process is frozen."""
    await eventually(lambda: len(chores.ready()) == 3, "all are ready", 60)
    children = chores.children()
    os.kill(children[0], signal.SIGSTOP)
    chores.process.kill()
    chores.process.wait(60)
    await eventually(lambda: not any(_alive(pid) for pid in children), "all have ended", 20)


async def test_a_stop_waits_for_deliveries_in_progress(
    queue: Queue, make_submission: Any, tmp_path: Path, eventually: Eventually
) -> None:
    """The receiver answers after the signal; the delivery is recorded, and not sent again."""
    requests, answer = [0], asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        requests[0] += 1
        await answer.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        allowed = {"WEBHOOK_ALLOW_NETWORKS": "127.0.0.0/8", "WEBHOOK_ALLOW_HTTP": "1", "WEBHOOK_PORTS": str(port)}
        settings = queue.client.settings
        with _chores(settings.redis_url, settings.namespace, tmp_path, **allowed) as running:
            webhook = Webhook(url=f"http://127.0.0.1:{port}/", states=(State.SUCCEEDED,))
            await put(queue, make_submission(webhook=webhook))
            assert await end(queue, (await claim(queue))[0])
            await eventually(lambda: requests[0] == 1, "the delivery is sent", 60)
            running.process.send_signal(signal.SIGTERM)
            await eventually(lambda: len(running.events("chores_stopped")) == 2, "the other queues stop", 60)
            answer.set()
            assert await asyncio.to_thread(running.process.wait, 60) == 0
    ((delivery,), _) = await queue.webhooks.deliveries("default")
    assert (delivery.state, delivery.attempts) == (DeliveryState.DELIVERED, 1)


async def test_ctrl_c_lets_chores_finish(chores: Chores, eventually: Eventually) -> None:
    """A terminal sends SIGINT to all processes; the chores get one signal to stop, not two."""
    await eventually(lambda: len(chores.ready()) == 3, "all are ready", 60)
    for pid in (*chores.children(), chores.process.pid):
        os.kill(pid, signal.SIGINT)
    assert chores.process.wait(60) == 0
    assert len(chores.events("chores_stopped")) == 3
    assert not chores.events("chores_crashed")
    assert "Traceback" not in chores.log.read_text()


async def test_what_cannot_run_is_not_started_again(durable_server: Any, queue: Queue, tmp_path: Path) -> None:
    """A queue of another schema: status 1, and the reason in the log."""
    await queue.client.redis.set(queue.client.redis_keys.schema, 1)
    settings = queue.client.settings
    with _chores(settings.redis_url, settings.namespace, tmp_path) as running:
        assert running.process.wait(60) == 1
        assert {event["code"] for event in running.events("chores_failed")} == {"incompatible_redis"}
        assert not running.events("chores_process_ended")
