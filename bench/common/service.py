"""Starts what a benchmark measures: the service with a small model, other servers, the model in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from diffusers import DiffusionPipeline

from bench.common import record
from bench.engine import shapes

MODEL = "small-sd"
SIDE = 64
ROWS = 8
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 60.0
LOG_TAIL_CHARS = 5000

MODELS_FILE = """
[[model]]
id = "{model}"
source = "{source}"
max_batch = {rows}

[model.defaults]
width = {side}
height = {side}
"""


@contextmanager
def small_service(**settings: str) -> Iterator[tuple[str, Any]]:
    """Run `fusequeue up` with a small Stable Diffusion 1.x; yield its URL, and the pipeline with the same weights."""
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch:
        folder = Path(scratch)
        pipeline = small_pipeline(folder / "model")
        with served(folder / "model", folder, **settings) as url:
            yield url, pipeline


def small_pipeline(folder: Path) -> Any:
    """Save a small Stable Diffusion 1.x to `folder`, and load it for this process with one torch thread."""
    torch.set_num_threads(1)
    shapes.disable_progress_bars()
    shapes.save("sd", folder)
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextmanager
def served(model: Path, folder: Path, **settings: str) -> Iterator[str]:
    """Run `fusequeue up` with `model` and a new data folder, and yield its URL."""
    models = folder / "models.toml"
    models.write_text(MODELS_FILE.format(model=MODEL, source=model, rows=ROWS, side=SIDE), "utf-8")
    with up(folder, "--models", str(models), **settings) as url:
        yield url


@contextmanager
def up(folder: Path, *options: str, **settings: str) -> Iterator[str]:
    """Run `fusequeue up` with its data in `folder`, and yield its URL."""
    command = [sys.executable, "-m", "cli.main", "up", "--data-dir", str(folder / "data"), *options]
    log = folder / "up.log"
    with launched(command, log, subprocess.PIPE, **settings) as process:
        assert process.stdout is not None
        with process.stdout:
            word, _, url = process.stdout.readline().decode().strip().partition(" ")
            if word != "ready":
                raise RuntimeError("fusequeue did not start; its messages are above")
            yield url


@contextmanager
def launched(command: list[str], log: Path, stdout: int | None, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of this checkout on the CPU with one torch thread, stderr to `log`; terminate it at the end.

    `stdout` is that of `subprocess`; None: to `log` too.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    env |= {"FUSEQUEUE_TORCH_THREADS": "1", "OMP_NUM_THREADS": "1", "FUSEQUEUE_DEVICE": "cpu"}
    # The checkout first: not an installed fusequeue.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(record.ROOT), env.get("PYTHONPATH"))))
    parent_watch = [sys.executable, "-m", "shared.runtime.parent_process", str(os.getpid()), str(int(signal.SIGTERM))]
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [*parent_watch, *command],
            cwd=record.ROOT,
            env=env | {f"FUSEQUEUE_{name.upper()}": value for name, value in settings.items()},
            stdout=log_file if stdout is None else stdout,
            stderr=log_file,
            start_new_session=True,
        )
    try:
        yield process
    except Exception:
        print(log.read_text()[-LOG_TAIL_CHARS:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_answered(request: Callable[[], httpx.Response], log: Path) -> None:
    """Repeat a request until a server that starts answers it; raises `RuntimeError` with the end of its log."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with suppress(httpx.TransportError):
            if request().is_success:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(log.read_text()[-2000:])
        time.sleep(0.1)
