"""`fusequeue doctor`: look at what a deployment stands on, and say what to do."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.markup import escape

from cli.client_options import CommandConsole, Exit, Json

TIMEOUT_S = 120  # importing torch on a cold disk takes a while
_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[red]failed[/]"}


def doctor(as_json: Json = False) -> None:
    """Check Redis, storage, models, API and device under the present settings; status 1 if something cannot work."""
    console = CommandConsole(as_json)
    broken = False
    for finding in _findings():
        broken = broken or finding["verdict"] == "failed"
        if as_json:
            console.record(finding, ())
            continue
        console.out.print(f"{_MARKS[finding['verdict']]}  {escape(finding['name'])}: {escape(finding['seen'])}")
        if finding["remedy"]:
            console.out.print(f"    {finding['remedy']}", markup=False)
    raise typer.Exit(Exit.FAILED if broken else Exit.OK)


def _findings() -> Iterator[dict[str, Any]]:
    yield from _run("shared.doctor")
    if importlib.util.find_spec("torch") is None:
        seen, remedy = "no torch here", "on a worker's machine: pip install 'fusequeue[worker]'"
        yield {"name": "device", "verdict": "warning", "seen": seen, "remedy": remedy}
    else:
        yield from _run("worker.device_check")


def _run(module: str) -> Iterator[dict[str, Any]]:
    """Run the checks of a side in a process of their own: the command itself knows neither Redis nor torch."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield {"name": module, "verdict": "failed", "seen": f"no end after {TIMEOUT_S} s", "remedy": "run it by hand"}
        return
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    if done.returncode:
        seen = done.stderr.strip().rpartition("\n")[2][:300]
        yield {"name": module, "verdict": "failed", "seen": seen, "remedy": f"run it by hand: python -m {module}"}
