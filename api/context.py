"""What every handler works with: built once when the API starts, closed once when it stops."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from api.auth import Gate
from api.followers import Followers
from api.places import Places
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
    places: Places
    gate: Gate
    followers: Followers = field(default_factory=Followers)
    closing: asyncio.Event = field(default_factory=asyncio.Event)


async def services(request: Request) -> Services:
    """Return the parts of the API that `request` came to."""
    found: Services = request.app.state.services
    return found


Parts = Annotated[Services, Depends(services)]
