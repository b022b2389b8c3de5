"""The models of an engine: entries of a models file, folders, or models of the hub."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from pydantic import ValidationError

from shared.config import models_file
from shared.config.batch_rules import fault_text
from shared.config.catalog import Catalog
from shared.config.model_index import CLASSIC, MODULAR, Index, index_file, read_index
from shared.config.model_spec import ModelSpec
from shared.config.size_steps import vae_scale
from shared.errors import ConfigurationError
from shared.job_fields import MAX_DURATION_S
from shared.signature import denoisers_of
from shared.tasks import Task
from worker.engine.pipelines.class_tasks import class_tasks

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_USUAL_SIDE = 1024
_MOST = {
    "max_side": 8192,
    "max_pixels": 8192 * 8192,
    "max_steps": 1000,
    "max_prompt_chars": 100_000,
    "min_side": 16,
    "max_input_images": 16,
}
"""Limits protect a service from its clients; a program that runs its own engine has only those of its memory."""


def catalog_of(models: Sequence[str | os.PathLike[str]], file: Path, options: Mapping[str, Any]) -> Catalog:
    """Return the models: each is the path of a folder, an entry of the models file, or an id of the hub.

    `options` are keys of a model's table that replace those of each; a model that is named twice is one. Raises
    `ConfigurationError`.
    """
    entries = models_file.load(file) if file.is_file() else None
    specs: list[ModelSpec] = []
    for model in models:
        spec = _spec_of(os.fspath(model), entries, options)
        if spec not in specs:
            specs.append(spec)
    _check_names(specs)
    return Catalog(tuple(specs))


def _check_names(specs: Sequence[ModelSpec]) -> None:
    """Raise `ConfigurationError` for two models of one id or alias, of which items could reach only one."""
    sources: dict[str, str] = {}
    for spec in specs:
        for name in {spec.id, *spec.aliases}:
            if name in sources:
                message = f"two models have one name: {name!r} is {sources[name]} and {spec.source}"
                raise ConfigurationError(f"{message}; rename a folder, or use a models file")
            sources[name] = spec.source


def _spec_of(model: str, entries: Catalog | None, options: Mapping[str, Any]) -> ModelSpec:
    try:
        if Path(model).is_dir():
            return _spec_of_source(str(Path(model).resolve()), options)
        if entries is not None and (entry := entries.find(model)) is not None:
            table = {**entry.model_dump(exclude_unset=True), **options}
            return models_file.resolve_paths(ModelSpec.model_validate(table), Path.cwd())
        if HUB_ID.fullmatch(model):
            return _spec_of_source(model, options)
    except ValidationError as error:
        raise ConfigurationError(f"{model}: {'; '.join(map(fault_text, error.errors()))}") from error
    except ValueError as error:
        raise ConfigurationError(f"{model}: {error}") from error
    known = f", an entry of the models file ({', '.join(spec.id for spec in entries)})" if entries is not None else ""
    raise ConfigurationError(f"{model!r} is no folder{known} and no id of the hub (owner/name)")


def _spec_of_source(source: str, options: Mapping[str, Any]) -> ModelSpec:
    """Return the model of a folder or of the hub, with what its index says of its tasks and sizes."""
    index, folder = _index_of(source, options.get("revision"))
    class_name = str(index.get("_class_name"))
    _check_kinds(options)
    tasks = tuple(options.get("tasks") or class_tasks(class_name)) or (Task.TEXT_TO_IMAGE,)
    makes_video = any(Task(task).makes_video for task in tasks)
    side = (None if folder is None else _side_of(folder)) or _USUAL_SIDE
    width, height = (832, 480) if makes_video and side == _USUAL_SIDE else (side, side)
    table: dict[str, Any] = {
        "id": re.sub(r"[^A-Za-z0-9._-]", "-", source.strip("/").rpartition("/")[2])[:128] or "model",
        "source": source,
        "tasks": tasks,
        **{key: value for key, value in options.items() if key not in ("defaults", "limits", "tasks")},
    }
    max_batch = table.get("max_batch", ModelSpec.model_fields["max_batch"].default)
    limits: dict[str, float] = {**_MOST, "max_frames": 1025 if makes_video else 1}
    limits["max_images"] = min(64, max_batch) if isinstance(max_batch, int) else 1
    if any(Task(task).makes_audio for task in tasks):
        limits["max_duration_s"] = MAX_DURATION_S
    defaults = {"width": width, "height": height} | ({"frames": 81} if makes_video else {})
    table["limits"] = limits | dict(options.get("limits") or {})
    table["defaults"] = defaults | dict(options.get("defaults") or {})
    return models_file.resolve_paths(ModelSpec.model_validate(table), Path.cwd())


def _check_kinds(options: Mapping[str, Any]) -> None:
    """Raise `ValueError` that names an option of the wrong kind."""
    for key, kind, name in (
        ("limits", Mapping, "a table"),
        ("defaults", Mapping, "a table"),
        ("tasks", Sequence, "a list"),
    ):
        value = options.get(key)
        if value is not None and (isinstance(value, str) or not isinstance(value, kind)):
            raise ValueError(f"{key}: it must be {name}, not {type(value).__name__}")
    for task in options.get("tasks") or ():
        if task not in list(Task):
            raise ValueError(f"tasks: {task!r} is none; they are {', '.join(Task)}")


def _index_of(source: str, revision: str | None) -> tuple[Index, Path | None]:
    """Return the index of a pipeline, and its folder if it is on this machine; raises `ValueError`."""
    folder = Path(source)
    if folder.is_absolute():
        if index_file(folder) is None:
            raise ValueError(f"it has no {CLASSIC}, nor {MODULAR}; name a folder of save_pretrained")
        return read_index(folder), folder
    for name in (CLASSIC, MODULAR):
        try:
            found = huggingface_hub.hf_hub_download(source, name, revision=revision)
        except huggingface_hub.errors.EntryNotFoundError:
            continue
        except (OSError, huggingface_hub.errors.HfHubHTTPError) as error:
            raise ValueError(f"its index cannot be read from the hub: {error}") from error
        index: Index = json.loads(Path(found).read_text("utf-8"))
        return index, None
    raise ValueError(f"its repository has no {CLASSIC}, nor {MODULAR}")


def _side_of(folder: Path) -> int | None:
    """Return the side of images that the denoiser was trained with, None if its configuration does not say it."""
    scale = vae_scale(str(folder))
    for component in denoisers_of(folder) or {}:
        try:
            size = json.loads((folder / component / "config.json").read_text("utf-8")).get("sample_size")
        except (OSError, ValueError):
            continue
        if scale is not None and isinstance(size, int):
            return math.ceil(size * scale / 16) * 16
    return None
