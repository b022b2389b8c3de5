"""Inputs of pipelines that jobs have no field for: described for clients, and taken from a job's `extra`."""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import GenericAlias, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
from pydantic import JsonValue, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from shared.errors import UnusableInput, first_of
from shared.job import Job
from shared.job_fields import CallFields
from shared.model_inputs import ModelInput, extra_faults
from shared.tasks import Task
from worker.engine.pipelines.call_inputs import call_inputs
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.modular import is_modular, task_inputs
from worker.engine.pipelines.shape_pipeline import ShapePipeline, describe_shape_inputs
from worker.engine.pipelines.sounds import SOUND_INPUTS

# Inputs that follow from the fields of a job, and those that only programs can give or that change what a call returns.
_OWN = frozenset(
    {
        *("prompt", "negative_prompt", "image", "mask_image", "last_image", "strength"),
        *(
            "width",
            "height",
            "resolution_scale",
            "num_frames",
            "frame_rate",
            "fps",
            "num_images_per_prompt",
            "num_videos_per_prompt",
        ),
        *("num_inference_steps", "timesteps", "sigmas", "generator", "output_type", "use_kv_cache"),
        *("guidance_scale", "guidance_scale_2", "layers", "resolution", "max_area", "intermediate_timesteps"),
        *("guidance_schedule", "return_dict", "callback_steps", "callback_on_step_end_tensor_inputs"),
        *("num_waveforms_per_prompt", *CallFields.model_fields, *SOUND_INPUTS),
    }
)
_INNER = re.compile(r"(^|_)(latents?|embeds|kwargs|mask|masks|ids|coords|tokens?|state|cache)(_|$)")
_NUMBERS = list[float] | list[list[float]] | list[list[list[float]]]
_JSON_TYPES = frozenset({"boolean", "integer", "number", "string", "array", "object"})


def describe_inputs(templates: Mapping[Task, Pipeline]) -> tuple[ModelInput, ...]:
    """Return the inputs of a model that a job can give by `extra`, with the tasks that have them."""
    found: dict[str, ModelInput] = {}
    for task, pipeline in templates.items():
        for one in _describe(task, pipeline):
            earlier = found.get(one.name)
            tasks = (*(earlier.tasks if earlier is not None else ()), task)
            found[one.name] = one.model_copy(update={"tasks": tasks})
    return tuple(found[name] for name in sorted(found))


def _describe(task: Task, pipeline: Pipeline) -> Iterator[ModelInput]:
    if isinstance(pipeline, ShapePipeline):
        yield from describe_shape_inputs()
        return
    for item in _items(task, pipeline):
        if item.name in _OWN or item.name.startswith("_") or _INNER.search(item.name):
            continue
        schema = _schema(_type_of(item))
        if schema is not None:
            default = _as_json(item.default)
            text = " ".join(item.description.split())
            yield ModelInput(name=item.name, description=text, schema=schema, default=default, tasks=(task,))


def _items(task: Task, pipeline: Pipeline) -> Sequence[Any]:
    return task_inputs(task, pipeline) if is_modular(pipeline) else call_inputs(pipeline)


def _type_of(item: Any) -> Any:
    hint = _without_arrays(item.type_hint) or (type(item.default) if item.default is not None else None)
    types = get_args(hint) if get_origin(hint) is tuple else ()
    # diffusers writes `tuple[int]` for any number of them.
    return GenericAlias(tuple, (*types, ...)) if len(types) == 1 else hint


def _without_arrays(hint: Any) -> Any:
    """Return a type with nested lists of numbers in place of numpy's arrays."""
    if hint is np.ndarray:
        return _NUMBERS
    if get_origin(hint) not in (Union, UnionType):
        return hint
    return Union[tuple(map(_without_arrays, get_args(hint)))]  # noqa: UP007  # of parts that are known at run time only


def _schema(hint: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of a declared type; None for one that JSON cannot write."""
    try:
        schema = None if hint is None else TypeAdapter(hint).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError):
        return None
    return schema if schema is not None and _is_plain(schema) else None


def _is_plain(schema: Mapping[str, Any]) -> bool:
    parts = schema.get("anyOf") or [schema]
    return all(part.get("type") in (*_JSON_TYPES, "null") or "enum" in part for part in parts)


def _as_json(value: Any) -> JsonValue:
    """Return a default as JSON writes it; None for one that it cannot."""
    try:
        written: JsonValue = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return None
    return written


def extra_arguments(pipeline: Pipeline, job: Job) -> dict[str, Any]:
    """Return the inputs of a job's `extra` in the types that the pipeline declares.

    Raises `UnusableInput` for one that it does not have, or a value of another type.
    """
    if not job.extra:
        return {}
    described = describe_inputs({job.task: pipeline})
    faults = list(extra_faults(job.extra, described, job.task, job.model))
    if faults:
        first = first_of(faults)
        raise UnusableInput(first.message, param=first.param)
    if isinstance(pipeline, ShapePipeline):
        return dict(job.extra)
    types = {item.name: _type_of(item) for item in _items(job.task, pipeline)}
    return {name: _converted(name, types[name], value) for name, value in job.extra.items()}


def _converted(name: str, hint: Any, value: JsonValue) -> Any:
    try:
        return TypeAdapter(hint).validate_python(copy.deepcopy(value))  # a pipeline can change it
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UnusableInput(f"extra.{name}: {message}", param=f"extra.{name}") from None
