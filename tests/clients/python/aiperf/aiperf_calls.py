"""AIPerf: its image endpoints, as a benchmark of a few requests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import checks
from checks import KEY, MODEL, URL, call, same

REQUESTS = 6


def profile(endpoint: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark and return its report."""
    folder = Path(endpoint + "".join(arguments[-1:]))
    command = ["aiperf", "profile", "--model", MODEL, "--url", URL, "--api-key", KEY, "--endpoint-type", endpoint]
    load = ["--request-count", str(REQUESTS), "--concurrency", "3", "--extra-inputs", "size:64x64"]
    prompt = ["--prompt-input-tokens-mean", "8"]
    tokenizer = f"{os.environ['FUSEQUEUE_FOLDER']}/demo/model/tokenizer"  # of the synthetic prompts
    options = ["--tokenizer", tokenizer, "--ui", "none", "--artifact-dir", str(folder)]
    done = subprocess.run([*command, *load, *prompt, *options, *arguments], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    report: dict[str, Any] = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    return report


def check(report: dict[str, Any]) -> None:
    """Check that every request was answered with an image."""
    same((report["request_count"]["avg"], report.get("error_summary") or []), (REQUESTS, []))


@call("profile --endpoint-type image-generation")
def images() -> None:
    check(profile("image-generation"))


@call("profile --endpoint-type image-generation --streaming")
def streams() -> None:
    check(profile("image-generation", "--streaming"))


@call("profile --endpoint-type image-edit")
def edits() -> None:
    image = ["--image-width-mean", "64", "--image-height-mean", "64", "--image-batch-size", "1"]
    check(profile("image-edit", *image, "--image-format", "png"))


checks.main()
