"""`/compat/replicate/v1/webhooks`: the secret that deliveries are signed with."""

from __future__ import annotations

from fastapi import APIRouter

from api.context import ServicesDep, Tenant
from api.http.openapi import problems
from shared.protocols.replicate.predictions import PREFIX

router = APIRouter(prefix=f"{PREFIX}/webhooks", tags=["Replicate"])


@router.get("/default/secret", responses=problems(503))
async def webhook_secret(tenant: Tenant, services: ServicesDep) -> dict[str, str]:
    """Tell the secret that signs to the URLs which predictions name."""
    return {"key": (await services.queue.webhooks.account_secrets(tenant))[0].secret}
