"""The OpenAPI document: schemas of bodies that handlers parse themselves, errors, and keys."""

import asyncio
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from api.errors import STATUSES, Problem
from api.jobs.job_object import JobObject
from api.jobs.request import JobRequest

_REF = "#/components/schemas/"
_OPEN_PATHS = frozenset(("/healthz", "/readyz"))
_KEY = "`Authorization: Bearer fq_...`; `Key` and `Token` work too. Required once a key has been created."
IMAGE_ID, _OTHER_ID = "in_0123456789abcdef0123456789abcdef", "in_fedcba9876543210fedcba9876543210"
_EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("id", "event", "data")}}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "text to image": {"prompt": "a red circle on a blue ground, left"},
    "several images, seeded": {"prompt": "a green square", "seed": 7, "steps": 16, "n": 2, "metadata": {"order": "12"}},
    "repaint where a mask is white": {"prompt": "a blue square", "image": IMAGE_ID, "mask": _OTHER_ID},
    "edit several images into one": {
        "model": "qwen-image-edit-plus",
        "prompt": "the woman in the first image wears the hat of the second",
        "images": [IMAGE_ID, _OTHER_ID],
    },
    "video from an image": {"model": "wan-2.2-ti2v", "prompt": "a wave breaks", "image": IMAGE_ID, "frames": 81},
    "image to image": {"prompt": "a yellow star on a black ground", "image": IMAGE_ID, "strength": 0.7},
}


def json_body() -> dict[str, Any]:
    """Return the OpenAPI of a body with one job request."""
    examples = {name: {"value": {"model": "demo", **value}} for name, value in _EXAMPLES.items()}
    return request_body("application/json", {"schema": {"$ref": f"{_REF}JobRequest"}, "examples": examples})


def ndjson_body() -> dict[str, Any]:
    """Return the OpenAPI of a body with one job request per line."""
    lines = '{"key":"a","model":"demo","prompt":"a red circle"}\n{"model":"demo","prompt":"a cross","after":["a"]}\n'
    return request_body("application/x-ndjson", {"schema": {"type": "string"}, "example": lines})


def upload_body(field: str = "file") -> dict[str, Any]:
    """Return the OpenAPI of a body with one uploaded image."""
    file = {"type": "string", "format": "binary", "description": "PNG, JPEG or WebP."}
    schema = {"type": "object", "required": [field], "properties": {field: file}}
    return request_body("multipart/form-data", {"schema": schema})


def event_stream(description: str, example: str | None = None) -> dict[str, Any]:
    """Return the OpenAPI of a response with Server-Sent Events; `itemSchema` is that of one event."""
    content: dict[str, Any] = {"itemSchema": _EVENT}
    if example is not None:
        content["example"] = example
    return {"description": description, "content": {"text/event-stream": content}}


def request_body(media_type: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI of a body with one media type."""
    return {"requestBody": {"required": True, "content": {media_type: content}}}


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a body; `complete` adds its `$defs` to the document's components."""
    return model.model_json_schema(ref_template=f"{_REF}{{model}}")


def problems(*statuses: int, model: type[BaseModel] = Problem) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI of errors with these statuses, and of the errors that every path can return."""
    media_type = "application/problem+json" if issubclass(model, Problem) else "application/json"
    content = {media_type: {"schema": {"$ref": f"{_REF}{model.__name__}"}}}
    responses: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*statuses, 500}):
        titles = [f"`{code}`: {title}" for code, (number, title) in STATUSES.items() if number == status]
        responses[status] = {"description": "; ".join(titles), "content": content}
    return responses | {"default": {"description": "Any other error.", "content": content}}


def job_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI of responses with a job, for these statuses."""
    descriptions = {200: "The job.", 202: "The job, accepted.", 304: "The client has this version of the job already."}
    content = {"application/json": {"schema": {"$ref": f"{_REF}JobObject"}}}
    return {
        status: {"description": descriptions[status], **({} if status == 304 else {"content": content})}
        for status in statuses
    }


def operation_id(route: APIRoute) -> str:
    """Return a route's stable name, of which generated clients make functions: that of its function."""
    return route.name


def operation_ids(prefix: str) -> Callable[[APIRoute], str]:
    """Return what names the routes of a router whose functions have names that others have too."""
    return lambda route: f"{prefix}_{route.name}"


def complete(document: dict[str, Any], error_models: Iterable[type[BaseModel]] = ()) -> dict[str, Any]:
    """Return FastAPI's document with the schemas of bodies, responses and errors, and the key."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _add_security(document)
    for operation in (each for path in document["paths"].values() for each in path.values()):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            schemas.update(content["schema"].get("$defs", {}))
    models: tuple[type[BaseModel], ...] = (JobRequest, JobObject, Problem, *error_models)
    for model in models:
        schema = model.model_json_schema(
            ref_template=f"{_REF}{{model}}", mode="validation" if model is JobRequest else "serialization"
        )
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return document


def install(app: FastAPI, document: Callable[[], dict[str, Any]]) -> None:
    """Let `app` serve its OpenAPI document, which needs no key; it is built once, and has an ETag."""
    one_at_a_time = threading.Lock()

    @functools.cache
    def encoded() -> tuple[bytes, str]:
        body = json.dumps(document(), ensure_ascii=False, separators=(",", ":")).encode()
        return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'

    def encoded_once() -> tuple[bytes, str]:
        with one_at_a_time:
            return encoded()

    async def serve(request: Request) -> Response:
        # Other requests go on while the document is made.
        body, etag = await asyncio.to_thread(encoded_once)
        headers = {"ETag": etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="application/json")

    app.openapi = document  # type: ignore[method-assign]
    app.add_api_route("/openapi.json", serve, methods=["GET", "HEAD"], include_in_schema=False)


def _add_security(document: dict[str, Any]) -> None:
    """Add the key to every path that requires one, and the errors of requests without it."""
    document["components"]["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer", "description": _KEY}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in _OPEN_PATHS else [{"ApiKey": []}]
            if path not in _OPEN_PATHS:
                own = operation["responses"]
                form = {"content": own["default"]["content"]} if "default" in own else {}
                errors = {str(status): response | form for status, response in problems(401, 403, 429).items()}
                operation["responses"] = errors | own
