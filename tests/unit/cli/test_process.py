"""Child processes: bounded logs, and no process outlives the child or its parent."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from cli.up.child_process import BoundedLog, Process

ROOT = Path(__file__).resolve().parents[3]


def gone(pid: int) -> bool:
    """Return whether a process has ended, also as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until(condition, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timeout waiting until {what}"
        await asyncio.sleep(0.01)


async def start(code: str, log: BoundedLog) -> Process:
    return await Process.start((sys.executable, "-c", code), env=dict(os.environ), log=log)


def test_a_log_and_its_rotated_file_are_bounded(tmp_path):
    """Neither file exceeds the bound."""
    log = BoundedLog(tmp_path / "a.log", max_bytes=1000)
    for number in range(200):
        log.write(b"%060d\n" % number)
    log.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"a.log", "a.log.1"}
    assert max(sizes.values()) <= 1000
    assert log.tail()[-1].endswith("199")


def test_a_line_without_newline_is_not_kept_in_memory(tmp_path):
    """The tail is bounded in bytes too."""
    log = BoundedLog(tmp_path / "a.log")
    for _ in range(100):
        log.write(b"x" * 10_000)
    assert sum(map(len, log.tail())) <= 2000
    log.close()


def test_a_log_that_cannot_be_written_loses_its_lines_only(tmp_path, monkeypatch):
    """On a full disk: the tail goes on, and so does the file when there is space again."""
    log = BoundedLog(tmp_path / "a.log", max_bytes=30)
    log.write(b"before\n")
    with monkeypatch.context() as full:
        full.setattr(os, "fstat", Mock(side_effect=OSError(28, "No space left on device")))
        log.write(b"lost\n")
    folder = tmp_path / "a.log.1"
    folder.mkdir()  # the rotation fails
    log.write(b"x" * 40 + b"\n")
    folder.rmdir()
    log.write(b"after\n")
    log.close()
    assert log.tail() == ["before", "lost", "x" * 40, "after"]
    assert (tmp_path / "a.log").read_text() == "before\nafter\n"


def test_a_fault_of_a_model_or_of_the_models_file_is_reported_once_for_each_reason(tmp_path):
    """Loads are repeated for ever; lines that only contain the event's name are none."""
    faults: list[str] = []
    log = BoundedLog(tmp_path / "a.log", on_fault=faults.append)
    lines = [
        {"event": "model_unavailable", "model": model, "error": error} for model, error in ("ax", "ax", "bx", "ay")
    ]
    lines += [{"event": "models_file_refused", "error": "file"} for _ in range(2)]
    for line in (*map(json.dumps, lines), 'a prompt with "model_unavailable"', '["model_unavailable"]'):
        log.write(line.encode() + b"\n")
    log.close()
    assert faults == ["x", "x", "y", "file"]


async def test_output_of_both_streams_is_in_the_log(tmp_path):
    """The tail has the last lines of stdout and stderr after the exit."""
    log = BoundedLog(tmp_path / "a.log")
    process = await start("import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)", log)
    assert await process.wait() == 3
    assert log.tail() == ["out", "err"]
    log.close()


async def test_grandchildren_end_with_the_child(tmp_path):
    """A grandchild that holds the output open is killed and does not delay `wait`."""
    log = BoundedLog(tmp_path / "a.log")
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    process = await start(code, log)
    async with asyncio.timeout(60):
        await process.wait()
    grandchild = int(log.tail()[0])
    await until(lambda: gone(grandchild), "the grandchild has ended")
    log.close()


async def test_a_terminal_interrupt_does_not_reach_a_child(tmp_path):
    """A child has a process group and a session of its own: Ctrl-C drains in order, and no child waits for the CPU time
    of another."""
    log = BoundedLog(tmp_path / "a.log")
    process = await start('import os, time; print(f"{os.getpgid(0)} {os.getsid(0)}", flush=True); time.sleep(600)', log)
    await until(log.tail, "the child has written")
    group, session = map(int, log.tail()[0].split())
    assert group == process.pid != os.getpgid(0)
    assert session == process.pid
    process.terminate()
    assert await process.wait() == -signal.SIGTERM
    log.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a child when its parent dies")
def test_a_child_is_killed_with_its_parent(tmp_path):
    """`kill -9` of the supervisor leaves no orphan."""
    code = f"""
import asyncio, os, sys
from pathlib import Path
from cli.up.child_process import BoundedLog, Process
async def main():
    log = BoundedLog(Path({str(tmp_path)!r}) / "a.log")
    process = await Process.start(("sleep", "600"), env=dict(os.environ), log=log)
    print(process.pid, flush=True)
    await process.wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not gone(child)
        parent.kill()
    asyncio.run(until(lambda: gone(child), "the child has ended"))
