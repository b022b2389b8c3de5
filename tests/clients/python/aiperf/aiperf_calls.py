"""AIPerf: its image endpoints, as a benchmark of a few requests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import checks
from checks import KEY, MODEL, URL, call, same

SIZE = ["--extra-inputs", "size:64x64"]


def profile(endpoint: str, *arguments: str) -> dict[str, object]:
    """Run a benchmark and return its report."""
    folder = Path(endpoint + "".join(arguments[-1:]))
    command = ["aiperf", "profile", "--model", MODEL, "--url", URL, "--api-key", KEY, "--endpoint-type", endpoint]
    load = ["--request-count", "6", "--concurrency", "3", "--prompt-input-tokens-mean", "8"]
    options = ["--tokenizer", "builtin", "--ui", "none", "--artifact-dir", str(folder)]
    done = subprocess.run([*command, *load, *options, *arguments], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    report: dict[str, object] = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    return report


def average(report: dict[str, object], metric: str) -> object:
    found = report[metric]
    return found["avg"] if isinstance(found, dict) else found


@call("profile --endpoint-type image-generation")
def images() -> None:
    report = profile("image-generation", *SIZE)
    same((average(report, "request_count"), report.get("error_summary")), (6, []))


@call("profile --endpoint-type image-generation --streaming")
def streams() -> None:
    report = profile("image-generation", *SIZE, "--streaming")
    same((average(report, "request_count"), report.get("error_summary")), (6, []))


os.environ["HF_HUB_OFFLINE"] = "1"
checks.main()
