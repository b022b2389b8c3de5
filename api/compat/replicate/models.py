"""`/compat/replicate/v1/models`: what there is, and the one version that each has."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from api.context import Context
from api.http.openapi import problems
from shared.config.models_file import ModelSpec
from shared.errors import NotFound
from shared.protocols.replicate.models import named, owner_and_name, version_of
from shared.protocols.replicate.prediction_inputs import OUTSIDE, USUAL_NAMES, OtherFields
from shared.protocols.replicate.predictions import PREFIX
from shared.request import JobRequest

router = APIRouter(prefix=f"{PREFIX}/models", tags=["Replicate"])

_COG = "0.9.0"  # from 0.3.9 on a list of pictures is a list, and no iterator
_NEVER = "1970-01-01T00:00:00.000Z"  # clients want a time; a models file has none


@router.get("", responses=problems(503))
async def list_models(context: Context) -> Response:
    """List the models, all on one page."""
    told = [model_object(spec, context.base_url) for spec in context.services.catalog]
    return JSONResponse({"previous": None, "next": None, "results": told})


@router.get("/{owner}/{name}", responses=problems(404, 503))
async def get_model(owner: str, name: str, context: Context) -> Response:
    """Read a model, with what its input may hold."""
    return JSONResponse(model_object(named(owner, name, context.services.catalog), context.base_url))


@router.get("/{owner}/{name}/versions", responses=problems(404, 503))
async def list_versions(owner: str, name: str, context: Context) -> Response:
    """List the versions of a model: there is one, that which is served."""
    told = [version_object(named(owner, name, context.services.catalog))]
    return JSONResponse({"previous": None, "next": None, "results": told})


@router.get("/{owner}/{name}/versions/{version}", responses=problems(404, 503))
async def get_version(owner: str, name: str, version: str, context: Context) -> Response:
    """Read a version of a model."""
    spec = named(owner, name, context.services.catalog)
    if version != version_of(spec):
        raise NotFound(f"{owner}/{name} has no version {version[:64]} here; it is {version_of(spec)}", param="version")
    return JSONResponse(version_object(spec))


def model_object(spec: ModelSpec, base_url: str) -> dict[str, Any]:
    """Return a model as its clients read it."""
    owner, name = owner_and_name(spec.id)
    return {
        "url": f"{base_url}{PREFIX}/models/{owner}/{name}",
        "owner": owner,
        "name": name,
        "description": ", ".join(task.value for task in spec.tasks),
        "visibility": "private",
        "github_url": None,
        "paper_url": None,
        "license_url": None,
        "run_count": 0,
        "cover_image_url": None,
        "default_example": None,
        "latest_version": version_object(spec),
    }


def version_object(spec: ModelSpec) -> dict[str, Any]:
    """Return the version of a model that is served, with the schema of its input and output."""
    picture = {"type": "string", "format": "uri"}
    videos = any(task.makes_video for task in spec.tasks)
    output = picture if videos else {"type": "array", "items": picture}
    schemas = {"Input": _input_schema(spec), "Output": {**output, "title": "Output"}}
    openapi = {"openapi": "3.1.0", "info": {"title": spec.id, "version": "1"}, "paths": {}}
    return {
        "id": version_of(spec),
        "created_at": _NEVER,
        "cog_version": _COG,
        "openapi_schema": {**openapi, "components": {"schemas": schemas}},
    }


def _input_schema(spec: ModelSpec) -> dict[str, Any]:
    """Return what an input may hold, by their usual name for each field, with the model's defaults."""
    job = JobRequest.model_json_schema(ref_template="#/components/schemas/Input/$defs/{model}", by_alias=False)
    defaults = spec.defaults.model_dump(exclude_none=True)
    properties: dict[str, Any] = {}
    for name, schema in {**job["properties"], **OtherFields.model_json_schema()["properties"]}.items():
        if name not in OUTSIDE:
            own = {"default": defaults[name]} if name in defaults else {}
            properties[USUAL_NAMES.get(name, name)] = {**schema, **own}
    return {"type": "object", "title": "Input", "required": ["prompt"], "properties": properties, "$defs": job["$defs"]}
