"""Adapters' files: finding them, and reading what they change in the layers of a model.

Runs outside the engine's thread and builds no modules: while a model loads, the parameters of new modules stay empty
in the whole process. Weights that cannot be applied are an error, and those that diffusers drops a warning.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from safetensors.torch import load_file

from shared.config.adapters import AdapterSpec
from shared.errors import AdapterUnavailable
from shared.inputs.adapter_check import unsupported_format
from shared.inputs.embedding_check import is_embedding
from shared.inputs.lycoris_shapes import Size, core_sizes
from worker.engine.lora.fitting import check_size
from worker.engine.lora.format_readers import PEFT_PREFIX, State, component_changes, read_state, without_prefix
from worker.engine.lora.layer_places import LayerPlace, places_of
from worker.engine.lora.layer_update import Changes, LayerUpdate
from worker.engine.lora.lycoris import FileWeights, product_of, rows_of, separate, without_cores
from worker.engine.lora.new_tokens import NewTokens
from worker.engine.lora.pacing import Pace, no_pace, paced
from worker.engine.lora.traced_weights import traced, untraced, without_effect

_Updates = dict[str, dict[str, LayerUpdate]]


@dataclass(frozen=True)
class AdapterFile:
    """What a file changes, what is worth a warning to whoever uses it, and the tokens of embeddings."""

    changes: Changes
    warnings: tuple[str, ...] = ()
    tokens: NewTokens = field(default_factory=NewTokens)


def locate(spec: AdapterSpec) -> Path:
    if not spec.is_local:
        if spec.weight_name is None:
            raise AdapterUnavailable(
                f"adapter {spec.id!r}: {spec.source!r} is no folder; set weight_name for a repository"
            )
        try:
            return Path(hf_hub_download(spec.source, spec.weight_name, revision=spec.revision))
        except (OSError, ValueError) as error:
            raise load_error(spec, error) from None
    source = Path(spec.source)
    if spec.weight_name is not None:
        files = [source / spec.weight_name]
    else:
        files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if len(files) != 1 or not files[0].is_file() or files[0].suffix != ".safetensors":
        held = "no safetensors file" if len(files) < 2 else "several files; name one as weight_name"
        raise AdapterUnavailable(f"adapter {spec.id!r}: {source} holds {held}")
    return files[0]


def load_error(spec: AdapterSpec, error: Exception) -> AdapterUnavailable:
    message = " ".join(str(error).split())[:400]
    if isinstance(error, KeyError):
        message = f"diffusers' reader finds no weight {message}"
    return AdapterUnavailable(f"adapter {spec.id!r} cannot be loaded from {spec.source}: {message}")


def read(spec: AdapterSpec, file: Path, pipeline: Any, pace: Pace = no_pace) -> AdapterFile:
    """Read an adapter's file for the model of `pipeline`; raises `AdapterUnavailable` for unsupported weights.

    Weights that diffusers' reader leaves out are named in a warning.

    `pace` is called after the work on each layer, here and in `combine` and `move`.
    """
    try:
        weights = load_file(file)
        if is_embedding({name: tensor.shape for name, tensor in weights.items()}):
            raise AdapterUnavailable(f"{file.name} holds an embedding; set the token of this adapter to its word")
        if (refusal := unsupported_format(weights)) is not None:
            raise AdapterUnavailable(refusal)
        model = _Model(pipeline, file, spec.component, pace)
        by_kind = separate(_without_cores(weights, model))
        changes, warnings = _read_lora(by_kind.lora, model) if by_kind.lora else ({}, [])
        warnings += _add_products(changes, by_kind, model)
    except AdapterUnavailable as error:
        raise AdapterUnavailable(f"adapter {spec.id!r}: {error.message}") from None
    except Exception as error:  # diffusers' readers raise many types for a bad file
        raise load_error(spec, error) from None
    if spec.component is not None and list(changes) == ["transformer"]:
        changes = {spec.component: changes["transformer"]}
    if not any(changes.values()):
        raise AdapterUnavailable(f"adapter {spec.id!r}: {file.name} holds no LoRA weights")
    return AdapterFile(changes, tuple(f"{spec.id!r}: {warning}" for warning in dict.fromkeys(warnings)))


@dataclass(frozen=True)
class _Model:
    """The model that a file is read for; `component` replaces the denoiser that its names say."""

    pipeline: Any
    file: Path
    component: str | None
    pace: Pace

    def places_of(self, sizes: Mapping[str, int]) -> tuple[list[LayerPlace], Mapping[str, Any]]:
        return places_of(sizes, self.file, self.pipeline, self.pace)

    def check_size(self, place: LayerPlace, size: Size) -> None:
        """Raise `AdapterUnavailable` for a matrix of the file that does not fit its layer; before it is made."""
        component = place.component
        if component == "transformer" and self.component is not None:
            component = self.component
        check_size([len(place.rows), size.columns], getattr(self.pipeline, component, None), component, place.path)


def _without_cores(weights: State, model: _Model) -> State:
    """Return the weights with the cores of LoRA layers multiplied into them, if they fit their layers."""
    try:
        sizes = core_sizes({name: tensor.shape for name, tensor in weights.items()})
    except ValueError as error:
        raise AdapterUnavailable(str(error)) from None
    if not sizes:
        return weights
    places, _ = model.places_of({layer: size.outputs for layer, size in sizes.items()})
    for place in places:
        model.check_size(place, sizes[place.layer])
    return without_cores(weights, {place.layer for place in places})


def _read_lora(weights: State, model: _Model) -> tuple[_Updates, list[str]]:
    """Return the updates of a file's LoRA matrices, and warnings."""
    known = traced(weights)
    state, alphas, metadata = read_state(known, model.file, model.pipeline)
    warnings = _warnings(without_effect(known, state), weights, metadata)
    state = untraced(state)
    components = sorted({name.partition(".")[0] for name in state})
    changes = {
        name: component_changes(name, state, alphas, metadata, model.pipeline, model.pace) for name in components
    }
    return changes, warnings


def _add_products(changes: _Updates, weights: FileWeights, model: _Model) -> list[str]:
    """Add a file's products and norms to the updates of its LoRA matrices; return warnings."""
    if not weights.outputs:
        return []
    places, metadata = model.places_of(weights.outputs)
    for place in paced(places, model.pace):
        if place.layer in weights.sizes:
            model.check_size(place, weights.sizes[place.layer])
        own = changes.setdefault(place.component, {})
        settings = without_prefix(f"{place.component}.", metadata)
        own[place.path] = _with_products(own.get(place.path, LayerUpdate(None, None)), weights, place, settings)
    placed = {place.layer for place in places}
    return _warnings([layer for layer in weights.outputs if layer not in placed], weights.outputs, metadata)


def _with_products(
    update: LayerUpdate, weights: FileWeights, place: LayerPlace, settings: Mapping[str, Any]
) -> LayerUpdate:
    layer = place.layer
    if (parts := weights.products.get(layer)) is not None:
        product = product_of(parts, weights.alphas.get(layer), place.rows, place.path, settings)
        update = replace(update, products=(*update.products, product))
    if (magnitude := weights.magnitudes.get(layer)) is not None:
        update = replace(update, magnitude=rows_of(magnitude, place.rows, weights.outputs[layer], layer))
    return update


def _warnings(left_out: Sequence[str], names: Iterable[str], metadata: Mapping[str, Any]) -> list[str]:
    warnings = []
    if left_out:
        what = f"{len(left_out)} of its weights, such as {left_out[0]}, are"
        warnings.append(f"{what} left out: diffusers' reader drops them")
    if not metadata and all(name.startswith(PEFT_PREFIX) for name in names):
        warnings.append(
            "its alpha is not known, as PEFT keeps it in adapter_config.json; the rank of each layer is used"
        )
    return warnings
