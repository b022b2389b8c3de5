"""Saves the figures of a benchmark with hardware, versions, commit and command, so that they can be reproduced."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
LINE = 120
PACKAGES = ("torch", "diffusers", "transformers", "redis")


def about(**more: Any) -> dict[str, Any]:
    """Return hardware, versions, commit and command of this run, and `more`."""
    environment: dict[str, Any] = {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": commit(),
        "hardware": hardware(),
        # A load above the number of busy benchmark processes means that other work ran.
        "load_average_1_5_15_min": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
    }
    return environment | {name: _version(name) for name in PACKAGES} | more


def report(path: Path | None, figures: Mapping[str, Any], **more: Any) -> None:
    """Print figures, and write them to `path` if there is one."""
    print(compact(figures), flush=True)
    if path is not None:
        write(path, figures, **more)


def write(path: Path, figures: Mapping[str, Any], **more: Any) -> None:
    """Write figures and `about` to `path`."""
    path.write_text(compact({"about": about(**more), **figures}) + "\n", "utf-8")


def compact(value: Any, indent: str = "") -> str:
    """Return JSON that has what fits on a line in one line."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= LINE:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        rows, (first, last) = [f"{json.dumps(name)}: {compact(one, inner)}" for name, one in value.items()], "{}"
    else:
        rows, (first, last) = [compact(one, inner) for one in value], "[]"
    return "\n".join((first, ",\n".join(inner + row for row in rows), indent + last))


def hardware() -> str:
    """Return GPUs, CPU model, usable cores and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return ", ".join([*gpus, f"{cores} cores of {_processor()}", f"{memory:.0f} GiB"])


def _processor() -> str:
    fields: dict[str, str] = {}
    for line in _output("lscpu").splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    if "Model name" not in fields:
        return platform.processor() or platform.machine()
    return f"{fields['Model name']} (family {fields.get('CPU family')}, model {fields.get('Model')})"


def commit() -> str:
    """Return the commit of the working tree, marked if it has changes.

    The variable `COMMIT` states it for a copy on another machine.
    """
    if stated := os.environ.get("COMMIT"):
        return stated
    short = _output("git", "rev-parse", "--short", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{short}, with changes" if short and changed else short or "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
