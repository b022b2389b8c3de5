"""Hugging Face's protocol, as the app serves it."""

from collections.abc import Mapping

from api.http.bodies import max_json_bytes
from api.protocols.huggingface import routes
from api.protocols.served_protocol import ServedProtocol
from api.protocols.text_errors import text_errors
from shared.config.catalog import Catalog
from shared.config.settings import Settings


def _body_limits(settings: Settings, catalog: Catalog) -> Mapping[str, int]:
    return {f"{routes.PREFIX}/*": max_json_bytes(settings)}


HUGGING_FACE = ServedProtocol(
    (routes.router,), text_errors(routes.PREFIX), _body_limits, request_headers=("x-wait-for-model", "x-use-cache")
)
