"""Tenants: their limits, what they use now, and their usage by days."""

from __future__ import annotations

from typing import TypedDict

from fusequeue.resources.usage import UsageRow
from fusequeue.response_types import Resource


class TenantLimits(Resource):
    """What a tenant may use; None is unlimited."""

    requests_per_minute: int | None = None
    queued_jobs: int | None = None
    running_slots: int | None = None
    device_seconds_per_day: int | None = None
    device_seconds_per_month: int | None = None
    kept_jobs: int | None = None
    record_bytes: int | None = None
    stored_objects: int | None = None
    stored_bytes: int | None = None


class TenantUse(Resource):
    """What a tenant uses now; `running_slots` are images that are generated."""

    queued_jobs: int = 0
    running_slots: int = 0
    device_seconds_per_day: float = 0.0
    device_seconds_per_month: float = 0.0
    kept_jobs: int = 0
    record_bytes: int = 0
    stored_objects: int = 0
    stored_bytes: int = 0
    recent_device_seconds: float = 0.0


class Tenant(Resource):
    """A tenant with its limits, of which `own_limits` differ from the settings, its use now and its usage by days."""

    id: str
    limits: TenantLimits
    own_limits: tuple[str, ...] = ()
    use: TenantUse
    usage: UsageRow


class OwnTenantLimits(Resource):
    """The limits of a tenant after a change, of which `own_limits` differ from the settings."""

    tenant: str
    limits: TenantLimits
    own_limits: tuple[str, ...] = ()


class LimitChanges(TypedDict, total=False):
    """New limits of a tenant: None restores that of the settings."""

    requests_per_minute: int | None
    queued_jobs: int | None
    running_slots: int | None
    device_seconds_per_day: int | None
    device_seconds_per_month: int | None
    kept_jobs: int | None
    record_bytes: int | None
    stored_objects: int | None
    stored_bytes: int | None
