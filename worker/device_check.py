"""`python -m worker.device_check`: look at the device, as `python -m shared.doctor` does at the rest."""

from __future__ import annotations

import shutil
import sys

from shared.config import settings
from shared.doctor import Finding, failed, ok, tell, warning
from shared.errors import FusequeueError
from worker.engine.device import DeviceFacts, device_facts


def device(asked: str | None) -> Finding:
    """Tell of the device that a worker would compute on."""
    try:
        facts = device_facts(asked)
    except ValueError as error:
        return failed("device", str(error), "set FUSEQUEUE_DEVICE to cuda, cuda:N or cpu, or unset it")
    return judge(facts, gpu_present=shutil.which("nvidia-smi") is not None)


def judge(facts: DeviceFacts, *, gpu_present: bool) -> Finding:
    """Return what to think of a device that can be used."""
    if facts.kind == "cpu":
        if gpu_present:
            remedy = "install a torch build for CUDA, or check the driver: nvidia-smi is there"
            return warning("device", "cpu, beside a GPU that torch cannot use", remedy)
        return warning("device", "cpu", "for real models use a GPU: install a torch build for it")
    seen = f"{facts.name}, {facts.free_bytes / 2**30:.1f} of {facts.total_bytes / 2**30:.1f} GiB free"
    if facts.free_bytes < 0.5 * facts.total_bytes:
        return warning("device", seen, "another process holds its memory: nvidia-smi names it")
    return ok("device", seen)


def main() -> int:
    """Run the checks that need torch."""
    try:
        configured = settings.load()
    except FusequeueError:
        return 0  # told by shared.doctor
    tell(device(configured.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
