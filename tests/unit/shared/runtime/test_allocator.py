"""Memory that a process frees goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
from shared.runtime.allocator import return_freed_memory

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

if sys.argv[1] == "yes":
    return_freed_memory()
del (large := [bytes(16 * 2**20)])[:]  # glibc now takes such blocks from the heap
kept, before = [], resident_mb()
images = []
for _ in range(50):
    images.append(bytearray(b"x") * 2**20)
    kept.append(bytes(2000))  # small and kept, between two images
del images
print(resident_mb() - before)
"""


def grown_mb(returns: str) -> float:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, returns], capture_output=True, text=True, timeout=60, check=True
    )
    return float(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not keep it")
def test_freed_images_do_not_stay_resident_below_small_objects() -> None:
    assert grown_mb("yes") < 10 < grown_mb("no")
