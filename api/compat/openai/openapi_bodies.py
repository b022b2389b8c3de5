"""What the OpenAPI page says of OpenAI's bodies, which the handlers read themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_EXAMPLE = {"model": "demo", "prompt": "a red circle on a blue ground, left", "n": 2, "size": "64x64", "steps": 12}


def generation_body(fields: type[BaseModel], *, upload: bool = False) -> dict[str, Any]:
    """Return the OpenAPI of a body that holds `fields` and those of a job; with `upload` as multipart too."""
    own: dict[str, Any] = {
        name: {**({"default": field.default} if field.default is not None else {}), **_told(field.description)}
        for name, field in fields.model_fields.items()
    }
    job = {"$ref": "#/components/schemas/JobRequest"}
    schema = {"allOf": [job, {"type": "object", "properties": own}]}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if upload:
        file = {"type": "string", "format": "binary", "description": "PNG, JPEG or WebP."}
        files = {"image": file, "image[]": {"type": "array", "items": file}, "mask": file}
        properties = {**files, "prompt": {"type": "string"}, "model": {"type": "string"}, **own}
        form = {"type": "object", "required": ["image", "prompt"], "properties": properties}
        content["multipart/form-data"] = {"schema": form}
    else:
        content["application/json"]["example"] = _EXAMPLE
    return {"requestBody": {"required": True, "content": content}}


def _told(description: str | None) -> dict[str, str]:
    return {} if description is None else {"description": description}
