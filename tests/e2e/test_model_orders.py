"""Models on real workers: loaded before the first job, unloaded, and pinned through restarts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("one", "two", "three")
MODELS_FILE = """
[[model]]
id = "{model}"
source = "{source}"

[model.defaults]
width = 64
height = 64
steps = 4
"""


@pytest.fixture
def stack(make_stack: Callable[..., Any], tmp_path: Path) -> Any:
    """A service whose worker has memory for two of three models of one size."""
    source = ROOT / "demo/model"
    models = tmp_path / "models.toml"
    models.write_text("".join(MODELS_FILE.format(model=model, source=source) for model in MODELS))
    nbytes = sum(path.stat().st_size for path in source.rglob("*.safetensors"))
    memory = {"gpu_memory_bytes": str(int(2.4 * nbytes)), "cpu_memory_bytes": str(2 * nbytes)}
    return make_stack(models=str(models), worker_pool="big", **memory).start()


def command(stack: Any, *arguments: str, status: int = 0) -> dict[str, Any]:
    """Run `fusequeue models` and return its output; an error is {}."""
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "models", *arguments, "--json", "--url", stack.url],
        cwd=ROOT,
        env=stack.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout) if status == 0 else {}
    return found


def worker(stack: Any) -> dict[str, Any]:
    """Return the one worker that is ready."""
    (found,) = [one for one in stack.workers() if one["state"] == "ready"]
    return dict(found)


def run(stack: Any, *models: str) -> None:
    for model in models:
        job = stack.submit(model=model, prompt="a red circle")
        assert stack.finish(job)["status"] == "succeeded"


def order(stack: Any, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    response = stack.client.post(f"/v1/models/{path}", json=body or {})
    return response.status_code, response.json()


def test_models_are_loaded_unloaded_and_pinned_on_a_worker_pool(stack: Any) -> None:
    """A pin holds under pressure and through restarts."""
    check_loads(stack)
    check_pins(stack)


def check_loads(stack: Any) -> None:
    assert worker(stack)["loaded"] == ["one", "two"]
    loaded = command(stack, "load", "three", "--pool", "big", "--wait")
    assert [one["followed"] for one in loaded["workers"]] == [True]
    assert (worker(stack)["loaded"], worker(stack)["kept"]) == (["two", "three"], ["one"])
    assert stack.read("/v1/models/three")["workers"]["loaded"] == 1
    run(stack, "three")
    command(stack, "unload", "three", "--wait")
    assert "three" not in worker(stack)["loaded"] + worker(stack)["kept"]
    run(stack, "three")
    assert order(stack, "three:load", {"worker_pool": "small"})[1]["workers"] == []
    command(stack, "load", "none", status=4)
    actions = [(one["action"], one["target"]) for one in stack.read("/v1/actions")["data"]]
    assert actions == [("load", "model three"), ("unload", "model three"), ("load", "model three")]


def check_pins(stack: Any) -> None:
    assert order(stack, "three:pin")[0] == 202
    command(stack, "load", "three", "--wait")
    assert order(stack, "three:unload")[0] == 409
    run(stack, "one", "two")
    wait_until(lambda: set(worker(stack)["loaded"]) == {"three", "two"}, "the others take turns")
    assert worker(stack)["pinned"] == ["three"]
    killed = worker(stack)["id"]
    for process in stack.processes:
        if process.name.startswith(("worker", "api")):
            process.kill()
    stack.api.start()
    wait_until(stack.ready, "the API is ready again")
    stack.worker()
    wait_until(lambda: any(one["state"] == "ready" and one["id"] != killed for one in stack.workers()), "it is ready")
    (started,) = [one for one in stack.workers() if one["id"] != killed]
    assert started["loaded"][0] == "three"
    run(stack, "one", "two")
    wait_until(lambda: "two" in {one["id"]: one for one in stack.workers()}[started["id"]]["loaded"], "it has both")
    assert order(stack, "two:pin", {"worker": started["id"]})[0] == 202
    refused, reply = order(stack, "one:pin", {"worker": started["id"]})
    assert (refused, "do not fit" in reply["error"]["message"]) == (409, True)
    command(stack, "unpin", "three")
    pins = [one["model"] for one in stack.read("/v1/model-orders")["data"] if one["action"] == "pin"]
    assert pins == ["two"]
