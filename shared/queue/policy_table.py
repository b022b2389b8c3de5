"""The table of policies, and how a script reads them: settings that all processes of a namespace share, in Redis."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from shared.config.settings import Settings


class Policy(NamedTuple):
    """The name of a setting in `conf`, where it is multiplied and gets a margin."""

    conf: str
    scale: int = 1
    margin: int = 0


POLICIES: Mapping[str, Policy] = {
    "retention_s": Policy("retention_ms", 1000),
    "input_retention_s": Policy("input_retention_ms", 1000),
    "idempotency_s": Policy("idempotency_ms", 1000),
    "usage_retention_days": Policy("usage_retention_ms", 86_400_000),
    "max_queued_jobs": Policy("max_queued_jobs"),
    "max_queued_jobs_per_tenant": Policy("max_queued_jobs_per_tenant"),
    "max_running_slots_per_tenant": Policy("max_running_slots_per_tenant"),
    "max_device_seconds_per_day_per_tenant": Policy("max_device_seconds_per_day"),
    "max_device_seconds_per_month_per_tenant": Policy("max_device_seconds_per_month"),
    "max_kept_jobs_per_tenant": Policy("max_kept_jobs"),
    "max_record_bytes_per_tenant": Policy("max_record_bytes"),
    "max_stored_objects_per_tenant": Policy("max_stored_objects"),
    "max_stored_bytes_per_tenant": Policy("max_stored_bytes"),
    "max_checkpoint_bytes": Policy("max_checkpoint_bytes"),
    "max_attempts": Policy("max_attempts"),
    "lease_ms": Policy("lease_ms"),
    "overdue_ms": Policy("overdue_ms"),
    "aging_ms": Policy("aging_ms"),
    "bulk_share": Policy("bulk_share"),
    "interactive_allowance_s": Policy("interactive_allowance_s"),
    "sync_wait_s": Policy("sync_call_ms", 1000, 60_000),
}


def policy_value(settings: Settings, name: str) -> int | float:
    """Return a process' own value of a policy; 0 for no limit."""
    value: int | float | None = getattr(settings, name)
    return value or 0


def lua_conf(policies: Mapping[str, int | float], constants: Mapping[str, int], body: str) -> str:
    """Return the Lua table `conf` with what a script's text uses.

    Policies are read from Redis; until a process has announced them, each process uses its own `policies`.
    """
    used = dict.fromkeys(re.findall(r"\bconf\.(\w+)", body))
    values = {name: str(number) for name, number in constants.items() if name in used}
    names = [name for name, policy in POLICIES.items() if policy.conf in used]
    for at, name in enumerate(names, 1):
        policy, own = POLICIES[name], policies[name]
        values[policy.conf] = f"(tonumber(policy[{at}]) or {own}) * {policy.scale} + {policy.margin}"
    fields = ", ".join(f"'{name}'" for name in names)
    read = [f"local policy = redis.call('HMGET', key.policies, {fields})"] if names else []
    return "\n".join([*read, f"local conf = {{{', '.join(f'{name} = {value}' for name, value in values.items())}}}"])
