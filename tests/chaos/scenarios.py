"""The long runs, by name: what is promised in docs/reliability.md."""

from __future__ import annotations

import math
from dataclasses import replace

from chaos import hooks
from chaos.plan import Mix
from chaos.run import Scenario


def _never(kills: int) -> float:
    return 0


def _of_lost_workers(kills: int) -> float:
    """No bound: while S3 is slow, a worker holds the uploads of more jobs than one batch."""
    return math.inf


STEPS = tuple(f"kill_at:{name}" for name in hooks.WORKER_HOOKS)
STOPS = tuple(f"stop_at:{name}" for name in hooks.WORKER_HOOKS)
LINKS = ("api-redis", "worker-redis")
NETWORK = (
    *(f"{kind}:{link}" for kind in ("delay", "cut", "half_close") for link in LINKS),
    *(f"drop_replies:worker-redis:{name}" for name in ("read_order", "take", "settle", "renew")),
    *(f"drop_replies:api-redis:{name}" for name in ("submit", "cancel_jobs")),
)
S3_FAULTS = ("delay:worker-s3", "cut:worker-s3", "half_close:worker-s3", "drop_s3_replies", "stop_s3", "fail_s3")

SPOT = Scenario(
    24,
    {"kill_worker": 1},
    mix=Mix(
        signatures=1,
        steps=(400, 400),
        keyed=1,
        failing=0,
        canceled=0,
        expiring=0,
        children=0,
        dependents=0,
        deleted=0,
        bulk=0,
    ),
    run_again=_of_lost_workers,
    every_s=5.0,
    fewest=8,
    checkpoint_s=0.2,
    computed=1.10,
)
"""Jobs of 20 s, on workers of which one is lost every 5 s. A batch of 8 has a checkpoint after 1.6 s."""
PIPELINES = Mix(dependents=0.8, failing=0.05, deleted=0.2, retried=1.0)
EVICTED = {"evict_worker": 1}

KEPT = Mix(deleted=0)
"""Of runs that lose the index of jobs for which others are kept: until it is made again, those can be deleted."""

PAUSES = Scenario(
    4_000,
    {"kill_worker": 20, "stop_worker": 5, "drain_worker": 10, "kill_redis": 3, "lose_indexes": 3},
    mix=replace(KEPT, steps=(1, 20), paused=0.5, canceled=0.1, outstanding=100),
    webhooks=True,
)

SCENARIOS = {
    "kills": Scenario(20_000, {"kill_worker": 200}, at_once=2, workers=6),
    "steps": Scenario(2_000, dict.fromkeys(STEPS, 5), webhooks=True),
    "stops": Scenario(2_000, dict.fromkeys(STOPS, 3) | {"stop_worker": 29}, at_once=4, workers=6),
    "drains": Scenario(4_000, {"drain_worker": 100}, at_once=2, run_again=_never),
    "cancels": Scenario(6_000, mix=Mix(canceled=0.84, retried=0.05), run_again=_never),
    "pauses": PAUSES,
    "sources": Scenario(
        2_000,
        {"kill_worker": 20, "drain_worker": 10, "kill_redis": 3, "restart_chores": 3},
        mix=PIPELINES,
        webhooks=True,
    ),
    "api": Scenario(2_000, {f"kill_api:{name}": 10 for name in hooks.API_HOOKS}, run_again=_never),
    "redis": Scenario(3_000, {"kill_redis": 20, "rewrite_aof": 5, "flush_scripts": 5}, run_again=_never),
    "outages": Scenario(1_000, {"long_outage": 3, "freeze_redis": 3}, run_again=_never),
    "memory": Scenario(2_000, {"out_of_memory:5": 3, "out_of_memory:30": 1}, run_again=_never),
    "clock": Scenario(1_000, {"step_clock": 10, "kill_worker": 5}),
    "repairs": Scenario(2_000, {"lose_indexes": 10}, mix=KEPT),
    "flush": Scenario(1_000, {"flush_all": 2}),
    "failover": Scenario(1_500, {"promote_replica": 3}, proxied=True),
    "network": Scenario(3_000, dict.fromkeys(NETWORK, 4), proxied=True),
    "storage": Scenario(1_500, dict.fromkeys(S3_FAULTS, 4), proxied=True, s3=True, run_again=_never),
    "disk": Scenario(1_500, {"fill_disk": 5}, run_again=_never),
    "storm": Scenario(
        4_000,
        {"kill_worker": 20, "stop_worker": 5, "drain_worker": 10, "kill_redis": 4, "fill_disk": 2, "restart_chores": 3}
        | dict.fromkeys(STEPS, 2)
        | {f"kill_api:{name}": 2 for name in hooks.API_HOOKS},
        webhooks=True,
    ),
    "tempest": Scenario(
        4_000,
        {
            "kill_worker": 10,
            "kill_redis": 4,
            "promote_replica": 2,
            "lose_indexes": 4,
            "long_outage": 2,
        }
        | dict.fromkeys((*STEPS, *STOPS, *NETWORK, *S3_FAULTS), 2),
        mix=KEPT,
        webhooks=True,
        proxied=True,
        s3=True,
        run_again=_of_lost_workers,
    ),
    "spot-kills-without": replace(SPOT, checkpoint_s=0, computed=math.inf),
    "spot-kills": SPOT,
    "spot-evictions-without": replace(SPOT, kinds=EVICTED, checkpoint_s=0, computed=math.inf),
    "spot-evictions": replace(SPOT, kinds=EVICTED, computed=1.0),
}
"""`make chaos` runs all; the table in docs/reliability.md has what each shows."""


def named(name: str) -> list[str]:
    """Return the runs of a name: one, or those that begin with it."""
    return [name] if name in SCENARIOS else [one for one in SCENARIOS if one.startswith(f"{name}-")]
