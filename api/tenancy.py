"""Whose request it is: the one place that knows."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

DEFAULT_TENANT = "default"


async def tenant() -> str:
    """Return the tenant of the request; while there are no keys, everybody is the same one."""
    return DEFAULT_TENANT


Tenant = Annotated[str, Depends(tenant)]
