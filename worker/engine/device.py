"""The device that an engine computes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """What can be told of a device; the bytes are 0 for a CPU."""

    kind: str
    name: str
    free_bytes: int = 0
    total_bytes: int = 0


def chosen_device(asked: str | None) -> torch.device:
    """Return the device to compute on: `asked`, else cuda where there is one, else the CPU."""
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


def uuid_of(device: torch.device) -> str | None:
    """Return the UUID of a CUDA device, as `8-4-4-4-12` hexadecimal digits; None for any other."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def device_facts(asked: str | None) -> DeviceFacts:
    """Return what the chosen device is; raises ValueError where it is not there."""
    try:
        device = chosen_device(asked)
    except RuntimeError as error:
        raise ValueError(f"{asked!r} is no device of torch") from error
    if device.type == "cpu":
        return DeviceFacts("cpu", "cpu")
    if device.type != "cuda":
        raise ValueError(f"{asked!r}: only cuda and cpu are supported")
    if not torch.cuda.is_available():
        raise ValueError(f"{asked!r}: torch {torch.__version__} sees no CUDA device")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{asked!r}: there are {torch.cuda.device_count()} CUDA devices")
    free, total = torch.cuda.mem_get_info(device)
    return DeviceFacts("cuda", torch.cuda.get_device_name(device), free, total)


def watch_memory(device: torch.device) -> Callable[[], Callable[[], int | None]]:
    """Return a watch: calling it begins, calling what it returns tells the peak in bytes since then, beside what was
    there before. None for a device whose memory torch does not count.
    """

    def begin() -> Callable[[], int | None]:
        if device.type != "cuda":
            return lambda: None
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - before

    return begin


def device_name(device: torch.device) -> str:
    """Return what a device is called where seconds are learned for it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
