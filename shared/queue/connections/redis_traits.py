"""What the queue needs of a Redis: version, settings, memory, clock and schema, with a remedy for each problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from shared.config.settings import Settings
from shared.job import QUEUE_SCHEMA
from shared.queue.connections.errors import translated
from shared.runtime.clock import now_ms

if TYPE_CHECKING:
    from shared.queue.client import QueueClient

LEAST_VERSION = (6, 2)
MOST_SKEW_MS = 5_000
CLUSTER_REMEDY = "set FUSEQUEUE_RQ_REDIS_URL to a Redis that is no cluster: the chores (rq) need one"
FULL_MEMORY = 0.9
"""Fraction of maxmemory above which a submit can fail at any moment."""


@dataclass(frozen=True)
class RedisTrait:
    """One finding: `remedy` is empty if it is good; `fatal` if nothing works without it."""

    name: str
    seen: str
    remedy: str = ""
    fatal: bool = False


async def examine(client: QueueClient) -> list[RedisTrait]:
    """Return version, settings, memory, clock and schema of Redis; raises `RedisUnavailable`."""
    with translated():
        version = int(await client.redis.get(client.redis_keys.schema) or QUEUE_SCHEMA)  # an empty Redis has none
        try:
            info = await client.redis.info("everything")
        except ResponseError:  # some services do not allow INFO
            info = {}
    skew_ms = now_ms() - await client.now_ms()
    clock = "synchronize the clocks of both machines (NTP)" if abs(skew_ms) > MOST_SKEW_MS else ""
    schema = f"{schema_remedy(version)} (this program has schema {QUEUE_SCHEMA})" if version != QUEUE_SCHEMA else ""
    return [
        *_traits(info),
        *_cluster(info, client.settings),
        RedisTrait("redis clock", f"{skew_ms / 1000:+z.1f} s from this machine", clock),
        RedisTrait("queue schema", str(version), schema, fatal=True),
    ]


def _traits(info: Mapping[str, Any]) -> list[RedisTrait]:
    """Return the findings in Redis' INFO, which is empty if it is not allowed."""
    if not info:
        return [RedisTrait("redis settings", "INFO is not allowed for this user", "allow INFO, to see the settings")]
    version, policy = str(info.get("redis_version", "0")), str(info.get("maxmemory_policy", "noeviction"))
    known = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    upgrade = "" if known >= LEAST_VERSION else "upgrade Redis to 6.2 or later"
    keep = "redis-cli CONFIG SET maxmemory-policy noeviction, and set it in redis.conf: eviction loses jobs"
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    memory = f"{used / 2**20:.0f} MiB used" + (f" of {most / 2**20:.0f} MiB" if most else ", no maxmemory")
    full = most and used > FULL_MEMORY * most
    return [
        RedisTrait("redis version", version, upgrade, fatal=True),
        RedisTrait("redis eviction", policy, "" if policy == "noeviction" else keep, fatal=True),
        durability(info),
        RedisTrait("redis memory", memory, "raise maxmemory, or lower FUSEQUEUE_MAX_QUEUED_JOBS" if full else ""),
    ]


def is_cluster(info: Mapping[str, Any]) -> bool:
    """Return whether a Redis, by its INFO, is a node of a cluster."""
    return bool(int(info.get("cluster_enabled", 0)))


def _cluster(info: Mapping[str, Any], settings: Settings) -> list[RedisTrait]:
    if not is_cluster(info):
        return []
    remedy = CLUSTER_REMEDY if settings.rq_redis_url is None else ""
    return [RedisTrait("redis cluster", "one of its primaries serves this namespace", remedy, fatal=True)]


def schema_remedy(version: int) -> str:
    """Return what to do about a queue of another schema version."""
    if version > QUEUE_SCHEMA:
        return "upgrade this program"
    return (
        "finish its jobs with the earlier version of fusequeue, then start this one with another "
        "FUSEQUEUE_NAMESPACE, an empty Redis or, for `fusequeue up`, another --data-dir"
    )


def durability(info: Mapping[str, Any]) -> RedisTrait:
    """Return whether a restart of this Redis, by its INFO, keeps the jobs."""
    if not int(info.get("aof_enabled", 1)):
        remedy = "redis-cli CONFIG SET appendonly yes, and set it in redis.conf: a restart loses the jobs"
        return RedisTrait("redis durability", "appendonly no", remedy)
    if info.get("aof_last_write_status", "ok") != "ok":
        seen, remedy = "the last write to disk failed", "free disk space, and read the Redis log"
        return RedisTrait("redis durability", seen, remedy)
    return RedisTrait("redis durability", "appendonly yes")
