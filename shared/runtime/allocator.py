"""The C library's allocator: what a process frees goes back to the system."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
THRESHOLD_BYTES = 128 * 1024


def return_freed_memory() -> None:
    """Keep glibc from holding on to freed memory; elsewhere do nothing.

    By default it has an arena per thread, and once a large block was freed it takes blocks of up to that size from the
    heap, where small ones that live on keep their pages. After 60,000 jobs a worker's heap had 14 MB of free memory.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, THRESHOLD_BYTES)
