"""What the system is told of the engine's thread."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

LARGEST_KEPT = 32 * 1024 * 1024
KEPT_AT_THE_TOP = 1024 * 1024 * 1024

NICENESS = -10


def keep_freed_memory() -> None:
    """Have malloc keep what a forward frees for the next one, instead of handing it to the system each time.

    By default it does so in a process's first thread only. In the engine's, the page faults took a tenth of a small
    UNet's forwards. The process then stays as large as its largest forward made it. Only glibc listens.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_AT_THE_TOP)


def go_first(device: str, torch_threads: int | None) -> None:
    """Have the calling thread go before others that want its core, where the system lets it: as root, or with the
    capability SYS_NICE.

    While it waits, so does the GPU. Not where torch computes on all cores: its threads, which are as urgent as the one
    that starts them, would leave the API of the same machine none.
    """
    if device == "cpu" and (torch_threads is None or torch_threads >= (os.cpu_count() or 1)):
        return
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
