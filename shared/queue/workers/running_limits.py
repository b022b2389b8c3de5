"""The limits of tenants' running slots, as the order has them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from shared.queue.client import QueueComponent
from shared.queue.order.policies import Limit


class RunningLimits(QueueComponent):
    async def of(self, tenants: Sequence[str], paused: AbstractSet[str]) -> dict[str, Limit]:
        """Return the limits of tenants without their reserved slots, in one round trip."""
        if not tenants:
            return {}
        fields = [f"{tenant}|running_slots" for tenant in tenants]
        own, used = await self._replies(
            [("HMGET", self._keys.tenant_limits, *fields), ("HMGET", self._keys.running_slots, *tenants)]
        )
        usual = self._client.policy("max_running_slots_per_tenant")
        return {
            tenant: Limit(usual if most is None else int(most), int(slots or 0), tenant in paused)
            for tenant, most, slots in zip(tenants, own, used, strict=True)
        }
