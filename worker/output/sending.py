"""Sends outputs to the destination of their job: with a PUT to a presigned URL, or into a bucket."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import stamina
import structlog

from shared.config.settings import Settings
from shared.errors import FetchFailed, FetchRefused, NotFound, OutputNotSent, OutputRejected, Overloaded, Unavailable
from shared.inputs.fetch_guard import FetchGuard, FetchResponse, FetchRules, is_busy
from shared.job import State
from shared.queue import Claim, Queue
from shared.runtime.asyncio_tools import retry_while_unavailable
from shared.runtime.shares import SharedPool, SharedTurns
from shared.storage.output_buckets import OutputBuckets

log = structlog.get_logger()

File = tuple[bytes, str]
"""Content and content type."""

ATTEMPTS = 4
FIRST_RETRY_S = 0.5
MAX_RETRY_S = 8.0
SPOOL_SHARE = 2  # outputs on their way hold half of the spool at most, those of one tenant a quarter
MAX_WAITING = 32  # outputs of one tenant that wait for a part of it
TURN_S = 15.0

_ERROR_CODE = re.compile(rb"<Code>([A-Za-z]{1,64})</Code>")


class OutputSender:
    """Sends the files of a claim. A repeated send replaces the files of the first one.

    Before each attempt it checks that the claim is current. A worker that loses its claim during a PUT can still
    complete it: the two claims write the same image.
    """

    def __init__(self, queue: Queue, settings: Settings, guard: FetchGuard | None = None) -> None:
        self._queue = queue
        self._guard = guard or FetchGuard(FetchRules.for_outputs(settings))
        self._buckets = OutputBuckets(settings)
        pool = SharedPool("sent_outputs", max(1, settings.spool_bytes // SPOOL_SHARE))
        self._turns = SharedTurns(pool, max_waiting=MAX_WAITING, timeout_s=TURN_S)

    async def send(self, claim: Claim, index: int, files: Mapping[str, File], held_bytes: int) -> None:
        """Send the files of output `index`, by key, which hold `held_bytes` of the spool.

        Raises `OutputRejected` if the destination refuses them, or `OutputNotSent` after `ATTEMPTS` attempts.
        """
        try:
            async with self._turns.turn(claim.job.tenant, held_bytes):
                for key, file in files.items():
                    await self._send_file(claim, index, key, file)
        except Overloaded as error:
            raise OutputNotSent("the outputs of this tenant are sent too slowly: no room for another one") from error

    async def close(self) -> None:
        await self._buckets.close()

    async def _send_file(self, claim: Claim, index: int, key: str, file: File) -> None:
        output = claim.job.output
        assert output is not None

        async def attempt() -> None:
            await self._check_claim(claim)
            try:
                if output.bucket is not None:
                    await self._put_object(output.bucket, key, file)
                else:
                    await self._put_url(claim.job.tenant, output.put_urls[index], file)
            except (OutputRejected, OutputNotSent) as error:
                log.warning("output_not_sent", location=output.location(key, index), error=error.message)
                param = output.param(index)
                raise type(error)(f"{param}: {error.message}", param=param) from error

        retry = stamina.AsyncRetryingCaller(
            attempts=ATTEMPTS, timeout=None, wait_initial=FIRST_RETRY_S, wait_max=MAX_RETRY_S, wait_jitter=FIRST_RETRY_S
        )
        await retry(OutputNotSent, attempt)

    async def _check_claim(self, claim: Claim) -> None:
        """Raise `OutputRejected` unless the claim is current: a newer one sends the output of its own run."""
        read = partial(self._queue.jobs.get, claim.job.id)
        record = await retry_while_unavailable(read, "claim_not_checked")
        if record is None or record.state is not State.RUNNING or record.epoch != claim.epoch:
            raise OutputRejected("not sent: another worker has the job, or it has ended")

    async def _put_url(self, tenant: str, url: str, file: File) -> None:
        data, content_type = file
        guard = replace(self._guard, tenant=tenant)
        try:
            response = await guard.send("PUT", url, headers={"content-type": content_type}, content=data)
        except FetchRefused as error:
            raise OutputRejected(error.message) from error
        except (FetchFailed, Overloaded) as error:
            raise OutputNotSent(error.message) from error
        check_response(response)

    async def _put_object(self, bucket: str, key: str, file: File) -> None:
        try:
            await self._buckets.find(bucket).put(key, *file)
        except (Unavailable, NotFound) as error:
            log.warning("output_bucket_failed", bucket=bucket, error=error.message)
            raise OutputNotSent(error.public) from error


def check_response(response: FetchResponse) -> None:
    """Raise `OutputRejected` or `OutputNotSent` unless the PUT succeeded.

    Of the body only S3's error code is shown: the rest can repeat the signature.
    """
    status = response.status
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise OutputRejected("the URL redirects; sign its final address")
    code = _ERROR_CODE.search(response.body or b"")
    reason = f"the URL responded with status {status}{f' ({code[1].decode()})' if code else ''}"
    raise OutputNotSent(reason) if is_busy(status) else OutputRejected(reason)
