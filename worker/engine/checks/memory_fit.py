"""Whether the models of the models file fit on this machine's device, and have the packages that they need.

`python -m worker.engine.checks.memory_fit` prints the verdicts on the device and on each model as JSON; `fusequeue
doctor` starts it.
"""

import contextlib
import json
import os
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError

from shared.config import models_file, settings
from shared.config.model_index import CLASSIC, MODULAR
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import FusequeueError
from worker.engine import device
from worker.engine.device import DeviceVerdict
from worker.engine.weights.requirements import lacking, model_bytes

GIB = 2**30
FOR_WEIGHTS = 0.7  # of the memory, as for the models that are loaded together
SMALLER = "a smaller dtype, quantization, layerwise_casting"


def verdict_of(spec: ModelSpec, nbytes: int, most_bytes: int) -> DeviceVerdict:
    """Return whether a model's weights, of `nbytes`, leave a part of `most_bytes` for its forwards."""
    seen = f"{nbytes / GIB:.2f} GiB of weights; {most_bytes / GIB:.2f} GiB of memory"
    if spec.offload == "group":
        return DeviceVerdict("ok", f'{seen}; offload = "group" holds a part of them')
    if nbytes > most_bytes:
        return DeviceVerdict("failed", seen, f'use {SMALLER} (docs/models/speed-and-memory.md) or offload = "group"')
    if nbytes > FOR_WEIGHTS * most_bytes:
        return DeviceVerdict(
            "warning", f"{seen}, little of it for forwards", f"use {SMALLER} (docs/models/speed-and-memory.md)"
        )
    return DeviceVerdict("ok", seen)


def check_model(spec: ModelSpec, device_type: str, most_bytes: int) -> DeviceVerdict:
    """Return whether the model is installed, and fits as far as its files are on this machine."""
    fault = None if spec.quantization is None else lacking(spec.quantization, device_type)
    if fault is not None:
        seen, _, remedy = fault.partition("; ")
        return DeviceVerdict("failed", seen, remedy)
    folder = _folder(spec)
    if folder is None:
        return DeviceVerdict("ok", "it is not on this machine, so its size is not known")
    try:
        return verdict_of(spec, model_bytes(spec, folder), most_bytes)
    except OSError as error:
        return DeviceVerdict("failed", f"{error.filename}: {error.strerror}", "correct the path in the models file")


def check_packages(spec: ModelSpec, folder: Path) -> DeviceVerdict:
    """Return whether the packages that the classes of a model need are installed."""
    from worker.engine.weights.missing_packages import missing_package  # and with it diffusers

    fault = missing_package(spec, folder)
    if fault is None:
        return DeviceVerdict("ok", "all are installed")
    seen, _, remedy = fault.partition("; ")
    return DeviceVerdict("failed", seen, remedy)


def check_devices(spec: ModelSpec, first: torch.device) -> DeviceVerdict | None:
    """Return the failure of a model over more devices than there are from `first` on, None if there are enough."""
    try:
        device.device_of_rank(0, spec.devices, first)
    except ValueError as error:
        seen, _, remedy = str(error).partition("; ")
        return DeviceVerdict("failed", seen, remedy)
    return None


def _folder(spec: ModelSpec) -> Path | None:
    if spec.is_folder:
        return Path(spec.source) if Path(spec.source).is_dir() else None
    try:
        found = [
            huggingface_hub.try_to_load_from_cache(spec.source, name, revision=spec.revision)
            for name in (CLASSIC, MODULAR)
        ]
    except HFValidationError:  # neither a folder nor an id of the hub, as the check of the models says
        return None
    return next((Path(index).parent for index in found if isinstance(index, str)), None)


def _main(config: Settings) -> None:
    verdict = device.check(config.device)
    print(json.dumps({"name": "device", **verdict._asdict()}), flush=True)
    if verdict.verdict == "failed":
        return
    facts = device.device_facts(config.device)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most_bytes = config.gpu_memory_bytes or facts.total_bytes or physical
    models = models_file.load(config.models, config.batch_rules)
    for spec in models:
        too_few = check_devices(spec, device.choose_device(config.device))
        found = too_few or check_model(spec, facts.kind, most_bytes)
        print(json.dumps({"name": f"memory for {spec.id}", **found._asdict()}), flush=True)
    for spec, folder in ((spec, _folder(spec)) for spec in models):
        if folder is not None:  # else it is not on this machine, and what it needs is not known
            print(json.dumps({"name": f"packages for {spec.id}", **check_packages(spec, folder)._asdict()}), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(FusequeueError):  # wrong settings or files, which `fusequeue doctor` itself reports
        _main(settings.load())
