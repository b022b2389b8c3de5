"""State of the global random generators. They are shared by all image tasks, and each task has its own state."""

import threading
from functools import cache
from types import TracebackType
from typing import Any

import torch

_in_use = threading.RLock()
"""Held while the generators have the state of an image task: a program can have several engines, each a thread."""


class RngState:
    """The state of one image task. As a context, it is on the generators; what has been drawn there is kept after it.

    It is not kept after an error, so that another try of a call draws the same. In both cases the generators then have
    the state again that they had before: that of the program whose process this is.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = generators(device)
        self._states: list[torch.Tensor] | None = None  # at first that of the program
        self._programs: list[torch.Tensor] = []

    def __enter__(self) -> None:
        _in_use.acquire()
        self._programs = self._read()
        if self._states is not None:
            self._write(self._states)

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        if kind is None:
            self._states = self._read()
        self._write(self._programs)
        _in_use.release()

    def _read(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _write(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def seed_globally(device: torch.device, seed: int) -> None:
    """Seed the global generators, for pipelines that draw from them.

    `torch.manual_seed` seeds every kind of device, and took 0.2 ms with only a CPU.
    """
    for generator in generators(device):
        generator.manual_seed(seed)


@cache  # read at each switch; torch's current device does not change
def generators(device: torch.device) -> tuple[Any, ...]:
    """Return the CPU's global generator, and that of `device` if it is a GPU."""
    if device.type != "cuda":
        return (torch.default_generator,)
    cuda: Any = torch.cuda
    at = torch.cuda.current_device() if device.index is None else device.index
    return (torch.default_generator, cuda.default_generators[at])
