"""The names of all keys in the queue's Redis. They are spelled only here; the scripts' `key` table is generated.

Every name begins with the prefix `{fq:<namespace>}:`. The braces are a hash tag: all keys of a namespace lie in one
cluster slot, so a script gets the prefix as KEYS[1] and builds the other names. The attribute is the first part of the
name; `<sig>` is a signature, `<priority>` a name of `Priority` (in Lua its rank). No part contains `|`, the separator.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from shared.job_fields import Priority

RANK_SPAN = 2**42
"""Between the scores of a rank and of the next one in `front`, `solo` and `dated`, as in `queue.lua`."""


class RedisKey:
    """One kind of key: its type and why it does not grow forever.

    That is a `ttl`; a `bound` of what can stay for good; or, for what is gone when no job is queued or running, `live`.
    """

    def __init__(self, kind: str, *, ttl: str = "", bound: str = "", live: str = "") -> None:
        self.kind, self.ttl, self.bound, self.live = kind, ttl, bound, live
        self.name = ""
        self.parts: tuple[str, ...] = ()

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def lua(self) -> str:
        """Return the key's definition in Lua."""
        return f"key.{self.name} = PREFIX .. '{self.name}'"


class _Single(RedisKey):
    """A key of which a namespace has one."""

    def __get__(self, keys: RedisKeys, owner: type) -> str:
        return keys.prefix + self.name


class _Family(RedisKey):
    """Keys with variable parts, separated by `|`."""

    def __init__(self, parts: str, kind: str, *, ttl: str = "", bound: str = "", live: str = "") -> None:
        super().__init__(kind, ttl=ttl, bound=bound, live=live)
        self.parts = tuple(parts.split())

    def __get__(self, keys: RedisKeys, owner: type) -> Callable[..., str]:
        return partial(self._build, keys.prefix)

    def _build(self, prefix: str, *parts: str) -> str:
        if len(parts) != len(self.parts):
            raise TypeError(f"{self.name} takes the parts {', '.join(self.parts)}, not {len(parts)} values")
        return f"{prefix}{self.name}:{'|'.join(parts)}"

    def lua(self) -> str:
        values = " .. '|' .. ".join("RANKS[priority]" if part == "priority" else part for part in self.parts)
        return f"function key.{self.name}({', '.join(self.parts)}) return PREFIX .. '{self.name}:' .. {values} end"


class RedisKeys:
    """The key names of one namespace."""

    schema = _Single("string", bound="one number")
    # Jobs and the queue
    job = _Family("id", "hash", bound="the quota of kept jobs", ttl="once it has ended and has no dependents")
    lane = _Family("sig priority tenant", "stream", live="holds jobs; deleted when empty")
    lanes = _Family("sig priority", "zset", live="lanes with queued jobs")
    front = _Family("sig", "zset", live="queued jobs that were released or skipped")
    solo = _Family("sig", "zset", live="queued jobs that a worker lost")
    dated = _Family("sig", "zset", live="queued jobs with a deadline, by latest start")
    returned = _Family("sig priority tenant", "zset", live="queued jobs of a lane that are not in its stream")
    lane_order = _Family("sig priority", "zset", live="tenants with queued jobs, by GPU usage")
    tenant_order = _Family("model priority", "zset", live="tenants with queued jobs, by GPU usage")
    tenant_signatures = _Family("tenant model priority", "zset", live="signatures of queued jobs, by the oldest")
    bulk_credit = _Single("hash", ttl="1 h")  # slots due to bulk jobs, by model
    signature = _Family("sig", "hash", live="deleted when nothing is queued or running")
    signatures = _Single("zset", live="live signatures, by slots")
    ready = _Family("model priority", "zset", live="signatures with queued jobs, by readiness")
    arrivals = _Family("sig", "hash", ttl="1 h; without ended jobs 1 min and 10 windows")
    efficient_rows = _Family("sig", "string", ttl="1 d")
    completions = _Single("hash", ttl="1 h")
    queued_jobs = _Single("hash", live="tenants with queued jobs, and `*`")
    gpu_usage = _Single("zset", ttl="1 d")  # decayed GPU-seconds by tenant, pruned
    last_claim = _Family("worker", "string", ttl="lease_ms")  # for a repetition; replaced by the next claim
    leases = _Single("zset", live="running jobs, by end of lease")
    reclaims = _Single("hash", bound="the last reclaim, the last gap between reclaims, and how many were gaps")
    claimed_jobs = _Single("hash", live="workers with running jobs")
    deadlines = _Single("zset", live="queued jobs with a deadline, by latest start")
    late = _Single("zset", live="queued jobs past their latest start, by when they expire")
    paused = _Single("zset", live="paused jobs, by when their pauses end")
    paused_jobs = _Family("tenant", "set", live="paused jobs")
    later = _Single("zset", live="jobs for later, by when they are due")
    later_jobs = _Family("tenant", "set", live="jobs for later")
    children = _Family("id", "zset", live="jobs that wait for the end of a job: 10,000")
    child_jobs = _Family("tenant id", "zset", bound="the last 10,000; deleted with the job")  # also ended ones
    told = _Family("event", "zset", live="those of a job that has ended, until they are told")
    dependents = _Family("id", "zset", live="jobs that start from an artifact of a job, and have not ended: 10,000")
    ended_parents = _Single("zset", live="jobs that have ended and have such, by turns; `state|id|event`")
    told_turns = _Single("hash", live="tenants with ended parents, until all are told: the turn of the next one")
    jobs = _Family("tenant", "zset", bound="the quota of kept jobs")
    videos = _Family("tenant", "zset", bound="the quota of kept jobs")
    batch_jobs = _Family("tenant batch", "zset", bound="the quota of kept jobs")
    groups = _Family("tenant", "zset", bound="1,000 rows")  # by last submit
    group = _Family("tenant group", "hash", bound="as groups: deleted with its last job")
    group_jobs = _Family("tenant group", "zset", bound="the quota of kept jobs")
    group_states = _Family("tenant group", "zset", bound="as group_jobs")  # by state and the time of its beginning
    idempotency = _Family("tenant digest", "string", ttl="idempotency_s; bounded by idempotency_keys")
    idempotency_keys = _Family("tenant", "string", ttl="idempotency_s")  # number of new ones
    events = _Single("stream", bound="about 100,000 entries")
    progress = _Single("channel")  # one message for all jobs
    wakeup = _Family("worker", "list", ttl="10 s")
    waiting = _Family("worker", "string", ttl="its wait")  # what its entries in `waiting_workers` must say
    waiting_workers = _Family("kind name", "zset", ttl="1 min")  # those that wait for a wake-up, by topic
    woken_again = _Family("digest", "string", ttl="1 s")  # when workers of these models were last woken again
    reply = _Family("token", "string", ttl="30 s")  # of a script, for a repetition
    previews = _Family("job", "hash", ttl="1 min")
    sync_calls = _Family("tenant digest", "zset", ttl="sync_wait_s + 1 min, 1,000 rows")  # `job process`
    api_process = _Family("process", "channel")  # without messages: its subscriber is the living process
    usage = _Family("day", "hash", ttl="usage_retention_days; 20,000 rows")  # by tenant and model; days since 1970
    usage_rows = _Family("day", "zset", ttl="as usage")
    spent = _Family("period number", "hash", ttl="a day after its day or month")  # device time by tenant
    # Storage and quotas
    footprint = _Single("hash", bound="four numbers a tenant that keeps something, and `*`")
    input = _Family("tenant id", "hash", bound="the quota of stored objects", ttl="while unused")
    inputs = _Family("tenant", "zset", bound="the quota of stored objects")
    adapter = _Family("tenant id", "hash", bound="adapters of a tenant, until deleted")
    adapters = _Family("tenant", "zset", bound="max_adapters_per_tenant")
    adapter_source = _Family("tenant digest", "string", ttl="input_retention_s")  # of a URL: deleted with its adapter
    model_layers = _Family("model", "string", ttl="30 d")  # that adapters can change, of its last load
    model_inputs = _Family("model", "string", ttl="30 d")  # that have no field of their own, of its last load
    model_facts = _Family("model", "string", ttl="30 d")  # that its files alone say, of its last load
    all_adapters = _Single("zset", bound="max_adapters")  # `tenant|id`
    retention = _Single("zset", bound="kept jobs, inputs, files and adapters, by expiry")
    file = _Family("tenant id", "hash", bound="kept files: retention")
    file_parts = _Family("tenant id", "list", bound="the quota of stored objects")
    files = _Family("tenant", "zset", bound="1,000 rows; kept files")
    # Batches
    batch = _Family("tenant batch", "hash", bound="as batches; 7 d after its end")
    batch_accepted = _Family("tenant batch", "string", bound="as batches; one bit a line")
    active_batches = _Family("tenant", "zset", bound="active batches, by next check")
    batch_tenants = _Single("zset", bound="tenants with active batches, by next turn")
    batches = _Family("tenant", "zset", bound="1,000 rows")
    # Workers
    worker = _Family("id", "hash", ttl="30 s")
    workers = _Single("zset", ttl="1 h")  # pruned at each heartbeat
    worker_start_s = _Single("string", ttl="7 d")
    model_orders = _Single("hash", bound="1,000 orders")  # which models operators want in memory
    model_holders = _Family("model", "zset", ttl="30 s")
    cost_curve = _Family("device model shape", "hash", ttl="30 d")
    cost_device = _Family("model shape", "string", ttl="30 d")
    cost_shapes = _Family("model", "zset", ttl="30 d; 64 rows")  # `device|shape` of its cost curves, by last forward
    slot_cost = _Family("name", "hash", ttl="7 d")
    # Maintenance
    policies = _Single("hash", bound="a number for each policy")
    policy_sources = _Single("hash", ttl="1 h; rows 2 min")  # of running processes, by role and settings
    dead_letters = _Single("zset", bound="10,000 rows")
    dead_letters_added = _Single("string", bound="one number")  # also of those that are gone
    dead_letter = _Family("id", "hash", ttl="7 d")
    reconciling = _Single("string", ttl="1 min")
    reconcile_progress = _Single("hash", ttl="1 h")
    chores = _Single("hash", bound="a time for each periodic chore: when it last ended without an error")
    recount = _Single("hash", ttl="1 min")  # counters that changed during a recount
    # API keys and limits
    keys_created = _Single("string", bound="one flag: a key has been created")
    api_keys = _Single("zset", bound="10,000 rows")
    api_key = _Family("id", "hash", bound="as api_keys; 30 d after its end")
    url_secret = _Single("string", bound="one secret")
    tenant_limits = _Single("hash", bound="10,000 tenants")
    request_rate = _Family("tenant", "string", ttl="1 min")
    running_slots = _Single("hash", live="tenants with running jobs")
    deferred = _Family("tenant", "set", bound="orders that a tenant with running jobs or a pause has left")
    reservations = _Single("hash", ttl="1 d")  # jobs that the slots of their tenants are kept for
    pauses = _Single("hash", bound="1,000 pauses")
    actions = _Single("stream", ttl="90 d; about 10,000 entries")
    # Webhooks
    webhook_endpoints = _Family("tenant", "hash", bound="16 endpoints, and the secret")
    webhook_outbox = _Family("tenant", "stream", bound="about 100,000 entries")
    outbox_tenants = _Single("zset", bound="tenants with entries, by last turn")
    webhook_tenants = _Single("zset", bound="tenants with pending deliveries, by the earliest")
    webhook_hosts = _Family("tenant", "zset", bound="hosts with pending deliveries, by the earliest")
    webhook_due = _Family("tenant host", "zset", bound="pending deliveries: 50,000 of a tenant")
    webhook_delivery = _Family("id", "hash", ttl="7 d")
    webhook_deliveries = _Family("tenant", "zset", ttl="7 d, 50,000 rows")

    def __init__(self, namespace: str) -> None:
        self.prefix = f"{{fq:{namespace}}}:"

    def bounded(self, name: str, *, unfinished_jobs: bool = True) -> bool:
        """Return whether the key needs no TTL, whatever it holds, while there are unfinished jobs or none."""
        key = KEYS.get(name.removeprefix(self.prefix).partition(":")[0])
        return key is not None and not key.ttl and bool(key.bound or (key.live and unfinished_jobs))


KEYS = {key.name: key for key in vars(RedisKeys).values() if isinstance(key, RedisKey)}


def lua_keys(text: str) -> str:
    """Return the Lua table `key`, with the names that a script's text uses."""
    used = dict.fromkeys(re.findall(r"\bkey\.(\w+)", text))
    ranks = ", ".join(f"[{rank}] = '{priority}'" for rank, priority in enumerate(Priority))
    head = f"local PREFIX, RANKS, key = KEYS[1], {{{ranks}}}, {{}}"
    return "\n".join([head, *(KEYS[name].lua() for name in used)])
