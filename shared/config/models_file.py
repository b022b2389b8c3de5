"""Models file: the models of a deployment, their sources, defaults and limits.

`models.toml` has one `[[model]]` table per model; the one at the top of the repository shows every key. Unknown keys
are errors.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from shared.architectures.registry import FIXED_RATES
from shared.config.batch_rules import load_batch_rules
from shared.config.catalog import Catalog
from shared.config.checkpoints import source_hint
from shared.config.model_spec import ModelSpec
from shared.config.models_file_faults import duplicated, faults_text
from shared.config.partial_denoising import pipeline_class
from shared.config.request_limits import Table
from shared.config.scheduler_choices import choice_of, option_faults
from shared.config.size_steps import size_step
from shared.errors import ConfigurationError
from shared.signature import denoisers_of, mixable_fields


class _File(Table):
    model: Annotated[tuple[ModelSpec, ...], Field(min_length=1)]


def load(path: Path, rules: Path | None = None) -> Catalog:
    """Read a models file and, if given, batch rules; `ConfigurationError` names the file and the key.

    A relative `source` that exists next to the models file is that folder.
    """
    batch_rules = None if rules is None else load_batch_rules(rules)
    document: dict[str, object] = {}
    try:
        document = tomllib.loads(path.read_text("utf-8"))
        specs = _File.model_validate(document).model
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; set FUSEQUEUE_MODELS to a models file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {faults_text(error, document)}") from error
    if duplicates := duplicated([name for spec in specs for name in (spec.id, *spec.aliases)]):
        raise ConfigurationError(f"{path}: duplicate model ids or aliases: {duplicates}")
    if len(spread := [spec.id for spec in specs if spec.devices > 1]) > 1:
        raise ConfigurationError(f"{path}: only one model of a file can have devices above 1: {', '.join(spread)}")
    try:
        return Catalog(tuple(resolve_paths(spec, path.parent) for spec in specs), batch_rules)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _rate_of(spec: ModelSpec, source: Path) -> int | None:
    """Return the rate of all videos of a model, if it has one; raises `ValueError` for another one in its tables."""
    rate = FIXED_RATES.get(pipeline_class(str(source)) or "", spec.limits.fps)
    for name, table in (("limits", spec.limits), ("defaults", spec.defaults)):
        if rate is not None and "fps" in table.model_fields_set and table.fps != rate:
            raise ValueError(f"{name}.fps of model {spec.id!r} is {table.fps}, but its videos have {rate}")
    return rate


def resolve_paths(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return a model whose paths are relative to `folder` with absolute ones, and with what its files say of it.

    Raises `ValueError` for what does not fit its files.
    """
    update: dict[str, object] = {"adapter": tuple(adapter.resolve_path(folder) for adapter in spec.adapter)}
    update["control"] = tuple(control.resolve_path(folder) for control in spec.control)
    if spec.refiner is not None:
        update["refiner"] = spec.refiner.resolve_path(folder)
    if spec.scorer is not None:
        update["scorer"] = spec.scorer.resolve_path(folder)
    if spec.quantization is not None:
        update["quantization"] = spec.quantization.resolve_paths(folder)
    if spec.checkpoint is not None:
        update["checkpoint"] = str((folder / spec.checkpoint).resolve())
    if spec.vae is not None:
        update["vae"] = str((folder / spec.vae).resolve())
    if not spec.source:
        raise ValueError(f"model {spec.id!r} has no source: {source_hint(Path(str(update['checkpoint'])))}")
    source = (folder / spec.source).resolve()
    if source.is_file():
        raise ValueError(
            f"source of model {spec.id!r} is a file: {spec.source}; it must be a diffusers folder, beside `checkpoint`"
        )
    if source.is_dir():
        update["source"] = str(source)
        update |= spec.changes_for_step(size_step(source))
        denoisers = None if "mixed_fields" in spec.model_fields_set else denoisers_of(source)
        if denoisers is not None:
            update["mixed_fields"] = mixable_fields(denoisers, has_controls=bool(spec.control))
    resolved = spec.model_copy(update=update)
    resolved = resolved.model_copy(update=resolved.changes_for_rate(_rate_of(spec, source)))
    own = resolved.own_scheduler
    choice = choice_of(spec.defaults.scheduler, None, own.is_flow)
    if choice.values is not None:
        raise ValueError(f"defaults.scheduler of model {spec.id!r}: only requests can list steps")
    for fault in option_faults(choice, own):
        raise ValueError(f"defaults.scheduler of model {spec.id!r}: {fault}")
    return resolved
