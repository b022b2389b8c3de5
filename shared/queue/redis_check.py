"""Checks of the queue's Redis for an operator: version, settings, memory, clock and schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from shared.job import SCHEMA_VERSION
from shared.queue.client import QueueClient, schema_remedy, translated
from shared.runtime.clock import now_ms

LEAST_VERSION = (6, 2)
MOST_SKEW_MS = 5_000
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
        seconds, micros = await client.redis.time()
        schema = int(await client.redis.get(client.redis_keys.schema) or 0)
        try:
            info = await client.redis.info("everything")
        except ResponseError:  # some services do not allow INFO
            info = {}
    skew_ms = now_ms() - (int(seconds) * 1000 + int(micros) // 1000)
    return [*traits(info), _clock(skew_ms), _schema(schema)]


def traits(info: Mapping[str, Any]) -> list[RedisTrait]:
    """Return the findings in Redis' INFO, which is empty if it is not allowed."""
    if not info:
        return [RedisTrait("redis settings", "INFO is not allowed for this user", "allow INFO, to see the settings")]
    return [_version(info), _policy(info), _durability(info), _memory(info)]


def _version(info: Mapping[str, Any]) -> RedisTrait:
    version = str(info.get("redis_version", "0"))
    known = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    remedy = "" if known >= LEAST_VERSION else "upgrade Redis to 6.2 or later"
    return RedisTrait("redis version", version, remedy, fatal=True)


def _policy(info: Mapping[str, Any]) -> RedisTrait:
    policy = str(info.get("maxmemory_policy", "noeviction"))
    remedy = "redis-cli CONFIG SET maxmemory-policy noeviction, and set it in redis.conf: eviction loses jobs"
    return RedisTrait("redis eviction", policy, "" if policy == "noeviction" else remedy, fatal=True)


def _durability(info: Mapping[str, Any]) -> RedisTrait:
    if not int(info.get("aof_enabled", 0)):
        remedy = "redis-cli CONFIG SET appendonly yes, and set it in redis.conf: a restart loses the jobs"
        return RedisTrait("redis durability", "appendonly no", remedy)
    if info.get("aof_last_write_status", "ok") != "ok":
        return RedisTrait(
            "redis durability", "the last write to disk failed", "free disk space, and read the Redis log"
        )
    return RedisTrait("redis durability", "appendonly yes")


def _memory(info: Mapping[str, Any]) -> RedisTrait:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    seen = f"{used / 2**20:.0f} MiB used" + (f" of {most / 2**20:.0f} MiB" if most else ", no maxmemory")
    full = most and used > FULL_MEMORY * most
    return RedisTrait("redis memory", seen, "raise maxmemory, or lower FUSEQUEUE_MAX_QUEUED_JOBS" if full else "")


def _clock(skew_ms: int) -> RedisTrait:
    remedy = "synchronize the clocks of both machines (NTP)" if abs(skew_ms) > MOST_SKEW_MS else ""
    return RedisTrait("redis clock", f"{skew_ms / 1000:+.1f} s from this machine", remedy)


def _schema(version: int) -> RedisTrait:
    version = version or SCHEMA_VERSION  # an empty Redis has none yet
    same = version == SCHEMA_VERSION
    remedy = "" if same else f"{schema_remedy(version)} (this program has schema {SCHEMA_VERSION})"
    return RedisTrait("queue schema", str(version), remedy, fatal=True)
