"""The engine's device, and the system settings of the engine's thread."""

import ctypes
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shared.runtime.cores import usable_cores

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
TRIM_THRESHOLD_BYTES = 1024 * 1024 * 1024


DEVICE_REMEDY = "set FUSEQUEUE_DEVICE to cuda, cuda:N or cpu, or unset it"


@dataclass(frozen=True)
class DeviceFacts:
    """A device and its memory; the bytes are 0 for a CPU."""

    kind: str
    name: str
    free_bytes: int = 0
    total_bytes: int = 0


def choose_device(name: str | None) -> torch.device:
    """Return the device `name`, by default cuda if available, else the CPU."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def device_uuid(device: torch.device) -> str | None:
    """Return the UUID of a CUDA device as `8-4-4-4-12` hexadecimal digits, None for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def device_facts(name: str | None) -> DeviceFacts:
    """Return the facts of the chosen device; raises ValueError if it is not available."""
    try:
        device = choose_device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is not a torch device") from error
    if device.type == "cpu":
        return DeviceFacts("cpu", "cpu")
    if device.type != "cuda":
        raise ValueError(f"{name!r}: only cuda and cpu are supported")
    if not torch.cuda.is_available():
        raise ValueError(f"{name!r}: torch {torch.__version__} sees no CUDA device")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{name!r}: there are {torch.cuda.device_count()} CUDA devices")
    free, total = torch.cuda.mem_get_info(device)
    return DeviceFacts("cuda", torch.cuda.get_device_name(device), free, total)


def device_of_rank(rank: int, devices: int, first: torch.device) -> torch.device:
    """Return the device of a rank, `first` being that of rank 0; raises `ValueError` if there are not enough."""
    if first.type == "cpu":
        return first
    start, present = first.index or 0, torch.cuda.device_count()
    if start + devices > present:
        raise ValueError(
            f"devices = {devices} needs {devices} GPUs from cuda:{start} on, and this worker sees {present}; give it "
            "more (CUDA_VISIBLE_DEVICES) or lower devices"
        )
    return torch.device(first.type, start + rank)


def measure_peak_memory(device: torch.device) -> Callable[[], int | None]:
    """Start a measurement; the returned function returns the peak bytes allocated since then, in addition to those
    allocated at the start. None if torch does not count the device's memory.
    """
    if device.type != "cuda":
        return lambda: None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    return lambda: torch.cuda.max_memory_allocated(device) - before


def device_name(device: torch.device) -> str:
    """Return the name under which the times of a device are learned."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device`; a copy from the host is queued, without waiting for the device."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # other memory is copied while the host waits
    return tensor.to(device, non_blocking=True)


def prepare_thread(device: torch.device, threads: int | None) -> None:
    """Set what torch keeps for the thread that runs the forwards; `threads` are those of torch on the CPU."""
    torch.set_grad_enabled(False)
    use_full_float32()
    if device.type == "cpu":
        keep_freed_memory()
    elif device.index is not None:
        torch.cuda.set_device(device)  # the events that measure forwards are of the thread's current device
    # Torch counts the machine's cores: on 64 of them, a container that may use two would run 64 threads.
    torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))


def use_full_float32() -> None:
    """Let a GPU compute in float32 what is in float32, also convolutions, for which torch's default is TensorFloat-32.

    With its 10 bits, fused rows of Stable Diffusion in float32 were up to 4.5e-3 off their solo runs on an H100, and
    the self-check unfused VAEs; without, 5e-6.
    """
    torch.backends.cudnn.allow_tf32 = False


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next forward, instead of returning it to the system.

    By default it does so on a process's first thread only; on the engine's thread the page faults took a tenth of a
    small UNet's forwards. The process then stays as large as its largest forward made it.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


class DeviceVerdict(NamedTuple):
    """`verdict` is ok, warning or failed; `remedy` is empty if nothing is wrong."""

    verdict: str
    seen: str
    remedy: str = ""


def check(name: str | None) -> DeviceVerdict:
    """Check the chosen device."""
    try:
        return judge(device_facts(name), gpu_present=shutil.which("nvidia-smi") is not None)
    except ValueError as error:
        return DeviceVerdict("failed", str(error), DEVICE_REMEDY)


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
