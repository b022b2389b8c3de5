"""Greenlets of image tasks: what they are entered with, and torch's errors in them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from worker.engine.fusion.task_greenlet import TaskGreenlet, current_task, park, run_on_trampoline

# Tasks start below some C calls, and go on below none, with doubles where the stack of these calls was.
TORCH_ERRORS = """
import functools, math, sys, threading
import torch
from worker.engine.fusion.task_greenlet import TaskGreenlet, park, run_on_trampoline

PARTIAL_SUMS = [float(f"1.7e{300 - 18 * at}") for at in range(30)]

def fail():
    park(None)
    try:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    except RuntimeError:
        errors.append(1)

def below(calls, function):
    return functools.reduce(lambda *_: below(calls - 1, function), (0, 1)) if calls else function()

def fill_stack(calls):
    math.fsum(PARTIAL_SUMS)
    if calls:
        list(map(fill_stack, (calls - 1,)))
    math.fsum(PARTIAL_SUMS)

def engine():
    for calls in range(8):
        task = TaskGreenlet(fail, None)
        below(calls, task.enter)
        fill_stack(20)
        task.enter()

errors = []
thread = threading.Thread(target=run_on_trampoline, args=(engine,))
thread.start()
thread.join()
print(len(errors))
"""


def run(engine: Callable[[], None]) -> None:
    """Run `engine` in a thread, as the engine does."""
    failed: list[BaseException] = []

    def body() -> None:
        try:
            run_on_trampoline(engine)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def test_a_torch_error_in_a_task_that_another_part_of_the_engine_started_does_not_end_the_process() -> None:
    """torch records a backtrace in each error. Entered directly, these tasks end with a segmentation fault."""
    ended = subprocess.run([sys.executable, "-c", TORCH_ERRORS], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.strip()) == (0, "8"), ended.stderr


@pytest.mark.parametrize("runner", [run, lambda engine: engine()], ids=["on the trampoline", "without"])
def test_a_task_gets_each_value_and_raises_each_error_that_it_is_entered_with(
    runner: Callable[[Callable[[], None]], None],
) -> None:
    """Tasks take turns; `current_task` is the one that runs."""
    seen: list[object] = []
    current: list[bool] = []

    def body(name: str) -> None:
        seen.append(park(f"{name} first"))
        current.append(current_task() is tasks[name])
        try:
            park(f"{name} second")
        except ValueError as error:
            seen.append(str(error))

    def engine() -> None:
        tasks.update({name: TaskGreenlet(lambda name=name: body(name), None) for name in ("one", "two")})  # type: ignore[misc]
        parked = [task.enter() for task in tasks.values()]
        parked += [task.enter(f"{name}'s rows") for name, task in tasks.items()]
        parked += [task.enter(ValueError(f"{name}'s error")) for name, task in tasks.items()]
        current.append(current_task() is None)
        assert parked == ["one first", "two first", "one second", "two second", None, None]
        assert all(task.dead for task in tasks.values())

    tasks: dict[str, TaskGreenlet] = {}
    runner(engine)
    assert seen == ["one's rows", "two's rows", "one's error", "two's error"]
    assert current == [True, True, True]


def test_an_error_of_the_engine_leaves_the_trampoline() -> None:
    def engine() -> None:
        raise ValueError("lost device")

    with pytest.raises(ValueError, match="lost device"):
        run(engine)
