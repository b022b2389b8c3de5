"""The lines of a backfill on their way: submits, lists and downloads overlap, so that workers never wait for files."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from cli.backfill.ledger import Entry, EntryState, Ledger
from cli.backfill.prompts import file_name
from cli.backfill.uploads import Uploads
from fusequeue import AsyncClient, Busy, Invalid, InvalidArgument, Job, LineFailure, LineResult, NotFound, RefusedError
from fusequeue.bulk_lines import with_jobs
from fusequeue.params import JobParams
from fusequeue.transport import RETRIED
from shared.start_times import MAX_WAIT_S, due_ms

Refusal: TypeAlias = LineFailure | Busy
T = TypeVar("T")

CHUNK_LINES = 250  # per request; a line always belongs to the same chunk, so its idempotency key never changes
DOWNLOADS = 8  # concurrent
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 3.0
SERVICE_FULL = frozenset({429, 503})  # or unavailable: no fault of a line
NOT_OF_THE_LINE = RETRIED | {401}  # of a download: the service is full or unavailable, or refuses the API key
RATE_LIMITED = 429  # of a whole request: it is sent again when the service allows it
MADE_WITH = (
    *("model", "seed", "width", "height", "frames", "fps", "steps", "guidance_scale", "scheduler", "strength"),
    *("guidance_scale_2", "scheduler_options", "step_cache", "refiner_start", "layers", "duration_s", "best_of"),
)


class EveryLineRefused(Exception):
    """The service refuses all lines for the same reason: the header or an option is wrong."""


@dataclass(frozen=True)
class BackfillOptions:
    """Results go to `folder`; files that lines name are relative to `files`. `in_flight` limits the jobs queued or
    running at a time, `attempts` the submits and jobs of one line."""

    folder: Path
    in_flight: int = 1_000
    attempts: int = 3
    files: Path = Path()


class Backfill:
    """Submits and saves all lines of a ledger.

    One task submits, one lists the jobs that have ended, and `DOWNLOADS` save their results. At most `in_flight` jobs
    are queued or running, and at most as many have ended and wait to be saved: with more, listing pauses, and so does
    submitting. Calls `on_refusal` for each line, and each request, that the service refuses for now, and `on_jobs` when
    there are jobs. Raises `EveryLineRefused` before any line is recorded if no line can be submitted.
    """

    def __init__(
        self,
        client: AsyncClient,
        ledger: Ledger,
        options: BackfillOptions,
        on_refusal: Callable[[Refusal], None],
        on_jobs: Callable[[], None],
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._options = options
        self._on_refusal = on_refusal
        self._on_jobs = on_jobs
        self._uploads = Uploads(client, options.files)
        self._in_flight: dict[str, Entry] = {}  # by job
        self._ended: asyncio.Queue[tuple[Entry, Job | None]] = asyncio.Queue(options.in_flight)
        self._has_submitted = asyncio.Event()
        self._can_submit = asyncio.Event()
        self._finished = asyncio.Event()

    async def run(self) -> None:
        """Run until every line is done or failed."""
        self._in_flight = {entry.job: entry for entry in self._ledger.entries(EntryState.SUBMITTED) if entry.job}
        if self._in_flight:
            self._on_jobs()
        self._check_finished()
        parts = (
            self._finished.wait(),
            self._submit_all(),
            self._list_all(),
            *(self._save_all() for _ in range(DOWNLOADS)),
        )
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _submit_all(self) -> None:
        """Submit lines whenever enough jobs have ended."""
        pause_s = MIN_PAUSE_S
        while True:
            self._can_submit.clear()
            entries = self._ledger.entries(
                EntryState.NEW, lines_to_submit(len(self._in_flight), self._options.in_flight)
            )
            if not entries:
                await self._can_submit.wait()
            elif await self._submit(entries):
                pause_s = MIN_PAUSE_S
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(MAX_PAUSE_S, pause_s * 1.5)

    async def _submit(self, entries: Sequence[Entry]) -> int:
        """Submit lines and return how many were accepted or refused.

        Idempotency keys are the same after a crash, and after a correction of the file: a line has a fixed position in
        its chunk, and each of its attempts a key.
        """
        submitted = 0
        for (attempt, edition, chunk), group in groupby(sorted(entries, key=_chunk_of), _chunk_of):
            lines = {entry.place % CHUNK_LINES + 1: entry for entry in group}
            submitted += await self._submit_lines(lines, self._ledger.key(chunk, attempt, edition))
        return submitted

    async def _submit_lines(self, lines: Mapping[int, Entry], key: str) -> int:
        """Submit the lines of one request, by position; a line that is refused for now stays NEW and does not count."""
        accepted: dict[str, Entry] = {}
        refused: list[tuple[int, str]] = []
        failed: list[tuple[Entry, str, bool]] = []
        results = await self._when_allowed(lambda: self._results(lines, key))
        self._check_refused(results)
        for result in results:
            entry, error = lines[result.line], result.error
            if error is None:
                job_id = result.id or ""
                accepted[job_id] = replace(entry, job=job_id)
            elif not error.retryable:
                refused.append((entry.number, f"{error.message} ({error.code})"))
            elif error.status in SERVICE_FULL:
                self._on_refusal(error)
            else:  # the line itself can be the reason: the URL of its image does not respond
                failed.append(self._failure(entry, f"{error.message} ({error.code})"))
        jobs = [(entry.number, job_id, None) for job_id, entry in accepted.items()]
        self._ledger.submitted([*jobs, *((number, None, error) for number, error in refused)])
        self._ledger.failed(failed)
        self._in_flight |= accepted
        if accepted:
            self._on_jobs()
        self._has_submitted.set()
        self._check_finished()
        return len(accepted) + len(refused) + len(failed)

    def _check_refused(self, results: Sequence[LineResult]) -> None:
        """Raise `EveryLineRefused` if the lines of the first request have a fault that the others have too."""
        if not self._ledger.is_untouched() or (fault := common_fault(results)) is None:
            return
        counts = self._ledger.counts()
        count, total = len(results), counts[EntryState.NEW] + counts[EntryState.WAITING]
        error = results[0].error
        field = ((error.param if error is not None else None) or "").partition(".")[0]
        if count == total or (field and _is_of_all(field, self._ledger)):
            lines = f"all {total} lines are" if count == total else f"the first {count} of {total} lines are"
            raise EveryLineRefused(f"{lines} refused: {fault}")

    async def _results(self, lines: Mapping[int, Entry], key: str) -> list[LineResult]:
        """Upload the files of lines, submit the lines, and return what becomes of each."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {at: group.create_task(self._body(entry)) for at, entry in lines.items()}
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        made = {at: task.result() for at, task in tasks.items()}
        bodies = [None if isinstance(body := made.get(at), LineFailure) else body for at in range(1, CHUNK_LINES + 1)]
        failures = [LineResult(line=at, error=error) for at, error in made.items() if isinstance(error, LineFailure)]
        return failures + [result async for result in self._client.submit_many(bodies, idempotency_key=key)]

    async def _when_allowed(self, request: Callable[[], Awaitable[T]]) -> T:
        """Return what a request returns; while the service limits the tenant's rate, wait as long as it says."""
        pause_s = MIN_PAUSE_S
        while True:
            try:
                return await request()
            except Busy as error:
                if error.status != RATE_LIMITED:
                    raise
                self._on_refusal(error)
                await asyncio.sleep(max(pause_s, error.retry_after_s or 0.0))
                pause_s = min(MAX_PAUSE_S, pause_s * 1.5)

    async def _body(self, entry: Entry) -> dict[str, Any] | LineFailure:
        """Return the body of a line for the service, or what is wrong with one of its files."""
        group = {} if self._ledger.group is None else {"group": self._ledger.group}
        body = self._with_parents(entry)
        try:
            body = await self._uploads.body(body)
        except InvalidArgument as error:
            message = str(error)
            return LineFailure(code="invalid_input_image", message=message, param=message.partition(":")[0])
        except Invalid as error:
            return LineFailure(code=error.code, message=str(error), param=error.param, status=error.status)
        if "not_before" in body:
            body["not_before"] = start_of(body["not_before"], self._ledger.began_at_ms)
        return {"priority": "bulk", **group, **body, "batch_id": self._ledger.run_id}

    def _with_parents(self, entry: Entry) -> dict[str, Any]:
        """Return the body of a line with jobs in place of keys; in `after` it names none: its parents have ended."""
        jobs = self._ledger.parent_jobs(entry.number)
        body = with_jobs(entry.body, lambda _, name: jobs.get(name, name))
        if isinstance(named := entry.body.get("after"), list):
            body["after"] = [name for name in named if name not in jobs]
        body.pop("key", None)
        return body

    async def _list_all(self) -> None:
        """Hand over the jobs that have ended, while there are jobs in flight."""
        pause_s = MIN_PAUSE_S
        while True:
            if not self._in_flight:
                self._has_submitted.clear()
                await self._has_submitted.wait()
            started = time.monotonic()
            ended = await self._when_allowed(self._list_ended)
            listing_s = time.monotonic() - started
            for entry, job in ended:
                await self._ended.put((entry, job))
                del self._in_flight[entry.job or ""]
                self._can_submit.set()
            # A list costs the service a page per hundred jobs: limited to a quarter of the time.
            pause_s = MIN_PAUSE_S if ended else min(MAX_PAUSE_S, pause_s * 1.5)
            await asyncio.sleep(max(pause_s, 3 * listing_s))

    async def _list_ended(self) -> list[tuple[Entry, Job | None]]:
        """Return the lines in flight whose jobs have ended; without a job if it no longer exists."""
        unlisted = {**self._in_flight}
        ended: list[tuple[Entry, Job | None]] = []
        async with aclosing(self._client.jobs(batch_id=self._ledger.run_id)) as jobs:
            async for job in jobs:
                entry = unlisted.pop(job.id, None)
                if entry is not None and job.ended:
                    ended.append((entry, job))
                if not unlisted:
                    break
        for job_id, entry in unlisted.items():  # deleted, or past their retention
            unlisted_job = await self._get(job_id)
            if unlisted_job is None or unlisted_job.ended:
                ended.append((entry, unlisted_job))
        return ended

    async def _get(self, job_id: str) -> Job | None:
        try:
            return await self._client.get(job_id)
        except NotFound:
            return None

    async def _save_all(self) -> None:
        """Save the results of jobs that have ended."""
        while True:
            entry, job = await self._ended.get()
            if job is None:
                self._failed(entry, "the job no longer exists: deleted, or past its retention", retry=False)
            elif job.status != "succeeded":
                failure = f"{job.error.message} ({job.error.code})" if job.error else job.status
                self._failed(entry, failure, retry=bool(job.error and job.error.retryable))
            else:
                await self._download(entry, job)
            self._can_submit.set()  # a line that fails can have another attempt; others can have waited for this one
            self._check_finished()

    async def _download(self, entry: Entry, job: Job) -> None:
        name = file_name(entry.number, job.prompt, self._ledger.edition)
        try:
            files = await self._when_allowed(lambda: self._client.download(job, self._options.folder, name=name))
        except RefusedError as error:
            if error.status in NOT_OF_THE_LINE:
                raise
            self._failed(entry, f"its image cannot be read: {error.message} ({error.code})", retry=False)
        else:
            self._ledger.done(entry.number, [file.name for file in files], job.flagged, made_with(job))

    def _failed(self, entry: Entry, error: str, *, retry: bool) -> None:
        self._ledger.failed([self._failure(entry, error, retry=retry)])

    def _failure(self, entry: Entry, error: str, *, retry: bool = True) -> tuple[Entry, str, bool]:
        """Return a failed attempt for the ledger; with `retry` another one follows, up to the limit."""
        return entry, error, retry and entry.failed_attempts + 1 < self._options.attempts

    def _check_finished(self) -> None:
        if self._ledger.is_finished():
            self._finished.set()


def _chunk_of(entry: Entry) -> tuple[int, int, int]:
    return entry.failed_attempts, entry.edition, entry.place // CHUNK_LINES


def common_fault(results: Sequence[LineResult]) -> str | None:
    """Return why all of several lines are refused for good, if it is one field of all of them; else None."""
    errors = [result.error for result in results if result.error is not None and not result.error.retryable]
    if len(results) < 2 or len(errors) < len(results) or len({(error.code, error.param) for error in errors}) > 1:
        return None
    return f"{errors[0].message} ({errors[0].code})"


def made_with(job: Job) -> dict[str, Any]:
    """Return what the service has chosen, for a request for the same; and the device seconds.

    Models refuse what they do not have, as the `layers` of an image without any.
    """
    values = job.model_dump(mode="json", include=set(MADE_WITH), exclude_none=True)
    unused = {name for name in values if values[name] == Job.model_fields[name].default}
    if any(artifact.kind == "audio" for artifact in job.artifacts):
        unused |= {"width", "height"}
    chosen = {name: values[name] for name in MADE_WITH if name in values and name not in unused}
    return {**chosen, "device_seconds": job.metrics.device_seconds}


def _is_of_all(field: str, ledger: Ledger) -> bool:
    """Return whether the fault of a field is that of all lines: they have one value of it, or no job has the field."""
    if field not in {*JobParams.__annotations__, "model", "prompt"}:
        return ledger.all_have(field)
    return ledger.have_in_common(field)


def start_of(not_before: Any, began_at_ms: int) -> Any:
    """Return `not_before` of a line with a delay as a time after the start of the backfill.

    So lines that are submitted later wait no longer, and one that is submitted again is the same request. The service
    refuses what is no delay.
    """
    if isinstance(not_before, bool) or not isinstance(not_before, int | float) or not 0 <= not_before <= MAX_WAIT_S:
        return not_before
    return datetime.fromtimestamp(due_ms(not_before, began_at_ms) / 1000, UTC).isoformat()


def lines_to_submit(in_flight: int, limit: int) -> int:
    """Return how many lines to submit: none until a quarter of the limit is free, so that requests have many lines."""
    free = limit - in_flight
    return min(free, CHUNK_LINES) if free >= min(CHUNK_LINES, max(1, limit // 4)) else 0
