"""What a pool decides, and what it tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.output import CommandConsole
from cli.pool.decisions import Bounds, Moves, PoolWorker, State, Want, aim, moves, remembered
from cli.pool.pool import PoolStatus
from cli.pool.report import Report, words

STANDING = PoolStatus(
    waiting=5, running=2, asked=2, wanted=2, ready=1, starting=1, busy=1, draining=0, failing=0, reasons=("so",)
)


def one(slot: int, state: State = "ready", running: int | None = 0, started_s: float = 0.0) -> PoolWorker:
    return PoolWorker(slot, state, started_s, running)


def after(*told: tuple[float, int]) -> tuple[Want, ...]:
    wants: tuple[Want, ...] = ()
    for at_s, workers in told:
        wants = remembered(wants, Want(at_s, workers), cool_down_s=10.0)
    return wants


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], 0),
        ([(0, 1)], 1),  # the first job counts at once
        ([(0, 1), (1, 3)], 3),  # so does more of them
        ([(0, 3), (9.9, 0)], 3),  # less does not, until the cool-down is over
        ([(0, 3), (10, 0)], 0),
        ([(0, 3), (5, 1), (10, 0)], 1),  # it goes down by what was wanted meanwhile
        ([(0, 3), (5, 3), (10, 0)], 3),  # and begins again when as many are wanted
        ([(0, 9)], 4),  # never above the most
    ],
)
def test_more_counts_at_once_and_less_after_the_cool_down(told: list[tuple[float, int]], expected: int) -> None:
    assert aim(after(*told), others=0, bounds=Bounds(0, 4, 10.0)) == expected


def test_what_is_remembered_does_not_grow() -> None:
    assert len(after(*((at / 100, at % 5) for at in range(900)))) <= 5


@pytest.mark.parametrize(
    ("others", "least", "expected"),
    [(0, 0, 3), (2, 0, 1), (5, 0, 0), (5, 1, 1)],  # workers elsewhere count, but the least are kept
)
def test_workers_elsewhere_count(others: int, least: int, expected: int) -> None:
    assert aim(after((0, 3)), others, Bounds(least, 8, 10.0)) == expected


@pytest.mark.parametrize(
    ("members", "wanted", "expected"),
    [
        ([], 0, Moves()),
        ([], 2, Moves(start=(0, 1))),
        ([], 9, Moves(start=(0, 1, 2))),  # no more than there are slots
        ([one(1)], 2, Moves(start=(0,))),  # the first slot that is free
        ([one(0, "starting", None)], 1, Moves()),  # one on its way counts
        ([one(0), one(1, "draining")], 3, Moves(start=(2,))),  # a slot is free once its worker has left
        ([one(0), one(1, started_s=5)], 1, Moves(drain=(1,))),  # the youngest leaves
        ([one(0), one(1, running=2, started_s=5)], 1, Moves(drain=(0,))),  # unless it has jobs
        ([one(0, running=1), one(1, running=2)], 1, Moves()),  # nobody is taken away from jobs
        ([one(0, running=None)], 0, Moves()),  # nor one of which nothing is known
        ([one(0), one(1, "starting", None, 5)], 0, Moves(drain=(1, 0))),  # one that is still loading has none
        ([one(0, "failing", None)], 1, Moves(start=(1,))),  # one that fails is no help
        ([one(0, "failing", None), one(1, "starting", None)], 1, Moves()),  # it stays until the other is ready,
        ([one(0, "failing", None), one(1)], 1, Moves(drain=(0,))),  # and leaves then,
        ([one(0, "failing", None)], 0, Moves(drain=(0,))),  # or when nobody is wanted
        ([one(slot, "failing", None) for slot in range(3)], 3, Moves()),  # all fail: each tries again in its time
    ],
)
def test_who_starts_and_who_leaves(members: list[PoolWorker], wanted: int, expected: Moves) -> None:
    assert moves(members, wanted, slots=3) == expected


def test_the_log_holds_each_change_and_the_screen_those_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(CommandConsole(as_json=True), tmp_path / "log")
    fewer = PoolStatus(**{**STANDING.__dict__, "waiting": 1})
    more = PoolStatus(**{**STANDING.__dict__, "ready": 2, "starting": 0})
    for standing in (STANDING, STANDING, fewer, more):
        report.told(standing)
    report.plot(tmp_path / "plot.svg")
    report.close()
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(row["waiting"], row["ready"]) for row in logged] == [(5, 1), (1, 1), (5, 2)]
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["ready"] for row in shown] == [1, 2]
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f">{name}</text>" in drawn for name in ("waiting", "running", "wanted", "ready", "busy"))
    assert words(STANDING) == "5 wait; 2 wanted, 1 ready, 1 starting (so)"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--min", "3", "--max", "2"], "--min"), (["--plot", "x.svg"], "--log"), (["--models", "none.toml"], "none.toml")],
)
def test_a_bad_option_is_named(arguments: list[str], word: str, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["pool", "--data-dir", str(tmp_path), *arguments])
    assert ended.exit_code == 2
    assert word in ended.output
