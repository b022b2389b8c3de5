"""Jobs with a destination: files arrive once, hostile hosts are bounded, and signatures are in no log or response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from harness.api_process import Server
from harness.queue import claim, lose, put
from harness.s3_process import admin
from harness.stub_engine import StubFleet
from pydantic import SecretStr

from api import webhook_messages
from api.jobs.job_object import job_object
from api.webhook_messages import WebhookEvent
from shared.config.destinations import Destination, OutputBucket
from shared.errors import OutputRejected, without_places
from shared.inputs import resolver
from shared.job import Job, State
from shared.job_record import Failure, JobRecord
from shared.queue import Queue
from shared.runtime.asyncio_tools import cancel_and_wait
from worker.output import sending
from worker.output.sending import OutputSender

Eventually = Callable[..., Awaitable[None]]
MakeFleet = Callable[..., StubFleet]
MakeJob = Callable[..., Job]

SIGNATURE = "X-Amz-Signature=5ec3e7"
ANYWHERE: dict[str, Any] = {
    "output_allow_networks": (ip_network("127.0.0.0/8"),),
    "output_allow_http": True,
    "output_ports": tuple(range(1, 65_536)),
}
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
BUSY = b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n"
DENIED_BODY = b"<Error><Code>AccessDenied</Code><StringToSign>X-Amz-Signature=5ec3e7</StringToSign></Error>"
DENIED = b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\n\r\n%s" % (len(DENIED_BODY), DENIED_BODY)
REDIRECT = b"HTTP/1.1 307 T\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"


@dataclass
class Receiver:
    """An HTTP server that keeps what it gets; answers each request with the next reply, and the last one forever.

    A request with a `gate` waits until that is set.
    """

    replies: list[bytes]
    gates: list[asyncio.Event] = field(default_factory=list)
    port: int = 0
    requests: list[tuple[str, bytes]] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.requests)
        self.requests.append(("", b""))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r")[0])
        self.requests[number] = (head, await reader.readexactly(length))
        if number < len(self.gates):
            await self.gates[number].wait()
        writer.write(self.replies[min(number, len(self.replies) - 1)])
        writer.close()

    def output(self, name: str = "a.png", host: str = "127.0.0.1") -> Destination:
        return Destination(put_urls=(f"http://{host}:{self.port}/{name}?{SIGNATURE}",))


@asynccontextmanager
async def receiving(*replies: bytes, gates: Sequence[asyncio.Event] = ()) -> AsyncIterator[Receiver]:
    receiver = Receiver(list(replies), list(gates))
    server = await asyncio.start_server(receiver.handle, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for gate in receiver.gates:
            gate.set()


@pytest.fixture
async def make_fleet(queue: Queue, tmp_path: Path) -> AsyncIterator[MakeFleet]:
    fleets: list[StubFleet] = []

    def make(**settings: Any) -> StubFleet:
        fleets.append(StubFleet(queue, tmp_path, **{**ANYWHERE, **settings}))
        return fleets[-1]

    yield make
    for fleet in fleets:
        await fleet.close()


@pytest.fixture(autouse=True)
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "FIRST_RETRY_S", 0.01)


async def ended(queue: Queue, job: Job, eventually: Eventually) -> JobRecord:
    async def is_terminal() -> bool:
        record = await queue.jobs.get(job.id)
        return record is not None and record.state.terminal

    await eventually(is_terminal, "the job has ended", 20)
    record = await queue.jobs.get(job.id)
    assert record is not None
    return record


async def run(fleet: StubFleet, job: Job, eventually: Eventually) -> tuple[JobRecord, str]:
    """Run a job to its end; return its record and the log."""
    with structlog.testing.capture_logs() as logs:
        async with fleet.worker("demo", job_s=0.01):
            await fleet.submit(job)
            record = await ended(fleet.queue, job, eventually)
    return record, repr(logs)


async def test_a_put_url_gets_the_finished_file(
    make_fleet: MakeFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    """With its type and length. Nothing is stored here, and no log or object for clients has the signature."""
    async with receiving(OK) as receiver:
        fleet = make_fleet()
        job = make_job(output=receiver.output())
        record, log = await run(fleet, job, eventually)
    ((head, body),) = receiver.requests
    (artifact,) = record.artifacts
    assert head.startswith(f"put /a.png?{SIGNATURE.lower()} http/1.1\r\n")
    assert "\r\ncontent-type: image/png\r\n" in head
    assert (body[:4], len(body)) == (b"\x89PNG", artifact.bytes)
    assert artifact.location == f"http://127.0.0.1:{receiver.port}/a.png"
    assert not (fleet.settings.storage_dir / "jobs").exists()
    shown = job_object(record, "http://api").model_dump_json()
    sent = webhook_messages.body(WebhookEvent("job.succeeded", 0, job.id, record, None, "http://api")).decode()
    assert artifact.location in shown
    assert artifact.location in sent
    kept = str(await fleet.queue.client.redis.hgetall(fleet.queue.client.redis_keys.job(job.id)))
    for text in (log, shown, sent, repr(job), kept):
        assert SIGNATURE not in text


async def test_temporary_errors_of_a_host_are_retried(
    make_fleet: MakeFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    async with receiving(BUSY, BUSY, OK) as receiver:
        record, _ = await run(make_fleet(), make_job(output=receiver.output()), eventually)
    assert (record.state, len(receiver.requests)) == (State.SUCCEEDED, 3)


async def test_a_success_counts_though_its_body_breaks_off(
    make_fleet: MakeFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    async with receiving(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf of") as receiver:
        record, _ = await run(make_fleet(), make_job(output=receiver.output()), eventually)
    assert (record.state, len(receiver.requests)) == (State.SUCCEEDED, 1)


@pytest.mark.parametrize(
    ("reply", "code", "message"),
    [
        (BUSY, "output_not_sent", "output.put_url: the URL responded with status 503"),
        (b"", "output_not_sent", "output.put_url: the request to 127.0.0.1 failed"),
        (DENIED, "output_rejected", "output.put_url: the URL responded with status 403 (AccessDenied)"),
        (REDIRECT, "output_rejected", "output.put_url: the URL redirects; sign its final address"),
    ],
    ids=["busy", "closes", "denied", "redirects"],
)
async def test_a_host_that_takes_no_file_fails_the_job(
    make_fleet: MakeFleet, make_job: MakeJob, eventually: Eventually, reply: bytes, code: str, message: str
) -> None:
    """After a few attempts, or at once if the host refuses it. S3 repeats the signature in its error."""
    async with receiving(reply) as receiver:
        record, log = await run(make_fleet(), make_job(output=receiver.output()), eventually)
    failure = record.error
    assert failure is not None
    assert (failure.code, failure.param) == (code, "output.put_url")
    assert without_places(message) in failure.message
    assert failure.retryable == (code == "output_not_sent")
    assert len(receiver.requests) == (sending.ATTEMPTS if failure.retryable else 1)
    assert SIGNATURE not in failure.message + log


async def test_a_name_that_has_become_private_gets_nothing(
    make_fleet: MakeFleet, make_job: MakeJob, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding between the submit and the PUT, whose address is checked again."""

    async def private(host: str, port: int, tenant: str) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(resolver, "resolve", private)
    async with receiving(OK) as receiver:
        job = make_job(output=receiver.output(host="bucket.example"))
        record, _ = await run(make_fleet(output_allow_networks=()), job, eventually)
    assert record.error is not None
    assert (record.error.code, receiver.requests) == ("output_rejected", [])
    assert "a loopback address" in record.error.message


async def test_slow_hosts_of_one_tenant_do_not_stop_the_worker(
    make_fleet: MakeFleet, make_job: MakeJob, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold a quarter of the spool, and a few outputs more that wait; what exceeds it fails."""
    monkeypatch.setattr(sending, "MAX_WAITING", 2)
    gate = asyncio.Event()
    async with receiving(OK, gates=[gate] * 100) as receiver:
        fleet = make_fleet(spool_bytes=32 * 1024**2)  # 16 small outputs
        greedy = [make_job(tenant="greedy", output=receiver.output(f"{number}.png")) for number in range(12)]
        other = make_job(tenant="other")
        async with fleet.worker("demo", job_s=0.01) as (worker, _):
            await fleet.submit(*greedy)
            ids = [job.id for job in greedy]

            async def failures() -> list[Failure]:
                records = await fleet.queue.jobs.get_many(ids)
                return [record.error for record in records if record is not None and record.error is not None]

            async def six_have_failed() -> bool:
                return len(await failures()) == 6

            await eventually(six_have_failed, "the outputs beyond the share have failed")
            assert {failure.code for failure in await failures()} == {"output_not_sent"}
            await fleet.submit(other)
            assert (await ended(fleet.queue, other, eventually)).state is State.SUCCEEDED
            assert len(receiver.requests) == 4
            assert worker.slots_in_use == 6
            gate.set()
            records = [await ended(fleet.queue, job, eventually) for job in greedy]
            assert [record.state for record in records].count(State.SUCCEEDED) == 6


async def test_a_job_whose_worker_dies_during_the_put_ends_once(
    make_fleet: MakeFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    """The next claim sends the file again, to the same URL."""
    async with receiving(OK, gates=[asyncio.Event()]) as receiver:
        fleet = make_fleet()
        job = make_job(output=receiver.output())
        _, _, running = fleet.start("demo", job_s=0.01)
        await fleet.submit(job)
        await eventually(lambda: len(receiver.requests) == 1, "the file is on its way")
        await cancel_and_wait((running,))  # nothing is released, as after a kill
        await lose(fleet.queue, job.id)
        await fleet.queue.maintenance.reclaim()
        async with fleet.worker("demo", job_s=0.01):
            record = await ended(fleet.queue, job, eventually)
    assert (record.state, record.epoch, len(receiver.requests)) == (State.SUCCEEDED, 2, 2)
    assert receiver.requests[0][1] == receiver.requests[1][1]


async def test_a_claim_that_was_lost_sends_nothing(queue: Queue, make_submission: Any) -> None:
    """The check before a PUT, for a worker that has not noticed its loss yet."""
    async with receiving(OK) as receiver:
        await put(queue, make_submission(output=receiver.output()))
        (stale,) = await claim(queue)
        sender = OutputSender(queue, queue.client.settings.model_copy(update=ANYWHERE))
        files = {"a.png": (b"image", "image/png")}
        await sender.send(stale, 0, files, 5)
        await lose(queue, stale.job.id)
        await queue.maintenance.reclaim()
        with pytest.raises(OutputRejected, match="another worker has the job"):
            await sender.send(stale, 0, files, 5)
        assert len(receiver.requests) == 1
        await sender.close()


def presigned(s3_server: str, bucket: str, key: str) -> str:
    params = {"Bucket": bucket, "Key": key}
    url: str = admin(s3_server).generate_presigned_url("put_object", Params=params, ExpiresIn=60)
    return url


@pytest.mark.every_s3
async def test_artifacts_of_a_bucket_are_read_through_the_api_and_stay_when_the_job_is_deleted(
    start: Callable[..., Server], s3_server: str, tmp_path: Path, eventually: Eventually
) -> None:
    """Those of a presigned URL are where the client has sent them: the API says so."""
    admin(s3_server).create_bucket(Bucket="renders")
    s3 = {
        "s3_endpoint_url": s3_server,
        "s3_access_key_id": "test",
        "s3_secret_access_key": "test",
        "output_buckets": "renders/jobs",
        "output_allow_http": "true",
        "output_allow_networks": "127.0.0.0/8",
        "output_ports": s3_server.rpartition(":")[2],
    }
    api = start(**s3)
    queue = Queue.connect(api.settings)
    fleet = StubFleet(queue, tmp_path)
    put_url = presigned(s3_server, "renders", "mine.png")
    try:
        async with fleet.worker("demo", job_s=0.01), httpx.AsyncClient(base_url=api.url, timeout=30) as client:

            async def job(output: dict[str, Any]) -> dict[str, Any]:
                body = {"model": "demo", "prompt": "x", "output": output}
                response = await client.post("/v1/jobs", json=body, headers={"Prefer": "wait=20"})
                assert response.status_code == 200, response.text
                assert "Signature" not in response.text
                return dict(response.json())

            stored = await job({"bucket": "renders", "prefix": "jobs/default/today"})
            (artifact,) = stored["artifacts"]
            key = f"jobs/default/today/{stored['id']}-0.png"
            assert artifact["location"] == f"s3://renders/{key}"
            assert stored["output"] == {"put_urls": [], "bucket": "renders", "prefix": "jobs/default/today"}
            image = await client.get(artifact["url"])
            assert (image.status_code, len(image.content)) == (200, artifact["bytes"])

            sent = await job({"put_url": put_url})
            gone = await client.get(sent["artifacts"][0]["url"])
            assert gone.status_code == 404
            assert f"it was sent to {put_url.partition('?')[0]}" in gone.json()["detail"]
            again = {"model": "demo", "prompt": "x", "image": sent["id"], "strength": 0.5}
            assert "is not stored here" in (await client.post("/v1/jobs", json=again)).text

            for ended_job in (stored, sent):
                assert (await client.delete(f"/v1/jobs/{ended_job['id']}")).status_code == 204
        for name in (key, "mine.png"):
            assert admin(s3_server).get_object(Bucket="renders", Key=name)["ContentType"] == "image/png"
        assert "Signature" not in api.log.read_text()
    finally:
        await fleet.close()
        await queue.close()


@pytest.mark.every_s3
async def test_a_bucket_that_cannot_be_used_fails_the_job(
    make_fleet: MakeFleet, make_job: MakeJob, eventually: Eventually, s3_server: str
) -> None:
    secret, buckets = SecretStr("test"), (OutputBucket("missing"),)
    fleet = make_fleet(
        s3_endpoint_url=s3_server, s3_access_key_id="test", s3_secret_access_key=secret, output_buckets=buckets
    )
    job = make_job(output=Destination(bucket="missing"))
    record, _ = await run(fleet, job, eventually)
    assert record.error is not None
    assert (record.error.code, record.error.message) == (
        "output_not_sent",
        "output.bucket: storage: there is no bucket",
    )
