"""A pool's decisions and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.client_options import CommandConsole
from cli.main import app
from cli.pool.command import PoolReport, summary
from cli.pool.pool import (
    PoolBounds,
    PoolStatus,
    PoolWorker,
    WantedWorkers,
    WorkerChanges,
    WorkerState,
    plan_changes,
    recent_wants,
    target_workers,
)

STATUS = PoolStatus(
    queued=5, running=2, wanted=2, target=2, ready=1, starting=1, busy=1, draining=0, failing=0, reasons=("so",)
)


def worker(
    index: int, state: WorkerState = "ready", running: int | None = 0, started_s: float = 0.0, bulk: int = 0
) -> PoolWorker:
    return PoolWorker(index, state, started_s, running, bulk)


def after(*steps: tuple[float, int]) -> tuple[WantedWorkers, ...]:
    wants: tuple[WantedWorkers, ...] = ()
    for at_s, workers in steps:
        wants = recent_wants(wants, WantedWorkers(at_s, workers), cool_down_s=10.0)
    return wants


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], 0),
        ([(0, 1)], 1),  # the first job counts at once
        ([(0, 1), (1, 3)], 3),  # so do more workers
        ([(0, 3), (9.9, 0)], 3),  # fewer do not, until the cool-down is over
        ([(0, 3), (10, 0)], 0),
        ([(0, 3), (5, 1), (10, 0)], 1),  # down to the most wanted meanwhile
        ([(0, 3), (5, 3), (10, 0)], 3),  # restarts when as many are wanted
        ([(0, 9)], 4),  # never above the maximum
    ],
)
def test_more_workers_count_at_once_and_fewer_after_the_cool_down(
    steps: list[tuple[float, int]], expected: int
) -> None:
    assert target_workers(after(*steps), others=0, bounds=PoolBounds(0, 4, 10.0)) == expected


def test_recent_wants_are_bounded() -> None:
    assert len(after(*((at / 100, at % 5) for at in range(900)))) <= 5


@pytest.mark.parametrize(
    ("others", "min_workers", "expected"),
    [(0, 0, 3), (2, 0, 1), (5, 0, 0), (5, 1, 1)],  # the minimum is kept
)
def test_workers_outside_the_pool_count(others: int, min_workers: int, expected: int) -> None:
    assert target_workers(after((0, 3)), others, PoolBounds(min_workers, 8, 10.0)) == expected


@pytest.mark.parametrize(
    ("workers", "target", "expected"),
    [
        ([], 0, WorkerChanges()),
        ([], 2, WorkerChanges(start=(0, 1))),
        ([], 9, WorkerChanges(start=(0, 1, 2))),  # no more than the maximum
        ([worker(1)], 2, WorkerChanges(start=(0,))),  # the first free index
        ([worker(0, "starting", None)], 1, WorkerChanges()),  # a starting worker counts
        (
            [worker(0), worker(1, "draining")],
            3,
            WorkerChanges(start=(2,)),
        ),  # an index is free once its worker has exited
        ([worker(0), worker(1, started_s=5)], 1, WorkerChanges(drain=(1,))),  # the youngest is drained
        ([worker(0), worker(1, running=2, started_s=5)], 1, WorkerChanges(drain=(0,))),  # unless it has jobs
        ([worker(0, running=1), worker(1, running=2)], 1, WorkerChanges()),  # busy workers are not drained
        ([worker(0, running=8, bulk=8), worker(1, running=8, bulk=7)], 0, WorkerChanges(drain=(0,))),  # but for bulk
        ([worker(0, running=0), worker(1, running=8, started_s=5, bulk=8)], 1, WorkerChanges(drain=(0,))),  # idle first
        ([worker(0, running=None)], 0, WorkerChanges()),  # nor workers without a heartbeat
        ([worker(0), worker(1, "starting", None, 5)], 0, WorkerChanges(drain=(1, 0))),  # a starting worker has no jobs
        ([worker(0, "failing", None)], 1, WorkerChanges(start=(1,))),  # a failing worker does not count
        (
            [worker(0, "failing", None), worker(1, "starting", None)],
            1,
            WorkerChanges(),
        ),  # it is kept until the other is ready,
        ([worker(0, "failing", None), worker(1)], 1, WorkerChanges(drain=(0,))),  # and drained then,
        ([worker(0, "failing", None)], 0, WorkerChanges(drain=(0,))),  # or when no worker is wanted
        (
            [worker(index, "failing", None) for index in range(3)],
            3,
            WorkerChanges(),
        ),  # all fail: each has its restart backoff
    ],
)
def test_which_workers_are_started_and_drained(workers: list[PoolWorker], target: int, expected: WorkerChanges) -> None:
    assert plan_changes(workers, target, max_workers=3) == expected


def test_the_log_has_each_change_and_the_console_those_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = PoolReport(CommandConsole(as_json=True), tmp_path / "log")
    fewer = PoolStatus(**{**STATUS.__dict__, "queued": 1})
    more = PoolStatus(**{**STATUS.__dict__, "ready": 2, "starting": 0})
    for status in (STATUS, STATUS, fewer, more):
        report.update(status)
    report.plot(tmp_path / "plot.svg")
    report.close()
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(row["queued"], row["ready"]) for row in logged] == [(5, 1), (1, 1), (5, 2)]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["ready"] for row in printed] == [1, 2]
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f">{name}</text>" in drawn for name in ("queued", "running", "target", "ready", "busy"))
    assert summary(STATUS) == "5 queued; 2 wanted, 1 ready, 1 starting (so)"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--min", "3", "--max", "2"], "--min"), (["--plot", "x.svg"], "--log"), (["--models", "none.toml"], "none.toml")],
)
def test_a_bad_option_is_named(arguments: list[str], word: str, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["pool", "--data-dir", str(tmp_path), *arguments])
    assert ended.exit_code == 2
    assert word in ended.output
