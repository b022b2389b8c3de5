"""The command `fusequeue batches`: batches of requests in one file, with their progress and the time left."""

import time
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from cli.client_options import Json, Key, Url, connected, name_option
from cli.jobs import Limit
from fusequeue import Batch

COLUMNS = ("id", "status", "ended", "failed", "time left", "created", "endpoint")


def batches(
    batch_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Only this batch.", callback=name_option)
    ] = None,
    limit: Limit = 20,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """List batches with their progress and the time left, or show one."""
    with connected(url, api_key, as_json) as (client, console):
        if batch_id is None:
            console.table(client.batches.list(limit=limit), COLUMNS, lambda one: batch_row(one, time.time()))
            return
        batch = client.batches.get(batch_id)
        faults = [("error", fault.message) for fault in batch.errors.data] if batch.errors else []
        files = (("results", batch.output_file_id), ("failures", batch.error_file_id))
        rows = zip(COLUMNS, batch_row(batch, time.time()), strict=True)
        console.record(batch, (*rows, *((name, file) for name, file in files if file), *faults))


def batch_row(batch: Batch, now: float) -> tuple[object, ...]:
    """Return the cells of `COLUMNS` at a time in seconds since the epoch."""
    counts = batch.request_counts
    left_s = time_left_s(batch, now)
    left = "" if left_s is None else str(timedelta(seconds=round(left_s)))
    ended = f"{counts.completed + counts.failed} of {counts.total}"
    created = f"{datetime.fromtimestamp(batch.created_at, UTC):%Y-%m-%d %H:%M:%S}"
    return batch.id, batch.status, ended, counts.failed, left, created, batch.endpoint


def time_left_s(batch: Batch, now: float) -> float | None:
    """Return the seconds until a batch ends at its mean rate so far; None: it does not run, or no request has ended."""
    ended = batch.request_counts.completed + batch.request_counts.failed
    if batch.status != "in_progress" or batch.in_progress_at is None or not ended:
        return None
    return max(0.0, now - batch.in_progress_at) / ended * (batch.request_counts.total - ended)
