"""`python -m worker.device_check`: check the torch device; `fusequeue doctor` starts it and reads its JSON."""

from __future__ import annotations

import json
import shutil
import sys
from typing import NamedTuple

from shared.config import settings
from shared.errors import FusequeueError
from worker.engine.device import DeviceFacts, device_facts


class DeviceVerdict(NamedTuple):
    """`verdict` is ok, warning or failed; `remedy` is empty if nothing is wrong."""

    verdict: str
    seen: str
    remedy: str = ""


def check(device: str | None) -> DeviceVerdict:
    """Check the device named by the settings."""
    try:
        facts = device_facts(device)
    except ValueError as error:
        return DeviceVerdict("failed", str(error), "set FUSEQUEUE_DEVICE to cuda, cuda:N or cpu, or unset it")
    return judge(facts, gpu_present=shutil.which("nvidia-smi") is not None)


def judge(facts: DeviceFacts, *, gpu_present: bool) -> DeviceVerdict:
    """Return the verdict on a usable device."""
    if facts.kind == "cpu":
        if gpu_present:
            remedy = "install a torch build for CUDA, or check the driver: nvidia-smi is installed"
            return DeviceVerdict("warning", "cpu, although there is a GPU", remedy)
        return DeviceVerdict("warning", "cpu", "for real models use a GPU: install a torch build for it")
    seen = f"{facts.name}, {facts.free_bytes / 2**30:.1f} of {facts.total_bytes / 2**30:.1f} GiB free"
    if facts.free_bytes < 0.5 * facts.total_bytes:
        return DeviceVerdict("warning", seen, "another process uses its memory: nvidia-smi shows it")
    return DeviceVerdict("ok", seen)


def main() -> int:
    """Print the verdict as JSON."""
    try:
        config = settings.load()
    except FusequeueError:
        return 0  # reported by `fusequeue doctor` itself
    print(json.dumps(check(config.device)._asdict()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
