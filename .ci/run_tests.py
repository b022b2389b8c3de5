"""Run pytest, then each failed test once more by itself; arguments are pytest's.

A test that passes the second time is printed as UNSTABLE with its first failure and does not fail the run.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MAX_RERUNS = 20
RERUN_TIMEOUT_S = 600


class FirstFailures:
    """Keeps the failures of a run by node id, in order, and whether all files were collected."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.collected = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.collected = self.collected and not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.texts.setdefault(report.nodeid, report.longreprtext)


def passes_alone(node_id: str, options: list[str]) -> bool:
    """Run one test in a new process; return whether it passed."""
    command = [sys.executable, "-m", "pytest", "-q", *options, node_id]
    try:
        return subprocess.run(command, timeout=RERUN_TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{node_id} took more than {RERUN_TIMEOUT_S} s", flush=True)
        return False


def run(arguments: list[str], rerun_options: list[str]) -> int:
    """Return the exit status: that of pytest, but 0 if all failed tests pass by themselves."""
    failures = FirstFailures()
    status = int(pytest.main(arguments, plugins=[failures]))
    if status != pytest.ExitCode.TESTS_FAILED or not failures.collected:
        return status
    if len(failures.texts) > MAX_RERUNS:
        print(f"{len(failures.texts)} tests failed: more than the {MAX_RERUNS} that are run once more")
        return status
    unstable = [node_id for node_id in failures.texts if passes_alone(node_id, rerun_options)]
    for node_id in unstable:
        print(f"\nUNSTABLE {node_id}: it failed, then passed by itself; its first failure:\n{failures.texts[node_id]}")
    for node_id in failures.texts.keys() - unstable:
        print(f"FAILED TWICE {node_id}")
    return 0 if len(unstable) == len(failures.texts) else status


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    sys.exit(run(sys.argv[1:split], sys.argv[split + 1 :]))
