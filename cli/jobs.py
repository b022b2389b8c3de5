"""Commands that list jobs and the service: status, jobs, queues and workers."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from cli.client_options import Chosen, Json, Key, Url, connected, name_option, takes
from cli.matching import JOB_FILTERS, filters_of
from cli.messages import print_error, readable
from cli.submit import JobId, print_job
from cli.tables import age
from fusequeue import Job, QueueDepth, WorkerInfo

WORKER_COLUMNS = ("id", "state", "device", "slots in use", "memory", "rows per forward", "models")
OfTenant = Annotated[
    str | None, typer.Option("--tenant", help="Its jobs, for keys with the scope admin.", callback=name_option)
]
Limit = Annotated[int, typer.Option(min=1, help="How many, newest first.")]


def status(job_id: JobId, tenant: OfTenant = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show a job: its state and, while it is queued, its position, why it waits and when it is expected to end."""
    with connected(url, api_key, as_json) as (client, console):
        print_job(console, client.get(job_id, tenant=tenant))


@takes(JOB_FILTERS)
def jobs(chosen: Chosen, limit: Limit = 20, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List jobs, newest first."""
    with connected(url, api_key, as_json) as (client, console):
        listed = client.jobs(limit=limit, **filters_of(chosen))
        console.table(listed, ("id", "status", "model", "age", "prompt"), _row)


def queues(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List queued and running jobs by signature, the longest queue first."""
    with connected(url, api_key, as_json) as (client, console):
        console.table(client.queues(), ("signature", "model", "queued", "running", "oldest"), _queue_row)


def workers(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List the workers that are alive, with their state, slots in use and models."""
    with connected(url, api_key, as_json) as (client, console):
        alive = client.workers()
        console.table(alive, WORKER_COLUMNS, worker_row)
        for worker in alive:
            if worker.models_fault is not None and not as_json:
                print_error(f"{worker.id} serves the models before a change of its file: {worker.models_fault}")


def _row(job: Job) -> tuple[object, ...]:
    prompt = job.prompt if len(job.prompt) <= 60 else f"{job.prompt[:59]}…"
    status = f"{job.status} {job.progress.percent}%" if job.status == "running" else job.status
    return job.id, status, job.model, age(job.created_at, datetime.now(UTC)), prompt


def _queue_row(queue: QueueDepth) -> tuple[object, ...]:
    oldest = "" if queue.oldest_age_ms is None else f"{queue.oldest_age_ms / 1000:.1f} s"
    return queue.signature, queue.model, sum(queue.jobs.values()), queue.running_jobs, oldest


def worker_row(worker: WorkerInfo) -> tuple[object, ...]:
    """Return the cells of `WORKER_COLUMNS`; memory is that of models on the device."""
    rows = f"{worker.forward_rows / worker.forwards:.1f}" if worker.forwards else ""
    states = {model: worker.memory_state(model).replace("_", " ") for model in worker.models}
    models = [model if state == "loaded" else f"{model} ({state})" for model, state in states.items()]
    slots = f"{worker.slots - worker.free_slots} of {worker.slots}"
    return worker.id, worker.state, worker.device, slots, readable(worker.models_bytes), rows, models
