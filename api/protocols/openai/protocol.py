"""OpenAI's protocol, as the app serves it."""

from collections.abc import Mapping
from dataclasses import replace

from starlette.responses import Response

from api.errors import ErrorForm, Problem, ProblemFacts, problem_response
from api.http.bodies import max_json_bytes
from api.protocols.openai import (
    batch_routes,
    file_routes,
    image_routes,
    request_bodies,
    unsupported,
    video_routes,
)
from api.protocols.served_protocol import ServedProtocol
from shared.config.catalog import Catalog
from shared.config.settings import Settings

_PATHS = tuple(f"/v1/{name}" for name in ("images", "videos", "files", "batches", "uploads"))
_HEADERS = (
    *(f"OpenAI-{name}" for name in ("Beta", "Organization", "Project")),
    *(f"x-stainless-{name}" for name in ("arch", "async", "custom-poll-interval", "helper-method", "lang", "os")),
    *(f"x-stainless-{name}" for name in ("package-version", "poll-helper", "raw-response", "read-timeout")),
    *(f"x-stainless-{name}" for name in ("retry-count", "runtime", "runtime-version", "timeout")),
)


def _respond(facts: ProblemFacts) -> Response:
    """Return an error with 400 in place of 422, for which OpenAI's SDKs raise `BadRequestError`."""
    return problem_response(replace(facts, status=400) if facts.status == 422 else facts)


def _body_limits(settings: Settings, catalog: Catalog) -> Mapping[str, int]:
    with_image = max_json_bytes(settings)
    images_per_edit = 1 + max(spec.limits.max_input_images for spec in catalog)  # and a mask
    return {
        "/v1/images/generations": with_image,
        "/v1/images/edits": images_per_edit * settings.max_input_bytes + request_bodies.OVERHEAD_BYTES,
        "/v1/videos": with_image,
        "/v1/files": settings.max_file_bytes + file_routes.OVERHEAD_BYTES,
    }


OPENAI = ServedProtocol(
    tuple(module.router for module in (file_routes, image_routes, batch_routes, video_routes, unsupported)),
    ErrorForm(_PATHS, Problem, _respond),
    _body_limits,
    direct_routes=image_routes.DIRECT,
    request_headers=_HEADERS,
)
