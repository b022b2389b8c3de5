"""What the processes import at their start: large packages that they do not use stay out."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.config.controls import ControlSpec
from shared.config.model_spec import ModelSpec
from shared.runtime.imports import importing
from worker.engine.weights.packages import NEVER_USED, QUANTIZATION, unused_packages

ROOT = Path(__file__).resolve().parents[4]
OPTIONAL = {"boto3", "opentelemetry.sdk", "rich", "torch"}


def modules_of(code: str) -> set[str]:
    """Return the modules that a new interpreter has after `code`."""
    code += "\nimport sys; print(*(name for name, module in sys.modules.items() if module is not None))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import cli.processes", OPTIONAL | {"fusequeue", "redis", "numpy"}),
        ("import api.__main__", OPTIONAL | {"numpy", "PIL"}),
        ("import api.chores.__main__", OPTIONAL | {"numpy", "PIL"}),
        (
            "import worker.__main__ as main\nwith main.importing(): import worker.worker",
            OPTIONAL | {"av", "fastapi", "uvicorn"},
        ),
    ],
)
def test_a_process_does_not_import_what_it_does_not_use(code: str, absent: set[str]) -> None:
    assert not absent & modules_of(code)


@pytest.mark.slow
def test_an_engine_without_quantized_models_imports_no_package_of_quantization() -> None:
    hide = f"from shared.runtime.imports import hide; hide{(*NEVER_USED, *QUANTIZATION)}"
    absent = {"boto3", "bitsandbytes", "gguf", "torchao", "diffusers.pipelines.auto_pipeline"}
    assert not absent & modules_of(f"{hide}; import worker.engine.process")


def test_packages_are_hidden_and_collections_wait_during_imports_only() -> None:
    with importing(without=("xmlrpc.server",)):
        assert not gc.isenabled()
        assert importlib.util.find_spec("xmlrpc.server") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("xmlrpc.server")
    assert gc.isenabled()
    assert importlib.import_module("xmlrpc.server")


def test_an_imported_package_is_not_hidden() -> None:
    with importing(without=("subprocess",)):
        assert importlib.import_module("subprocess") is subprocess
    assert sys.modules["subprocess"] is subprocess


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text("{}")
    return tmp_path


def spec_of(source: str, **more: Any) -> ModelSpec:
    return ModelSpec.model_validate({"id": "a", "source": source, **more})


def test_models_in_folders_of_plain_weights_need_none(folder: Path) -> None:
    assert unused_packages([spec_of(str(folder))]) == (*NEVER_USED, *QUANTIZATION)


def test_a_model_with_a_table_needs_them(folder: Path) -> None:
    quantized = spec_of(str(folder), quantization={"denoiser": "torchao-int8"})
    assert unused_packages([spec_of(str(folder)), quantized]) == NEVER_USED


@pytest.mark.parametrize("config", [json.dumps({"quantization_config": {"quant_method": "torchao"}}), "{"])
def test_weights_that_are_quantized_in_their_folder_need_them(folder: Path, config: str) -> None:
    (folder / "unet" / "config.json").write_text(config)
    assert unused_packages([spec_of(str(folder))]) == NEVER_USED


def test_weights_of_the_hub_may_need_them(folder: Path) -> None:
    assert unused_packages([spec_of("stabilityai/sdxl-turbo")]) == NEVER_USED
    control = ControlSpec(id="c", source="hub/control")
    assert unused_packages([spec_of(str(folder)).model_copy(update={"control": (control,)})]) == NEVER_USED


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode,
    reason="no process can be the first one of a namespace here",
)
def test_sigterm_ends_the_first_process_of_a_container_while_it_imports() -> None:
    """The kernel drops it where no handler is set."""
    code = "from shared.runtime.imports import importing\nwith importing(): print('importing', flush=True); input()"
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "importing\n"
        (first,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text("ascii").split()
        os.kill(int(first), signal.SIGTERM)
        try:
            assert run.wait(20) == 128 + signal.SIGTERM
        finally:
            run.kill()
