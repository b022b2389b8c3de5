"""What the OpenAPI page says of bodies that the handlers read themselves, and of errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from api.errors import STATUSES, Problem
from shared.request import JobRequest

_REF = "#/components/schemas/{model}"
_EXAMPLES = {
    "text to image": {"model": "demo", "prompt": "a red circle on a blue ground, left"},
    "several pictures, seeded": {
        "model": "demo",
        "prompt": "a green square on a white ground, top",
        "seed": 7,
        "steps": 16,
        "n": 2,
        "metadata": {"order": "1234"},
    },
    "repaint where a mask is white": {
        "model": "demo",
        "prompt": "a blue square on a white ground, left",
        "image": "in_0123456789abcdef0123456789abcdef",
        "mask": "in_fedcba9876543210fedcba9876543210",
    },
    "edit several pictures into one": {
        "model": "qwen-image-edit-plus",
        "prompt": "the woman in the first picture wears the hat of the second",
        "images": ["in_0123456789abcdef0123456789abcdef", "in_fedcba9876543210fedcba9876543210"],
    },
    "video from a picture": {
        "model": "wan-2.2-ti2v",
        "prompt": "a wave breaks",
        "image": "in_0123456789abcdef0123456789abcdef",
        "frames": 81,
        "fps": 24,
    },
    "image to image": {
        "model": "demo",
        "prompt": "a yellow star on a black ground, right",
        "image": "in_0123456789abcdef0123456789abcdef",
        "strength": 0.7,
    },
}


def json_body() -> dict[str, Any]:
    """Return the OpenAPI of a body that is one job request."""
    examples = {name: {"value": value} for name, value in _EXAMPLES.items()}
    content = {"application/json": {"schema": {"$ref": _REF.format(model="JobRequest")}, "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}


def ndjson_body() -> dict[str, Any]:
    """Return the OpenAPI of a body that is one job request a line."""
    lines = '{"model":"demo","prompt":"a red circle"}\n{"model":"demo","prompt":"a blue square"}\n'
    return {
        "requestBody": {
            "required": True,
            "content": {"application/x-ndjson": {"schema": {"type": "string"}, "example": lines}},
        }
    }


def upload_body() -> dict[str, Any]:
    """Return the OpenAPI of a body that is one uploaded picture."""
    file = {"type": "string", "format": "binary", "description": "PNG, JPEG or WebP."}
    schema = {"type": "object", "required": ["file"], "properties": {"file": file}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI of errors with these statuses, and of those that any path may answer."""
    content = {"application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}}
    told: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*statuses, 500}):
        titles = [f"`{code}`: {title}" for code, (number, title) in STATUSES.items() if number == status]
        told[status] = {"description": "; ".join(titles), "content": content}
    return told | {"default": {"description": "Any other error.", "content": content}}


def job_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI of answers that carry a job, with these statuses."""
    said = {200: "The job.", 202: "The job, accepted.", 304: "As the client has it already."}
    content = {"application/json": {"schema": {"$ref": _REF.format(model="JobObject")}}}
    return {
        status: {"description": said[status], **({} if status == 304 else {"content": content})} for status in statuses
    }


_OPEN = frozenset(("/healthz", "/readyz"))
_KEY = "`Authorization: Bearer fq_...`; `Key` and `Token` do as well. Asked for once a key has been made."


def _secure(page: dict[str, Any]) -> None:
    """Say which paths ask for a key, and what they answer without one."""
    page["components"]["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer", "description": _KEY}}
    for path, operations in page["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in _OPEN else [{"ApiKey": []}]
            if path not in _OPEN:
                told = {str(status): answer for status, answer in problems(401, 403, 429).items()}
                operation["responses"] = told | operation["responses"]


def complete(app: FastAPI, *models: type[BaseModel]) -> None:
    """Have the OpenAPI of `app` hold the schemas that bodies and answers refer to."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        page = generate()
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        _secure(page)
        shown: tuple[type[BaseModel], ...] = (JobRequest, Problem, *models)
        for model in shown:
            schema = model.model_json_schema(
                ref_template=_REF, mode="validation" if model is JobRequest else "serialization"
            )
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        return page

    app.openapi = openapi  # type: ignore[method-assign]
