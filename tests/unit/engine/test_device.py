"""System settings of the engine's thread."""

from __future__ import annotations

import os
import threading

import pytest

from worker.engine.device import THREAD_NICENESS, raise_thread_priority


@pytest.mark.parametrize(
    ("device", "threads", "cores", "raised"),
    [("cuda", None, 2, True), ("cpu", 1, 2, True), ("cpu", 2, 2, False), ("cpu", None, 2, False)],
)
def test_the_engine_thread_gets_a_higher_priority_where_other_threads_keep_a_core(
    device: str, threads: int | None, cores: int, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread, not the process; a system that refuses is no error."""
    calls: list[tuple[int, int, int]] = []

    def refuse(which: int, who: int, niceness: int) -> None:
        calls.append((which, who, niceness))
        raise PermissionError

    monkeypatch.setattr("os.setpriority", refuse)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    raise_thread_priority(device, threads)
    assert calls == ([(os.PRIO_PROCESS, threading.get_native_id(), THREAD_NICENESS)] if raised else [])
