"""`/compat/replicate/v1/models`: the served models, each with one version."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from api.context import Context
from api.http import openapi
from api.http.lists import known_parameters
from api.http.openapi import operation_ids
from api.jobs.request import JobRequest
from api.protocols.model_names import find_model, owner_and_name
from api.protocols.replicate.prediction_inputs import EXCLUDED, REPLICATE_NAMES, ReplicateFields
from api.protocols.replicate.prediction_objects import (
    ReplicateModel,
    ReplicateModelList,
    ReplicateVersion,
    ReplicateVersionList,
)
from api.protocols.replicate.predictions import PREFIX, model_version
from api.protocols.text_errors import TextProblem
from shared.config.model_spec import ModelSpec
from shared.errors import NotFound
from shared.tasks import Medium, Task

problems = partial(openapi.problems, model=TextProblem)
router = APIRouter(
    prefix=f"{PREFIX}/models", tags=["Replicate"], generate_unique_id_function=operation_ids("replicate")
)


@router.get("", responses=problems(422, 503) | {200: {"model": ReplicateModelList}}, dependencies=[known_parameters()])
async def list_models(context: Context) -> Response:
    """List the models on one page."""
    results = [model_object(spec, context.base_url) for spec in context.services.catalog]
    return JSONResponse({"previous": None, "next": None, "results": results})


@router.get("/{owner}/{name}", responses=problems(404, 503) | {200: {"model": ReplicateModel}})
async def get_model(owner: str, name: str, context: Context) -> Response:
    """Get a model and the schema of its input."""
    return JSONResponse(model_object(find_model(owner, name, context.services.catalog), context.base_url))


@router.get("/{owner}/{name}/versions", responses=problems(404, 503) | {200: {"model": ReplicateVersionList}})
async def list_versions(owner: str, name: str, context: Context) -> Response:
    """List the versions of a model: the served one."""
    results = [version_object(find_model(owner, name, context.services.catalog))]
    return JSONResponse({"previous": None, "next": None, "results": results})


@router.get("/{owner}/{name}/versions/{version}", responses=problems(404, 503) | {200: {"model": ReplicateVersion}})
async def get_version(owner: str, name: str, version: str, context: Context) -> Response:
    """Get a version of a model."""
    spec = find_model(owner, name, context.services.catalog)
    if version != model_version(spec):
        message = f"no such version of {owner}/{name}: {version[:64]}; it is {model_version(spec)}"
        raise NotFound(message, param="version")
    return JSONResponse(version_object(spec))


def model_object(spec: ModelSpec, base_url: str) -> dict[str, Any]:
    """Return a model as Replicate's SDKs read it."""
    owner, name = owner_and_name(spec.id)
    return {
        "url": f"{base_url}{PREFIX}/models/{owner}/{name}",
        "owner": owner,
        "name": name,
        "description": ", ".join(task.value for task in spec.tasks),
        "visibility": "private",
        "run_count": 0,
        **dict.fromkeys(("github_url", "paper_url", "license_url", "cover_image_url", "default_example")),
        "latest_version": version_object(spec),
    }


def version_object(spec: ModelSpec) -> dict[str, Any]:
    """Return the served version of a model, with the schema of its input and output."""
    image = {"type": "string", "format": "uri"}
    is_one = any(task.medium is not Medium.IMAGE for task in spec.tasks)
    output = image if is_one else {"type": "array", "items": image}
    schemas = {"Input": _input_schema(spec), "Output": {**output, "title": "Output"}}
    openapi = {"openapi": "3.1.0", "info": {"title": spec.id, "version": "1"}, "paths": {}}
    return {
        "id": model_version(spec),
        "created_at": "1970-01-01T00:00:00.000Z",  # clients require a time
        "cog_version": "0.9.0",  # from 0.3.9 on, a list of images is a list and not an iterator
        "openapi_schema": {**openapi, "components": {"schemas": schemas}},
    }


def _input_schema(spec: ModelSpec) -> dict[str, Any]:
    """Return the schema of an input, with Replicate's field names and the model's defaults."""
    job = JobRequest.model_json_schema(ref_template="#/components/schemas/Input/$defs/{model}", by_alias=False)
    defaults = spec.defaults.model_dump(exclude_none=True)
    unused = _unused_fields(spec)
    properties: dict[str, Any] = {}
    for name, schema in {**job["properties"], **ReplicateFields.model_json_schema()["properties"]}.items():
        if name not in EXCLUDED and name not in unused:
            own = {"default": defaults[name]} if name in defaults else {}
            properties[REPLICATE_NAMES.get(name, name)] = {**schema, **own}
    # Redux makes variations of an image without words.
    is_optional = spec.makes_meshes or spec.upscales or any(control.kind == "redux" for control in spec.control)
    required = {} if is_optional else {"required": ["prompt"]}
    return {"type": "object", "title": "Input", **required, "properties": properties, "$defs": job["$defs"]}


_SIDES = ("width", "height", "size", "aspect_ratio", "megapixels")
_MASKS = ("mask", "mask_blur", "mask_padding", "keep_unmasked")


def _unused_fields(spec: ModelSpec) -> set[str]:
    """Return the fields that no task of a model takes."""
    tasks, media = spec.tasks, {task.medium for task in spec.tasks}
    taken = {
        ("prompt",): not spec.makes_meshes,
        _SIDES: bool(media & {Medium.IMAGE, Medium.VIDEO}),
        ("image", "images"): any(task.takes_image for task in tasks),
        _MASKS: Task.INPAINT in tasks,
        ("last_image",): Task.IMAGE_TO_VIDEO in tasks,
        ("controls",): any(task.takes_controls for task in tasks),
        ("strength",): any(task.has_strength for task in tasks),
        ("frames", "fps"): Medium.VIDEO in media,
        ("video",): any(task.takes_video for task in tasks),
        ("face_video",): Task.ANIMATE in tasks,
        ("layers",): Medium.IMAGE in media,
        ("duration_s", "lyrics"): Medium.AUDIO in media,
        ("audio",): any(task.takes_audio for task in tasks),
        ("repaint_start_s", "repaint_end_s"): Task.AUDIO_INPAINT in tasks,
    }
    return {name for names, is_taken in taken.items() for name in names if not is_taken}
