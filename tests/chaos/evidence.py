"""Everything that a run leaves: responses, records, stored objects, events, forwards and webhooks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import redis
from harness.s3_process import admin

from chaos.client import Client
from chaos.monitor import Monitor
from chaos.processes import BUCKET, Cluster
from chaos.request import Request
from chaos.sleeping_engine import Forward, read_journal
from shared.job_record import JobRecord
from shared.queue.records import record

_CHUNK = 500


@dataclass(frozen=True)
class Evidence:
    """All that is known after a run.

    `webhooks`: (webhook id, job, type) of each one received. `lost_pids`: the workers that were killed or stopped.
    `retained`: jobs whose files a later sweep deletes.
    """

    requests: Sequence[Request]
    records: Mapping[str, JobRecord]
    objects: Mapping[str, bytes]
    monitor: Monitor
    forwards: Sequence[Forward]
    lost_pids: Set[int]
    webhooks: Sequence[tuple[str, str, str]] | None
    leftovers: Sequence[str]
    retained: Set[str]
    dead_letters: int

    def ends(self) -> Iterator[tuple[str, str]]:
        """Yield the jobs that have ended with their states, also the deleted ones."""
        yield from ((job_id, known.state) for job_id, known in self.records.items() if known.state.terminal)
        deleted = {job_id for request in self.requests for job_id in request.deleted}
        yield from ((job_id, state) for job_id in deleted for state in self.monitor.ends[job_id])


def collect(
    cluster: Cluster,
    client: Client,
    monitor: Monitor,
    lost_pids: Set[int],
    webhooks: Iterable[tuple[Mapping[str, str], str]] | None = None,
) -> Evidence:
    """Read everything that a run has left."""
    received = None
    if webhooks is not None:
        bodies = [(headers["webhook-id"], json.loads(body)) for headers, body in webhooks]
        received = [(name, body["data"]["id"], body["type"]) for name, body in bodies]
    with redis.Redis(port=monitor.port, decode_responses=True, socket_timeout=30) as connection:
        return Evidence(
            requests=client.requests,
            records=_records(connection, cluster),
            objects=dict(_objects(cluster)),
            monitor=monitor,
            forwards=list(read_journal(cluster.journal)),
            lost_pids=lost_pids,
            webhooks=received,
            leftovers=_leftovers(connection, cluster),
            retained={row.split("|")[2] for row in connection.zrange(cluster.keys.retention, 0, -1)},
            dead_letters=int(connection.zcard(cluster.keys.dead_letters)),
        )


def _records(connection: Any, cluster: Cluster) -> dict[str, JobRecord]:
    prefix = cluster.keys.job("")
    names = [str(name) for name in connection.scan_iter(match=f"{prefix}*", count=1000)]
    found = {}
    for first in range(0, len(names), _CHUNK):
        pipe = connection.pipeline(transaction=False)
        for name in names[first : first + _CHUNK]:
            pipe.hgetall(name)
        for name, fields in zip(names[first : first + _CHUNK], pipe.execute(), strict=True):
            if known := record(fields):
                found[name.removeprefix(prefix)] = known
    return found


def _leftovers(connection: Any, cluster: Cluster) -> list[str]:
    """Return the indexes of queued and running jobs that are not empty although all jobs have ended."""
    keys = cluster.keys
    names = [keys.leases, keys.claimed_jobs, keys.queued_jobs, keys.deadlines, keys.signatures, keys.running_slots]
    names += [keys.paused, keys.later, keys.ended_parents]
    for family in (keys.paused_jobs, keys.later_jobs, keys.children, keys.told, keys.dependents):
        names += connection.scan_iter(match=f"{family('')}*", count=1000)
    return [str(name) for name in names if connection.exists(name)]


def _objects(cluster: Cluster) -> Iterable[tuple[str, bytes]]:
    if not cluster.uses_s3:
        for path in cluster.storage.rglob("*"):
            if path.is_file() and ".incomplete" not in path.parts:
                yield path.relative_to(cluster.storage).as_posix(), path.read_bytes()
        return
    client = admin(f"http://127.0.0.1:{cluster.s3_port}")
    print("  reading the stored objects", flush=True)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for entry in page.get("Contents", ()):
            yield entry["Key"], client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
