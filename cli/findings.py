"""What a check of a deployment has found."""

from dataclasses import dataclass
from enum import StrEnum


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
