"""Which models stay in device memory, which in CPU memory, and which are freed: pure decisions."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shared.config.model_spec import ModelSpec


@dataclass(frozen=True)
class ModelInMemory:
    """A model in memory: the bytes of its weights, and the time of its last use."""

    model: str
    nbytes: int
    last_used: float


def why_not_kept(spec: ModelSpec) -> str | None:
    """Return the key for which an evicted model is freed at once; None if its weights can move to CPU memory.

    Quantized tensors and compiled graphs belong to their device, groups are offloaded by hooks, and other processes
    hold the weights of a model over several devices.
    """
    if spec.quantization is not None:
        return "quantization"
    if spec.compile:
        return "compile"
    if spec.offload != "none":
        return "offload"
    return "devices" if spec.devices > 1 else None


def next_evicted(loaded: Iterable[ModelInMemory], busy: Collection[str], pinned: Collection[str]) -> str | None:
    """Return the least recently used model that is neither busy nor pinned; None if there is none."""
    idle = [one for one in loaded if one.model not in busy and one.model not in pinned]
    return min(idle, key=lambda one: one.last_used).model if idle else None


def dropped_for(nbytes: int, kept: Iterable[ModelInMemory], room_bytes: int) -> Sequence[str] | None:
    """Return which kept models to free, least recently used first, so that `nbytes` more fit into CPU memory.

    `room_bytes` is what fits next to all of them; it is negative if they are too many already. None: `nbytes` do not
    fit without any of them either.
    """
    dropped = []
    for one in sorted(kept, key=lambda one: one.last_used):
        if nbytes <= room_bytes:
            break
        dropped.append(one.model)
        room_bytes += one.nbytes
    return dropped if nbytes <= room_bytes else None
