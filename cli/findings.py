"""What a check of a deployment has found."""

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MIN_FREE_BYTES = 2 * 2**30


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


OK, WARNING, FAILED = Verdict


@dataclass(frozen=True)
class Finding:
    """Result of one check; `remedy` is empty if nothing is wrong."""

    name: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def little_space(folder: Path) -> str | None:
    """Return how much of the disk of a folder is free if it is little, else None."""
    free = shutil.disk_usage(folder).free
    return f"{free / 2**30:.1f} GiB free" if free < MIN_FREE_BYTES else None
