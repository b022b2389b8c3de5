"""fal's queue protocol, as the app serves it."""

from collections.abc import Mapping

from api.protocols.fal import routes
from api.protocols.fal.errors import ERRORS
from api.protocols.fal.queue_requests import FILES
from api.protocols.served_protocol import ServedProtocol
from shared.config.catalog import Catalog
from shared.config.settings import Settings

_HEADERS = (
    *(f"x-fal-{name}" for name in ("object-lifecycle-preference", "queue-priority", "request-timeout", "runner-hint")),
    *("x-fal-store-io", "x-fal-target-url", "fal-api-key", "user-agent"),
)


def _body_limits(settings: Settings, catalog: Catalog) -> Mapping[str, int]:
    return {f"{FILES}/*": settings.max_input_bytes}


FAL = ServedProtocol((routes.router,), ERRORS, _body_limits, (routes.upload_router,), request_headers=_HEADERS)
