"""What the keys of a model's entry in the models file exclude of each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shared.config.adapters import Adapter, uploaded_ids
from shared.config.controls import controls_fault
from shared.config.models_file_faults import duplicated
from shared.config.refiners import refiner_fault
from shared.config.weight_formats import casting_fault
from shared.job_fields import MAX_DURATION_S
from shared.tasks import Medium

if TYPE_CHECKING:
    from shared.config.model_spec import ModelSpec


def faults_of(spec: ModelSpec) -> Iterator[str]:
    """Yield the faults of an entry whose keys are valid one by one."""
    if not spec.source and spec.checkpoint is None:
        yield "source is missing: set it to a folder or a hub id"
    if spec.makes_meshes and (fault := _mesh_fault(spec)):
        yield fault
    yield from _limits_faults(spec)
    yield from _weights_faults(spec)
    yield from _parts_faults(spec)


def _limits_faults(spec: ModelSpec) -> Iterator[str]:
    """Yield what jobs could not keep to."""
    limits, frames, layers = spec.limits, spec.usual_frames, spec.defaults.layers
    if limits.max_images > spec.max_batch:
        wrong = f"limits.max_images {limits.max_images} is above max_batch {spec.max_batch}"
        yield f"{wrong}: set limits.max_images to at most that"
    if spec.slice_s and not spec.checkpoint_s:
        yield "slice_s needs checkpoint_s: jobs without checkpoints are not put aside"
    if limits.max_frames == 1 and any(task.makes_video for task in spec.tasks):
        yield "a video model needs limits.max_frames"
    if limits.max_duration_s is None and any(task.makes_audio for task in spec.tasks):
        yield "a model of sounds needs limits.max_duration_s"
    if not limits.min_duration_s <= spec.usual_duration_s <= (limits.max_duration_s or MAX_DURATION_S):
        yield (
            f"defaults.duration_s {spec.usual_duration_s:g} is not limits.min_duration_s {limits.min_duration_s:g} "
            f"to limits.max_duration_s {limits.max_duration_s}"
        )
    if not limits.allows_frames(frames):
        yield (
            f"defaults.frames {frames} is not a multiple of limits.frames_multiple {limits.frames_multiple} "
            f"plus one, from limits.min_frames {limits.min_frames} to limits.max_frames {limits.max_frames}"
        )
    if unlisted := spec.defaults.extra.keys() - set(spec.extra):
        yield f"defaults.extra has inputs that extra does not list: {', '.join(sorted(unlisted))}"
    if layers > limits.max_layers or (limits.max_layers and not layers):
        yield f"defaults.layers {layers} is not 1 to limits.max_layers {limits.max_layers}"


def _weights_faults(spec: ModelSpec) -> Iterator[str]:
    """Yield what excludes each other of how weights are read, held and run."""
    if spec.quantization is not None and spec.checkpoint is not None:
        yield "quantization excludes checkpoint: it quantizes the weights of source only"
    if spec.compile and spec.offload != "none":
        yield 'compile needs offload = "none": offloading changes the compiled forward'
    if spec.compile is True and spec.adapter:
        yield 'compile = true needs no adapters, which change the compiled forward; use "blocks"'
    if spec.compile is True and spec.prompt_syntax == "weights":
        yield 'compile = true needs prompt_syntax = "plain", as new lengths would be compiled: use "blocks"'
    if spec.quantization is not None and (spec.offload != "none" or spec.compile):
        yield 'quantization needs offload = "none" and compile = false: it is not tested with them'
    if spec.layerwise_casting and (fault := casting_fault(spec.quantization, spec.offload, spec.compile)):
        yield f"layerwise_casting {fault}"
    if spec.devices > 1 and (excluding := _keys_without_devices(spec)):
        yield f"devices = {spec.devices} excludes {', '.join(excluding)}: remove it, or set devices = 1"


def _parts_faults(spec: ModelSpec) -> Iterator[str]:
    """Yield the faults of what the model has beside its pipeline."""
    if duplicates := duplicated([adapter.id for adapter in spec.adapter]):
        yield f"duplicate adapter ids: {duplicates}"
    if alike := uploaded_ids([Adapter(id=adapter.id) for adapter in spec.adapter]):
        yield f"adapter ids like those of uploaded adapters: {', '.join(alike)}; use others"
    if fault := controls_fault(spec.control, as_loaded=not spec.compile and spec.quantization is None):
        yield fault
    if spec.refiner is not None and (fault := refiner_fault(spec)):
        yield fault
    if spec.scorer is not None and not any(task.medium is Medium.IMAGE for task in spec.tasks):
        yield "scorer: none of its tasks makes images; remove it"


def _mesh_fault(spec: ModelSpec) -> str | None:
    """Return what a model of meshes, which is no diffusers folder, cannot have."""
    if len(spec.tasks) > 1:
        return "tasks: a model of meshes does image_to_mesh only"
    used = {
        "checkpoint": spec.checkpoint is not None,
        "vae": spec.vae is not None,
        "quantization": spec.quantization is not None,
        "layerwise_casting": spec.layerwise_casting is not None,
        "offload": spec.offload != "none",
        "devices": spec.devices > 1,
        "control": bool(spec.control),
        "adapter": bool(spec.adapter),
        "schedulers": bool(spec.schedulers),
        "defaults.scheduler": spec.defaults.scheduler is not None,
        "prompt_syntax": spec.prompt_syntax != "plain",
    }
    return next((f"{key}: a model of meshes takes none" for key, is_used in used.items() if is_used), None)


def _keys_without_devices(spec: ModelSpec) -> list[str]:
    """Return the keys in use that exclude several devices: they change weights or forwards in one process only."""
    used = {
        "adapter": bool(spec.adapter),
        "control": bool(spec.control),
        "compile": bool(spec.compile),
        "quantization": spec.quantization is not None,
        "layerwise_casting": spec.layerwise_casting is not None,
        "offload": spec.offload != "none",
        "checkpoint": spec.checkpoint is not None,
    }
    return [key for key, is_used in used.items() if is_used]
