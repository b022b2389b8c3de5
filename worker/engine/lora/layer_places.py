"""Where the layers of a file are in a model, as diffusers' readers of LoRA files place them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from worker.engine.lora.format_readers import State, component_changes, denoiser_of, read_state
from worker.engine.lora.pacing import Pace

_LYCORIS = "lycoris_"  # of LyCORIS' own trainer, before the path of a layer with underscores


class LayerPlace(NamedTuple):
    """A `layer` of a file in a model. The outputs at `path` are `rows` of its own: a file can have several as one."""

    layer: str
    component: str
    path: str
    rows: torch.Tensor


def places_of(
    layers: Mapping[str, int], file: Path, pipeline: Any, pace: Pace
) -> tuple[list[LayerPlace], Mapping[str, Any]]:
    """Return the places of a file's `layers` and the file's metadata; a reader can drop some layers.

    `layers` have their numbers of outputs.

    The readers know matrices of LoRA only: each layer gets some of rank 1 that say where it goes. One half is the
    number of the layer, the other one the numbers of its outputs.
    """
    names = list(layers)
    paths = _paths_of_lycoris(pipeline) if any(name.startswith(_LYCORIS) for name in names) else {}
    matrices: dict[str, torch.Tensor] = {}
    for number, name in enumerate(names):
        matrices |= _matrices(paths.get(name, name), number, layers[name])
    state, _, metadata = read_state(matrices, file, pipeline)
    places = []
    for component in sorted({name.partition(".")[0] for name in state}):
        for path, update in component_changes(component, state, {}, {}, pipeline, pace).items():
            assert update.down is not None
            assert update.up is not None
            name = names[int(update.down.flatten()[0])]
            rows = update.up.flatten().long()
            places.append(LayerPlace(name, component, path, rows))
    return places, metadata


def _matrices(name: str, number: int, outputs: int) -> State:
    down, up = torch.full((1, 1), float(number)), torch.arange(outputs, dtype=torch.float32)[:, None]
    if "." in name:
        return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(1.0)}


def _paths_of_lycoris(pipeline: Any) -> dict[str, str]:
    """Return the denoiser's layers by their names in files of LyCORIS."""
    component = denoiser_of(pipeline)
    paths = (path for path, _ in getattr(pipeline, component).named_modules())
    return {_LYCORIS + path.replace(".", "_"): f"{component}.{path}" for path in paths}
