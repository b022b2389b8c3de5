"""Runs of the service's own tests against a server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from stores.packages import ROOT

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """How many tests passed, and which failed, each with its message."""

    passed: int
    failed: Mapping[str, str]
    seconds: float


def run(paths: Sequence[str], options: Sequence[str], variables: Mapping[str, str]) -> Outcome:
    """Run tests with these environment variables."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fusequeue-stores-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            [*command, *options, *paths],
            cwd=ROOT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-3000:]}{done.stderr[-1000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    ran = {(case.get("classname"), case.get("name")) for case in cases if case.find("skipped") is None}
    failed: dict[str, str] = {}
    for case in cases:
        for fault in (*case.findall("failure"), *case.findall("error")):
            failed.setdefault(str(case.get("name")), str(fault.get("message")).partition("\n")[0])
            ran.discard((case.get("classname"), case.get("name")))
    return Outcome(len(ran), failed, time.monotonic() - started)
