"""The CPU cores that this process may use at once: by its affinity, and by the limit of its container."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Return the cores; a limit of 1.5 counts as two.

    `cgroup` is where a container sees its own control group, of version 2 or 1.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    limit = _limit(cgroup)
    return cores if limit is None else max(1, min(cores, math.ceil(limit)))


def _limit(cgroup: Path) -> float | None:
    """Return the cores' worth of CPU time that the control group may use, None without a limit."""
    values = _read(cgroup / "cpu.max").split() or [
        _read(cgroup / "cpu" / "cpu.cfs_quota_us"),
        _read(cgroup / "cpu" / "cpu.cfs_period_us"),
    ]
    try:
        quota, period = map(int, values)
    except ValueError:  # no such files, or "max"
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""
