"""What every handler works with: built once when the API starts, closed once when it stops."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from api.auth import Authenticator
from api.followers import WaiterLimit
from api.places import QueuePositions
from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.queue import EventFeed, Queue
from shared.storage import Storage


@dataclass(frozen=True)
class Services:
    """The parts of a running API. `closing` is set when it begins to stop: whoever waits for long then leaves."""

    settings: Settings
    catalog: Catalog
    queue: Queue
    feed: EventFeed
    storage: Storage
    queue_positions: QueuePositions
    authenticator: Authenticator
    waiter_limit: WaiterLimit = field(default_factory=WaiterLimit)
    closing: asyncio.Event = field(default_factory=asyncio.Event)


async def services(request: Request) -> Services:
    """Return the parts of the API that `request` came to."""
    found: Services = request.app.state.services
    return found


ServicesDep = Annotated[Services, Depends(services)]
