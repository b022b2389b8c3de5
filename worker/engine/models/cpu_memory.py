"""Evicted models whose weights stay in CPU memory while there is room, so that coming back is a copy and not a load."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

from worker.engine.models.residency import ModelInMemory, dropped_for, why_not_kept
from worker.engine.pipelines.loaded_model import LoadedModel

log = structlog.get_logger()

RESERVED_SHARE = 0.25  # of the memory of the machine or container, for loads, forwards, outputs and other processes
_ALIGNMENT = 512  # bytes, as torch's allocators
_CGROUP = Path("/sys/fs/cgroup")


class CpuMemory(NamedTuple):
    """Bytes of the machine's memory, or of the container's if that has a limit."""

    total: int
    available: int


def cpu_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> CpuMemory:
    """Return the memory that this process can use. The page cache counts as available, as the kernel drops it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = CpuMemory(total, total)
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        memory = CpuMemory(total, 1024 * int(fields["MemAvailable"].split()[0]))
    with contextlib.suppress(OSError, ValueError, KeyError):  # no cgroup v2, or no limit: "max"
        limit = int((cgroup / "memory.max").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cache = int(stat["inactive_file"]) + int(stat["active_file"])
        used = int((cgroup / "memory.current").read_text()) - cache
        memory = CpuMemory(min(memory.total, limit), max(0, min(memory.available, limit - used)))
    return memory


class WeightBlock:
    """One block of CPU memory for the weights of a model, page-locked for CUDA.

    torch's own page-locked memory rounds each tensor up to a power of two and is not returned to the system.
    """

    def __init__(self, nbytes: int, *, lock: bool) -> None:
        self._block = torch.empty(nbytes, dtype=torch.uint8)
        self._used = 0
        self.locked = lock and self._register()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor` in this block."""
        start, nbytes = self._used, tensor.numel() * tensor.element_size()
        self._used += aligned_bytes(tensor)
        strides = torch.empty_like(tensor, device="meta").stride()
        copy = self._block[start : start + nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)
        return copy.copy_(tensor, non_blocking=self.locked)

    def _register(self) -> bool:
        """Lock the block's pages; without, copies are slower."""
        error = torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), self._block.nbytes, 0)
        if int(error) != 0:
            log.warning("pages_not_locked", bytes=self._block.nbytes, error=str(error), remedy="ulimit -l unlimited")
        return int(error) == 0

    def __del__(self) -> None:
        if getattr(self, "locked", False):
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())


class KeptModel:
    """An evicted model. Its weights move to CPU memory and back on the loader's thread.

    `moved_s` is how long the move took, about as long as the way back. On a CPU, where both are the same memory,
    nothing is copied, unless `copies`.
    """

    def __init__(self, model: LoadedModel, *, copies: bool) -> None:
        self.model = model
        self.moved_s = 0.0
        self.moved = not copies  # whether the memory of its weights is in use already
        self._copies = copies
        self._block: WeightBlock | None = None

    @property
    def in_memory(self) -> ModelInMemory:
        return ModelInMemory(self.model.spec.id, self.model.nbytes, self.model.last_used)

    def move_out(self) -> None:
        """Copy the weights to CPU memory, and free them on the device."""
        started = time.monotonic()
        if self._copies:
            device = self.model.device
            block = WeightBlock(sum(map(aligned_bytes, self._weights())), lock=device.type == "cuda")
            self._move(block.place)
            synchronize(device)
            self._block = block
            self.moved = True
        self.moved_s = time.monotonic() - started

    def free(self) -> None:
        """Free the weights on the device, without a copy."""
        if self._copies:
            self._move(lambda weight: torch.empty_like(weight, device="meta"))

    def move_back(self) -> LoadedModel:
        """Copy the weights to the device, and free them in CPU memory."""
        if self._copies:
            device, locked = self.model.device, self._block is not None and self._block.locked
            self._move(lambda weight: _copied(weight, device, non_blocking=locked))
            synchronize(device)
            self._block = None
        return self.model

    def _weights(self) -> Iterator[torch.Tensor]:
        """Yield all parameters and buffers, shared ones once."""
        modules = self.model.watch.modules
        tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
        yield from {id(tensor): tensor for tensor in tensors}.values()

    def _move(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first keeps its id from being used again

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:  # else it is shared, and has moved
                result = copy(tensor)
                moved[id(tensor)] = moved[id(result)] = tensor, result
            return moved[id(tensor)][1]

        for module in self.model.watch.modules:
            module._apply(once)  # what `Module.to` calls


class KeptModels:
    """LRU cache of evicted models with weights in CPU memory. For the engine's thread; `nbytes` from any thread.

    Without a configured budget, a quarter of the memory stays free.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self._copies = copies_weights(device)
        self._models: dict[str, KeptModel] = {}
        self._returning: dict[str, KeptModel] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The models that a request finds here, callable from any thread."""
        return tuple(self._models)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept models, and of those on their way back."""
        return sum(one.model.nbytes for one in self._all)

    @property
    def _all(self) -> tuple[KeptModel, ...]:
        return (*tuple(self._models.values()), *tuple(self._returning.values()))

    @property
    def models(self) -> tuple[LoadedModel, ...]:
        """The kept models, and those on their way back."""
        return tuple(one.model for one in self._all)

    def move_times_s(self) -> dict[str, float]:
        """Return how long each kept model takes to come back, about; callable from any thread."""
        return {name: kept.moved_s for name, kept in tuple(self._models.items())}

    def add(self, model: LoadedModel) -> KeptModel | None:
        """Keep an evicted model, and drop others for it; None if it cannot be kept. Its weights have not moved yet."""
        if why_not_kept(model.spec) is not None or not self._make_room(model.nbytes, copied=self._copies):
            return None
        kept = KeptModel(model, copies=self._copies)
        self._models[model.spec.id] = kept
        return kept

    def move_out(self, kept: KeptModel) -> None:
        """Move the weights of a kept model to CPU memory, or free them if it has been dropped; on any thread."""
        if kept in self._all:
            kept.move_out()
        else:
            kept.free()

    def make_room(self, nbytes: int) -> bool:
        """Drop models for a load of `nbytes` where no configured budget says how many may stay; True if some were."""
        before = len(self._models)
        if self._budget_bytes is None and not self._make_room(nbytes, copied=True):
            self._models.clear()
        return len(self._models) < before

    def take(self, model: str) -> KeptModel | None:
        """Return a kept model that is to come back; it counts as kept until `end_return` or `put_back`."""
        kept = self._models.pop(model, None)
        if kept is not None:
            self._returning[model] = kept
        return kept

    def put_back(self, kept: KeptModel) -> None:
        """Keep a model that has not come back."""
        self.end_return(kept.model.spec.id)
        self._models[kept.model.spec.id] = kept

    def end_return(self, model: str) -> None:
        """Drop a model that has come back, or could not."""
        self._returning.pop(model, None)

    def forget(self, kept: KeptModel) -> None:
        """Drop a model whose weights could not be moved, unless it is to come back."""
        if self._models.get(kept.model.spec.id) is kept:
            del self._models[kept.model.spec.id]

    def drop(self, model: str) -> bool:
        """Free a kept model; False if there is none."""
        return self._models.pop(model, None) is not None

    def _make_room(self, nbytes: int, *, copied: bool) -> bool:
        if self._budget_bytes is not None:
            room_bytes = self._budget_bytes - self.nbytes
        else:
            memory = cpu_memory()
            unmoved_bytes = sum(one.model.nbytes for one in self._all if not one.moved)
            room_bytes = memory.available - unmoved_bytes - int(RESERVED_SHARE * memory.total)
            room_bytes += 0 if copied else nbytes
        dropped = dropped_for(nbytes, [one.in_memory for one in self._models.values()], room_bytes)
        for model in dropped or ():
            log.info("kept_model_dropped", model=model, bytes=self._models.pop(model).model.nbytes)
        return dropped is not None


def copies_weights(device: torch.device) -> bool:
    """Return whether the weights of an evicted model must be copied, as the device has its own memory."""
    return device.type != "cpu"


def aligned_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in a block."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def synchronize(device: torch.device) -> None:
    """Wait for the copies of this thread's stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _copied(weight: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
    return weight.clone() if device.type == "cpu" else weight.to(device, non_blocking=non_blocking)
