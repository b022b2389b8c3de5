"""Replicate's protocol, as the app serves it."""

from collections.abc import Mapping

from api.http.bodies import max_json_bytes
from api.protocols.replicate import file_routes, model_routes, prediction_routes, stream_routes
from api.protocols.replicate.predictions import PREFIX
from api.protocols.served_protocol import ServedProtocol
from api.protocols.text_errors import text_errors
from api.routes import inputs
from shared.config.catalog import Catalog
from shared.config.settings import Settings


def _body_limits(settings: Settings, catalog: Catalog) -> Mapping[str, int]:
    with_image = max_json_bytes(settings)
    return {
        f"{PREFIX}/predictions": with_image,
        f"{PREFIX}/models/*/predictions": with_image,
        f"{PREFIX}/files": settings.max_input_bytes + inputs.OVERHEAD_BYTES,
    }


REPLICATE = ServedProtocol(
    (prediction_routes.router, model_routes.router, file_routes.router),
    text_errors(PREFIX),
    _body_limits,
    (stream_routes.router,),
    request_headers=("Cancel-After",),
)
