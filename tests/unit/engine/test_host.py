"""What the system is told of the engine's thread."""

from __future__ import annotations

import os
import threading

import pytest

from worker.engine.thread_settings import NICENESS, go_first


@pytest.mark.parametrize(
    ("device", "threads", "cores", "first"),
    [("cuda", None, 2, True), ("cpu", 1, 2, True), ("cpu", 2, 2, False), ("cpu", None, 2, False)],
)
def test_the_engines_thread_goes_first_where_others_keep_a_core(
    device: str, threads: int | None, cores: int, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone, not the process; and it does not matter whether the system lets it."""
    told: list[tuple[int, int, int]] = []

    def refuse(which: int, who: int, niceness: int) -> None:
        told.append((which, who, niceness))
        raise PermissionError

    monkeypatch.setattr("os.setpriority", refuse)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    go_first(device, threads)
    assert told == ([(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)] if first else [])
