"""Packages that a model's parts need and that are not installed.

diffusers and transformers can be imported without them: classes that need one are dummies, or fail when they load.
"""

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from shared.config.models_file import ModelSpec
from worker.engine.pipelines.load_failures import with_causes

_LIBRARIES = ("diffusers", "transformers")  # those of model_index.json whose classes are examined
_EXTRAS = {"torchvision": "'fusequeue[vision]'"}  # what to install for a package that is not installed by its name
# What transformers looks for before a package: it names only the last one.
_BEFORE = {"tiktoken": ("sentencepiece", "protobuf")}
# How the two libraries name a package.
_NAMED = re.compile(r"requires the ([\w.-]+) library|pip install ([\w.-]+)|Make sure to install (\w+)", re.IGNORECASE)


def unwanted_parts(spec: ModelSpec, index: Mapping[str, Any]) -> dict[str, None]:
    """Return the parts of `index`, a model_index.json, that are not loaded."""
    return {"safety_checker": None} if not spec.safety_checker and "safety_checker" in index else {}


def lacking_package(error: BaseException) -> str | None:
    """Return which package is not installed, and what to do, if that is why `error` was raised; else None."""
    for one in with_causes(error):
        found = _NAMED.search(str(one))
        named = next(filter(None, found.groups()), "").rstrip(".").lower() if found else ""
        package = (one.name or "").partition(".")[0] if isinstance(one, ModuleNotFoundError) else named
        if package and not _is_installed(package):
            package = next((before for before in _BEFORE.get(package, ()) if not _is_installed(before)), package)
            return f"it needs {package}, which is not installed; pip install {_EXTRAS.get(package, package)}"
    return None


def check_classes(index: Mapping[str, Any], unwanted: Mapping[str, None]) -> None:
    """Raise the library's `ImportError` if the class of the pipeline or of a part needs a package it does not have."""
    for _ in _classes(index, unwanted):
        pass


def missing_package(spec: ModelSpec, folder: Path) -> str | None:
    """Return the first package that the model in `folder` lacks, and what to do; None if it has all.

    Loads the parts without weights: tokenizers, processors and noise schedulers. What else is wrong with them is left
    to the load of the model.
    """
    try:
        index = json.loads((folder / "model_index.json").read_text("utf-8"))
        for name, part_class in _classes(index, unwanted_parts(spec, index)):
            part = folder / name
            if part.is_dir() and not next(part.glob("*.safetensors"), None):
                part_class.from_pretrained(part, local_files_only=True)
    except Exception as error:  # a library can raise anything for files that it does not expect
        return lacking_package(error)
    return None


def _classes(index: Mapping[str, Any], unwanted: Mapping[str, None]) -> Iterator[tuple[str, Any]]:
    """Yield the class of each part by the part's name; raises `ImportError` for a dummy, also for the pipeline's."""
    pipeline = index.get("_class_name")
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and name not in unwanted}
    for name, entry in {"": ["diffusers", pipeline], **entries}.items():
        if len(entry) != 2 or entry[0] not in _LIBRARIES or not isinstance(entry[1], str):
            continue
        found: Any = getattr(importlib.import_module(entry[0]), entry[1], None)
        if type(found).__name__ == "DummyObject":
            found()  # raises the error that names the package
        if found is not None and name:
            yield name, found


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None or bool(distribution(package))
    except (PackageNotFoundError, ValueError):  # ValueError: of a module that has been hidden
        return False
