"""Run pytest, then each failed test once more by itself; arguments are pytest's options.

A test that passes the second time is printed as UNSTABLE with its first failure and does not fail the run. The time of
all tests is printed by folder. A process that dies, or that the time limit of faulthandler ends, fails the test that it
ran; the tests that it leaves run in new processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

MAX_RERUNS = 20
RERUN_TIMEOUT_S = 600
MAX_RUNS = 3
# pytest-xdist 3.8 may wait for ever once it has replaced a dead process (its issue 1323): it ends the run instead.
NO_REPLACEMENT = "--max-worker-restart=0"


class Reports:
    """Keeps the failures of all runs by node id, in order, the tests left to run, and the seconds by folder."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.left: dict[str, None] = {}
        self.seconds: Counter[str] = Counter()
        self.collected = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.left = dict.fromkeys(ids)  # each process collects all of them before the first test starts

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.collected = self.collected and not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds["/".join(report.nodeid.partition("::")[0].split("/")[:-1][:3])] += report.duration
        if report.failed:
            self.failures.setdefault(report.nodeid, report.longreprtext)
        if report.failed or report.when == "teardown":
            self.left.pop(report.nodeid, None)

    def print_seconds(self) -> None:
        """Print a line for each folder, the longest first."""
        for folder, seconds in self.seconds.most_common():
            print(f"{seconds:8.1f} s  {folder or '.'}")


def passes_alone(node_id: str) -> bool:
    """Run one test in a new process; return whether it passed."""
    with subprocess.Popen([sys.executable, "-m", "pytest", "-q", node_id], start_new_session=True) as process:
        try:
            return process.wait(RERUN_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            print(f"{node_id} took more than {RERUN_TIMEOUT_S} s", flush=True)
            os.killpg(process.pid, signal.SIGKILL)
            return False


def run_all(options: list[str], reports: Reports) -> int:
    """Run all tests, those that a dead process has left in another run; return the worst exit status."""
    status = int(pytest.main([NO_REPLACEMENT, *options], plugins=[reports]))
    for _ in range(MAX_RUNS - 1):
        if not reports.left or status > pytest.ExitCode.TESTS_FAILED:
            break
        print(f"a process of pytest has died: {len(reports.left)} tests are left and run now", flush=True)
        status = max(status, int(pytest.main([NO_REPLACEMENT, *options, *reports.left], plugins=[reports])))
    for node_id in reports.left:
        print(f"NOT RUN {node_id}")
    return status


def run(options: list[str]) -> int:
    """Return the exit status: that of pytest, but 0 if all tests ran and those that failed pass by themselves."""
    reports = Reports()
    status = run_all(options, reports)
    reports.print_seconds()
    if reports.left:
        return max(status, int(pytest.ExitCode.TESTS_FAILED))
    if status != pytest.ExitCode.TESTS_FAILED or not reports.collected:
        return status
    if len(reports.failures) > MAX_RERUNS:
        print(f"{len(reports.failures)} tests failed: more than the {MAX_RERUNS} that are run once more")
        return status
    unstable = [node_id for node_id in reports.failures if passes_alone(node_id)]
    for node_id in unstable:
        print(
            f"\nUNSTABLE {node_id}: it failed, then passed by itself; its first failure:\n{reports.failures[node_id]}"
        )
    for node_id in reports.failures.keys() - unstable:
        print(f"FAILED TWICE {node_id}")
    return 0 if len(unstable) == len(reports.failures) else status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
