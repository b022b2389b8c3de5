"""What the C library is told when the CPU is the device."""

from __future__ import annotations

import ctypes
import platform

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

LARGEST_KEPT = 32 * 1024 * 1024
KEPT_AT_THE_TOP = 1024 * 1024 * 1024


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
