"""Usage through the client library."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

import pytest

from fusequeue import AsyncClient, InvalidArgument, RefusedError
from shared.queue import Queue

Work = Callable[..., Awaitable[bytes]]


async def test_usage_has_types(api: AsyncClient, work: Work, fake_queue: Queue) -> None:
    await api.submit("demo", "a red circle")
    data = await work()
    await api.submit("demo", "a red circle")
    await work(failure="broken")
    today = await fake_queue.usage.today()
    (row,) = [one async for one in api.usage()]
    assert (row.day, row.tenant, row.model) == (today, "default", "demo")
    assert (row.jobs.succeeded, row.jobs.failed, row.images) == (1, 1, 1)
    assert row.output_bytes == len(data)
    assert [one async for one in api.usage(first_day=today, last_day=str(today), tenant="*", model="demo")] == [row]
    (whole,) = [one async for one in api.usage(group_by=[])]
    assert (whole.day, whole.tenant, whole.model, whole.jobs) == (None, None, None, row.jobs)
    assert [one async for one in api.usage(last_day=today - timedelta(days=1))] == []


async def test_tenants_have_their_limits_and_usage(api: AsyncClient, work: Work, fake_queue: Queue) -> None:
    await api.submit("demo", "a red circle")
    await work()
    await api.submit("demo", "a red circle")
    (tenant,) = [one async for one in api.operations.tenants(days=2)]
    assert (tenant.id, tenant.own_limits, tenant.use.queued_jobs, tenant.use.kept_jobs) == ("default", (), 1, 2)
    assert tenant.limits.queued_jobs == fake_queue.client.settings.max_queued_jobs_per_tenant
    assert (tenant.usage.jobs.succeeded, tenant.usage.images) == (1, 1)
    assert [one async for one in api.operations.tenants(name="other")] == []


async def test_bad_arguments_are_refused(api: AsyncClient) -> None:
    for bad in ({"group_by": "day"}, {"first_day": datetime(2026, 1, 1)}):
        with pytest.raises(InvalidArgument):
            _ = [one async for one in api.usage(**bad)]
    with pytest.raises(RefusedError, match="from"):
        _ = [one async for one in api.usage(first_day="yesterday")]
