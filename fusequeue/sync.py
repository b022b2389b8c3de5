"""The synchronous client: `AsyncClient` on an event loop in a separate thread."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any, Self

from fusequeue.aio import AsyncClient
from fusequeue.bulk_lines import BulkRequests
from fusequeue.job_handle import JobHandle
from fusequeue.loop_thread import Blocking, LoopThread, blocking, iterating
from fusequeue.resources.adapters import AsyncAdapters
from fusequeue.resources.batches import AsyncBatches
from fusequeue.resources.keys import AsyncKeys
from fusequeue.resources.matching import AsyncMatching
from fusequeue.resources.operations import AsyncOperations
from fusequeue.resources.webhooks import AsyncWebhooks
from fusequeue.response_types import Job, LineResult


class Client(Blocking[AsyncClient]):
    """A fusequeue service. The methods are those of `AsyncClient`; safe to use from several threads.

    Use the client as a context manager, or call `close`; one that stays open keeps no script from exiting.
    """

    def __init__(
        self, base_url: str | None = None, *, api_key: str | None = None, timeout_s: float = 60.0, retries: int = 5
    ) -> None:
        client = AsyncClient(base_url, api_key=api_key, timeout_s=timeout_s, retries=retries)
        super().__init__(client, LoopThread(client.aclose))
        self.adapters = SyncAdapters(client.adapters, self._thread)
        self.webhooks = SyncWebhooks(client.webhooks, self._thread)
        self.operations = SyncOperations(client.operations, self._thread)
        self.keys = SyncKeys(client.keys, self._thread)
        self.batches = SyncBatches(client.batches, self._thread)
        self.matching = SyncMatching(client.matching, self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and stop the thread."""
        self._thread.close()

    def submit_many(
        self, bodies: Iterable[Mapping[str, Any] | None], *, idempotency_key: str | None = None
    ) -> Generator[LineResult]:
        """Submit any number of jobs and yield their results in order, as `AsyncClient.submit_many` does."""
        requests = BulkRequests(bodies, idempotency_key)
        for lines in requests:  # in this thread: what makes the bodies can use the client
            results = self._thread.call(self._asynchronous._submit_lines(lines))
            requests.note(results)
            yield from results

    def job(self, job: Job | str) -> JobHandle:
        """Return a handle of a job, without a request: `wait`, `result`, `cancel` and others as its methods."""
        return JobHandle(self._asynchronous.job(job), self._thread)

    run = blocking(AsyncClient.run)
    map = iterating(AsyncClient.map)
    submit = blocking(AsyncClient.submit)
    upload = blocking(AsyncClient.upload)
    get = blocking(AsyncClient.get)
    wait = blocking(AsyncClient.wait)
    events = iterating(AsyncClient.events)
    jobs = iterating(AsyncClient.jobs)
    cancel = blocking(AsyncClient.cancel)
    pause = blocking(AsyncClient.pause)
    resume = blocking(AsyncClient.resume)
    update = blocking(AsyncClient.update)
    retry = blocking(AsyncClient.retry)
    delete = blocking(AsyncClient.delete)
    download = blocking(AsyncClient.download)
    download_group = blocking(AsyncClient.download_group)
    read = blocking(AsyncClient.read)
    groups = iterating(AsyncClient.groups)
    group = blocking(AsyncClient.group)
    models = blocking(AsyncClient.models)
    queues = blocking(AsyncClient.queues)
    workers = blocking(AsyncClient.workers)
    scale = blocking(AsyncClient.scale)
    usage = iterating(AsyncClient.usage)
    dead_letters = iterating(AsyncClient.dead_letters)
    dead_letter = blocking(AsyncClient.dead_letter)
    redrive = blocking(AsyncClient.redrive)
    purge = blocking(AsyncClient.purge)


class SyncWebhooks(Blocking[AsyncWebhooks]):
    """The webhook endpoints of a service: `client.webhooks`."""

    create = blocking(AsyncWebhooks.create)
    list = blocking(AsyncWebhooks.list)
    get = blocking(AsyncWebhooks.get)
    update = blocking(AsyncWebhooks.update)
    delete = blocking(AsyncWebhooks.delete)
    rotate = blocking(AsyncWebhooks.rotate)
    test = blocking(AsyncWebhooks.test)
    secret = blocking(AsyncWebhooks.secret)
    deliveries = iterating(AsyncWebhooks.deliveries)
    delivery = blocking(AsyncWebhooks.delivery)
    redeliver = blocking(AsyncWebhooks.redeliver)


class SyncAdapters(Blocking[AsyncAdapters]):
    """The uploaded adapters of a service: `client.adapters`."""

    create = blocking(AsyncAdapters.create)
    list = iterating(AsyncAdapters.list)
    get = blocking(AsyncAdapters.get)
    delete = blocking(AsyncAdapters.delete)


class SyncOperations(Blocking[AsyncOperations]):
    """What operators do: `client.operations`."""

    pause = blocking(AsyncOperations.pause)
    resume = blocking(AsyncOperations.resume)
    pauses = blocking(AsyncOperations.pauses)
    load_model = blocking(AsyncOperations.load_model)
    unload_model = blocking(AsyncOperations.unload_model)
    pin_model = blocking(AsyncOperations.pin_model)
    unpin_model = blocking(AsyncOperations.unpin_model)
    model_orders = blocking(AsyncOperations.model_orders)
    actions = iterating(AsyncOperations.actions)
    tenants = iterating(AsyncOperations.tenants)
    change_limits = blocking(AsyncOperations.change_limits)
    cost_curves = blocking(AsyncOperations.cost_curves)


class SyncKeys(Blocking[AsyncKeys]):
    """The API keys of a service: `client.keys`."""

    create = blocking(AsyncKeys.create)
    list = iterating(AsyncKeys.list)
    revoke = blocking(AsyncKeys.revoke)


class SyncMatching(Blocking[AsyncMatching]):
    """Changes of all jobs or dead letters that match: `client.matching`."""

    cancel = blocking(AsyncMatching.cancel)
    pause = blocking(AsyncMatching.pause)
    resume = blocking(AsyncMatching.resume)
    update = blocking(AsyncMatching.update)
    retry = blocking(AsyncMatching.retry)
    delete = blocking(AsyncMatching.delete)
    redrive = blocking(AsyncMatching.redrive)
    purge = blocking(AsyncMatching.purge)


class SyncBatches(Blocking[AsyncBatches]):
    """The batches of a service: `client.batches`."""

    create = blocking(AsyncBatches.create)
    get = blocking(AsyncBatches.get)
    list = iterating(AsyncBatches.list)
    cancel = blocking(AsyncBatches.cancel)
    wait = blocking(AsyncBatches.wait)
    results = iterating(AsyncBatches.results)
