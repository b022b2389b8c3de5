"""The asynchronous client."""

import asyncio
import inspect
import math
import os
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, Unpack

import httpx

from fusequeue.arguments import callback, finite_seconds, folder_path, key, mapping, path_of, seconds, whole
from fusequeue.bulk_lines import BulkLines, BulkRequests
from fusequeue.errors import Busy, InvalidArgument, Unauthorized, Unreachable, WaitTimeout
from fusequeue.event_stream import read_events
from fusequeue.group_files import GroupDownload, save_group
from fusequeue.image_sources import content, with_references
from fusequeue.job_fields import PriorityName
from fusequeue.job_handle import WAIT_TIMEOUT_S, AsyncJobHandle, OnProgress
from fusequeue.mapping import JobMap, Prompt, job_items
from fusequeue.parameter_texts import with_parameters
from fusequeue.params import ImageFile, StrPath, SubmitParams
from fusequeue.progress_bar import ProgressBar
from fusequeue.resources.adapters import AsyncAdapters
from fusequeue.resources.batches import AsyncBatches
from fusequeue.resources.keys import AsyncKeys
from fusequeue.resources.matching import AsyncMatching, JobFilters, States, job_query, update_body
from fusequeue.resources.operations import AsyncOperations
from fusequeue.resources.webhooks import AsyncWebhooks
from fusequeue.response_types import (
    BULK_ROW,
    Artifact,
    Created,
    Event,
    Job,
    LineResult,
    Result,
)
from fusequeue.result_files import check_folder, file_name, write_file
from fusequeue.service_calls import ServiceCalls
from fusequeue.transport import MAX_RETRY_AFTER_S, Transport, open_client, parsed

DEFAULT_URL = "http://127.0.0.1:8000"
POLL_S = 30.0  # of one request that waits


class AsyncClient(ServiceCalls):
    """A fusequeue service, with its `adapters`, `webhooks`, OpenAI `batches`, `operations`, `keys`, and changes of
    `matching` jobs.

    `base_url` defaults to FUSEQUEUE_URL, else the address of `fusequeue up`; `api_key` to FUSEQUEUE_API_KEY. Failed
    requests are retried up to `retries` times, or for a minute while a known service restarts; Idempotency-Keys keep a
    repeated submit from enqueueing twice. `timeout_s` is that of one request. Use the client as an async context
    manager, or call `aclose`.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        url = base_url or os.environ.get("FUSEQUEUE_URL") or DEFAULT_URL
        token = api_key or os.environ.get("FUSEQUEUE_API_KEY")
        self._timeout_s = finite_seconds("timeout_s", timeout_s)
        super().__init__(Transport(open_client(url, token, self._timeout_s, transport), whole("retries", retries)))
        self.adapters = AsyncAdapters(self._http)
        self.webhooks = AsyncWebhooks(self._http)
        self.operations = AsyncOperations(self._http)
        self.keys = AsyncKeys(self._http)
        self.batches = AsyncBatches(self._http)
        self.matching = AsyncMatching(self._http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.client.aclose()

    @with_parameters
    async def run(
        self,
        /,
        model: str,
        prompt: str | None = None,
        *,
        folder: StrPath | None = None,
        timeout_s: float | None = WAIT_TIMEOUT_S,
        on_progress: OnProgress | None = None,
        **params: Unpack[SubmitParams],
    ) -> Result:
        """Submit a job, wait for it, and return its images, videos, sounds or meshes, also saved in `folder`.

        Raises `JobFailed` if the job ends without a result, and `WaitTimeout` after `timeout_s`; it then continues.
        """
        seconds("timeout_s", timeout_s)
        callback("on_progress", on_progress)
        if folder is not None:
            await asyncio.to_thread(check_folder, folder_path("folder", folder))
        handle = self.job(await self.submit(model, prompt, **params))
        return await handle.result(folder=folder, timeout_s=timeout_s, on_progress=on_progress)

    def job(self, job: Job | str) -> AsyncJobHandle:
        """Return a handle of a job, without a request: `wait`, `result`, `cancel` and others as its methods."""
        return AsyncJobHandle(self, job)

    @with_parameters
    async def map(
        self,
        /,
        model: str,
        prompts: Iterable[Prompt],
        *,
        folder: StrPath | None = None,
        progress: bool = True,
        at_once: int = 64,
        timeout_s: float | None = None,
        **params: Unpack[SubmitParams],
    ) -> AsyncGenerator[Result]:
        """Run a job for each prompt and yield the results in the order of the prompts, with a bar of the jobs.

        A prompt is a text, or the parameters in which its job differs. In `folder` the results are `00000-0.png` and so
        on. At most `at_once` jobs are queued or running; `prompts` can be endless. A job that fails or is refused does
        not end the others: `JobsFailed` is raised after the last result. A fault that all have is raised at once. Jobs
        that have been submitted continue when the loop is left early; a rerun with the same `idempotency_key` finds
        them. A delay of `not_before` counts from the start of the loop.
        """
        seconds("timeout_s", timeout_s)
        if whole("at_once", at_once) == 0:
            raise InvalidArgument("at_once: 0 runs no job; use at least 1")
        parent = None if folder is None else folder_path("folder", folder)
        if parent is not None:
            await asyncio.to_thread(check_folder, parent)
        items = job_items(prompts, {"model": model, **params}, datetime.now(UTC))

        def finish(job: Job) -> Coroutine[Any, Any, Result]:
            return self.job(job).result(timeout_s=timeout_s)

        job_map = JobMap(lambda fields: self.submit(**fields), finish, parent, at_once)
        async with aclosing(job_map.run(items, ProgressBar(prompts, progress))) as results:
            async for result in results:
                yield result

    @with_parameters
    async def submit(self, /, model: str, prompt: str | None = None, **params: Unpack[SubmitParams]) -> Job:
        """Submit a job and return it, queued. Images that the service cannot read itself are uploaded.

        Only models of meshes take no `prompt`.
        """
        fields: dict[str, Any] = {**params}
        headers = {"Idempotency-Key": key(fields.pop("idempotency_key", None), uuid.uuid4().hex)}
        extra = mapping("extra_body", fields.pop("extra_body", None))
        text = {} if prompt is None else {"prompt": prompt}
        body = {"model": model, **text, **await with_references(fields, self.upload), **extra}
        return await self._http.read(Job, "POST", "/v1/jobs", json=body, headers=headers)

    async def submit_many(
        self, bodies: Iterable[Mapping[str, Any] | None], *, idempotency_key: str | None = None
    ) -> AsyncGenerator[LineResult]:
        """Submit any number of jobs and yield their results in order; they are sent as the results are read.

        The bodies are those of `POST /v1/jobs`, with images as ids or URLs. With a `key` of its own, a job can be named
        by it in later bodies, in `after` and as `{"job": key}` in place of an image. A repeated body at the same
        position under the same idempotency key is enqueued once; None leaves a position empty. `bodies` is consumed
        lazily.
        """
        requests = BulkRequests(bodies, idempotency_key)
        for lines in requests:
            results = await self._submit_lines(lines)
            requests.note(results)
            for result in results:
                yield result

    async def _submit_lines(self, lines: BulkLines) -> list[LineResult]:
        """Submit the lines of one request. Lines refused temporarily are sent again among blank lines, and among those
        that they can name by key.

        The service identifies a line by its position, so that none is enqueued twice.
        """
        results = {**lines.refused}
        keyed = {line: text for line, text in lines.texts.items() if line in lines.keyed}
        pending, reason = {**lines.texts}, ""
        headers = {"Idempotency-Key": lines.name, "Content-Type": "application/x-ndjson"}
        for attempt in range(self._http.retries + 1 if pending else 0):
            texts = keyed | pending
            sent = "".join(f"{texts.get(line, '')}\n" for line in range(1, lines.count + 1))
            response = await self._http.send("POST", "/v1/jobs:bulk", content=sent.encode(), headers=headers)
            rows = [parsed(BULK_ROW, line) for line in response.content.splitlines()]
            results |= {row.line: row for row in rows if isinstance(row, LineResult) and row.line in pending}
            reason = next((f": {row.error.message}" for row in rows if not isinstance(row, LineResult)), "")
            done = {line for line, result in results.items() if not (result.error and result.error.retryable)}
            pending = {line: text for line, text in pending.items() if line not in done}
            retry_after_s = max((row.error.retry_after_s or 0 for row in rows if row.error), default=0)
            if not pending or not await self._http.pause(attempt, retry_after_s or None):
                break
        if missing := lines.texts.keys() - results.keys():
            raise Unreachable(f"{len(missing)} of {len(lines.texts)} lines got no response{reason}")
        return [results[line].model_copy(update={"line": lines.first + line - 1}) for line in sorted(results)]

    async def upload(self, image: ImageFile) -> str:
        """Upload an image as an input for jobs and return its id; a text is the path of its file."""
        file = await content(image)
        return (await self._http.read(Created, "POST", "/v1/inputs", files={"file": file})).id

    async def get(self, job: Job | str, *, wait_s: float | None = None, tenant: str | None = None) -> Job:
        """Return a job as it is now; with `wait_s`, when it has ended or after that time.

        With a key of the scope `admin`, it can be a job of another `tenant`.
        """
        params = {} if tenant is None else {"tenant": tenant}
        options: dict[str, Any] = {}
        if wait_s is not None:
            wait_s = finite_seconds("wait_s", wait_s)
            params["wait"] = f"{wait_s:.3f}"
            options = {"timeout": httpx.Timeout(self._timeout_s + wait_s, pool=None), "waits": True}
        if params:
            options["params"] = params
        return await self._http.read(Job, "GET", path_of("/v1/jobs", job), **options)

    async def wait(
        self, job: Job | str, *, timeout_s: float | None = WAIT_TIMEOUT_S, on_progress: OnProgress | None = None
    ) -> Job:
        """Return the job once it has ended in any state; raises `WaitTimeout` after `timeout_s`, None: never."""
        limit_s = seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + limit_s
        callback("on_progress", on_progress)
        if on_progress is not None and (ended := await self._follow(job, deadline, on_progress)) is not None:
            return ended
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                async with asyncio.timeout(None if left == math.inf else left + self._timeout_s):  # retries take longer
                    current = await self.get(job, wait_s=min(POLL_S, left))
            except TimeoutError as error:
                raise Unreachable(f"{self._http.client.base_url}: no response in {limit_s:g} s") from error
            if current.ended:
                return current
            if time.monotonic() >= deadline:
                raise WaitTimeout(current, limit_s)

    async def _follow(self, job: Job | str, deadline: float, on_progress: OnProgress) -> Job | None:
        """Pass a job's events on until it ends; None at the deadline, or where no stream is to be had."""
        events = self.events(job)
        async with aclosing(events):
            while True:
                try:
                    left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
                    next_event = await asyncio.wait_for(anext(events), left)
                except (TimeoutError, Unreachable, Busy):
                    return None
                outcome = on_progress(next_event)
                if inspect.isawaitable(outcome):
                    await outcome
                if next_event.job is not None:
                    return next_event.job

    async def events(self, job: Job | str) -> AsyncGenerator[Event]:
        """Yield the current state, every change and step, and last the whole job; reconnects when the stream breaks."""
        path, last_id, failures = path_of("/v1/jobs", job, "/events"), "", 0
        while True:
            retry_after_s: float | None = None
            try:
                async with aclosing(read_events(self._http, path, last_id, self._timeout_s)) as stream:
                    async for event_id, job_event in stream:
                        last_id, failures = event_id or last_id, 0
                        yield job_event
                        if job_event.job is not None:
                            return
            except (Unreachable, Busy) as error:
                retry_after_s = error.retry_after_s if isinstance(error, Busy) else None
                if failures >= self._http.retries or (retry_after_s or 0) > MAX_RETRY_AFTER_S:
                    raise
            current = await self.get(job)  # it may have ended while the stream was broken
            if current.ended:
                yield Event(id=current.id, status=current.status, progress=current.progress, job=current)
                return
            failures += 1
            await self._http.pause(failures, retry_after_s)

    def jobs(
        self,
        *,
        limit: int | None = None,
        status: States = None,
        tenant: str | None = None,
        **filters: Unpack[JobFilters],
    ) -> AsyncGenerator[Job]:
        """Yield jobs, newest first, up to `limit`; only those in one of the states, and that match the filters.

        With a key of the scope `admin`, `tenant` can be another one.
        """
        return self._http.pages(Job, "/v1/jobs", limit, job_query(status, filters, tenant=tenant))

    async def cancel(self, job: Job | str) -> Job:
        """Cancel a job: at once while it is queued, at its next step while it runs."""
        return await self._http.read(Job, "POST", path_of("/v1/jobs", job, "/cancel"))

    async def pause(self, job: Job | str) -> Job:
        """Pause a job until `resume`: at once while it is queued, at its next step while it runs."""
        return await self._http.read(Job, "POST", path_of("/v1/jobs", job, "/pause"))

    async def resume(self, job: Job | str) -> Job:
        """End the pause of a job, which goes on at its step."""
        return await self._http.read(Job, "POST", path_of("/v1/jobs", job, "/resume"))

    async def update(
        self,
        job: Job | str,
        *,
        priority: PriorityName | None = None,
        deadline_s: float | None = None,
        remove_deadline: bool = False,
    ) -> Job:
        """Change the priority or the deadline of a queued job; `deadline_s` counts from now."""
        body = update_body(priority, deadline_s, remove_deadline)
        return await self._http.read(Job, "PATCH", path_of("/v1/jobs", job), json=body)

    async def retry(self, job: Job | str) -> Job:
        """Queue a new job with the parameters of a failed, canceled or expired one; a repetition returns the same."""
        return await self._http.read(Job, "POST", path_of("/v1/jobs", job, "/retry"))

    async def delete(self, job: Job | str) -> None:
        """Delete an ended job and its images."""
        await self._http.send("DELETE", path_of("/v1/jobs", job), removes=True)

    async def download(
        self, job: Job | str, folder: StrPath, *, name: str | None = None, tenant: str | None = None
    ) -> list[Path]:
        """Save results as `folder/name-index.ext`, atomically, and return the files; `name` defaults to the job id.

        With a key of the scope `admin`, it can be a job of another `tenant`.
        """
        parent = await asyncio.to_thread(check_folder, folder_path("folder", folder))
        found = job if isinstance(job, Job) else await self.get(job, tenant=tenant)
        files: list[Path] = []
        for index, artifact in enumerate(found.artifacts):  # one at a time: videos are large
            if artifact.was_sent:
                continue
            try:
                data = await self.read(found.artifacts[index])
            except Unauthorized as error:
                if error.code != "invalid_signature":
                    raise
                # The URLs of a job expire, those of the job as it is now have not.
                found = await self.get(found, tenant=tenant)
                data = await self.read(found.artifacts[index])
            path = parent / file_name(artifact, name or found.id)
            await asyncio.to_thread(write_file, path, data)
            files.append(path)
        return files

    async def read(self, artifact: Artifact | str) -> bytes:
        """Return the bytes of an artifact, or of its URL."""
        url = artifact if isinstance(artifact, str) else artifact.url
        return (await self._http.send("GET", url)).content

    async def download_group(self, name: str, folder: StrPath, *, tenant: str | None = None) -> GroupDownload:
        """Save the files of the jobs of a group that have succeeded, named as in its archive.

        Several jobs are read at a time. A repetition saves the files that the folder lacks.
        """
        parent = await asyncio.to_thread(check_folder, folder_path("folder", folder))
        return await save_group(self, name, parent, tenant)
