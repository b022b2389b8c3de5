"""Packages that a model's parts need and that are not installed.

diffusers and transformers can be imported without them: classes that need one are dummies, or fail when they load.
"""

import ast
import importlib
import importlib.util
import linecache
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch

from shared.config.model_index import read_index
from shared.config.model_spec import ModelSpec
from shared.config.shape_folder import is_shape_folder
from worker.engine.weights.load_failures import with_causes
from worker.engine.weights.shape_classes import shape_classes

_LIBRARIES = ("diffusers", "transformers")  # those of model_index.json whose classes are examined
# What to install for a package that is not installed by its name.
_INSTALLED_BY = {
    "cv2": "opencv-python",
    "faiss": "faiss-cpu",
    "jinja": "jinja2",
    "opencv": "opencv-python",
    "pil": "pillow",
    "pyav": "av",
    "pytorch": "torch",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "torchvision": "'fusequeue-server[vision]'",
    "hy3dgen": "--no-deps hy3dgen (docs/models/sounds-and-meshes.md)",  # its requirements would bring gradio and others
}
_MODULES = {"opencv-python": "cv2"}  # of packages that others can stand in for: opencv-python-headless has the same
# What transformers looks for before a package: it names only the last one.
_BEFORE = {"tiktoken": ("sentencepiece", "protobuf")}
# How the two libraries name a package. Texts of an `ImportError` only: others advise on newer models, say.
_ADVICE = (
    re.compile(
        r"pip\s+install(?:\s+(?:-[Uq]|--(?:upgrade|user|pre|quiet)))*\s+['\"]?"
        r"(?!(?:an?|it|the|them|this|latest)\b)([a-z][\w.-]*)(?![\w.+:/@-])",  # not `git+https://` or another address
        re.IGNORECASE,
    ),
    re.compile(r"Make sure to install (?!(?:an?|it|the)\b)(\w+)", re.IGNORECASE),
)
_SENTENCES = (
    re.compile(r"requires the ([\w.-]+) library", re.IGNORECASE),
    re.compile(r"`(tiktoken)` is required to read"),
)


def unwanted_parts(spec: ModelSpec, index: Mapping[str, Any]) -> dict[str, None]:
    """Return the parts of `index`, a model_index.json, that are not loaded."""
    return {"safety_checker": None} if not spec.safety_checker and "safety_checker" in index else {}


def lacking_package(error: BaseException) -> str | None:
    """Return which package is not installed, and what to do, if that is why `error` was raised; else None."""
    for one in with_causes(error):
        for named in _named_by(one):  # with what is looked for before it, a file is damaged
            missing = (package for package in _BEFORE.get(named, (named,)) if not _is_installed(package))
            if package := next(missing, None):
                return f"it needs {package}, which is not installed; pip install {_INSTALLED_BY.get(package, package)}"
    return None


def _named_by(error: BaseException) -> list[str]:
    """Return the packages that an error names: first those to install, which a library can call by another name."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return [error.name.partition(".")[0]]
    if isinstance(error, NameError):
        return _guards_of(error)
    patterns = (*_ADVICE, *_SENTENCES) if isinstance(error, ImportError) else _SENTENCES
    text = str(error)
    return [name.rstrip(".-").lower() for pattern in patterns for name in pattern.findall(text)]


def _guards_of(error: NameError) -> list[str]:
    """Return the packages without which the module that raised does not import a name, by `is_<package>_available`."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    source = "" if frame is None else "".join(linecache.getlines(frame.tb_frame.f_code.co_filename))
    guards: list[str] = []
    for node in ast.walk(ast.parse(source if "_available()" in source else "")):
        if isinstance(node, ast.If):
            imports = (one for one in node.body if isinstance(one, ast.Import | ast.ImportFrom))
            if error.name in {alias.asname or alias.name for one in imports for alias in one.names}:
                guards += re.findall(r"is_(\w+)_available\(\)", ast.unparse(node.test))
    return guards


def check_classes(index: Mapping[str, Any], unwanted: Mapping[str, None]) -> None:
    """Raise the library's `ImportError` if the class of the pipeline or of a part needs a package it does not have."""
    for _ in _classes(index, unwanted):
        pass


def missing_package(spec: ModelSpec, folder: Path, *, load_parts: bool = True) -> str | None:
    """Return the first package that the model in `folder` lacks, and what to do; None if it has all.

    Imports the classes of all parts, and with `load_parts` also loads those without weights: tokenizers, processors and
    noise schedulers. What else is wrong with them is left to the load of the model.
    """
    try:
        if is_shape_folder(folder):
            shape_classes()
            return None
        index = read_index(folder)
        parts = dict(_classes(index, unwanted_parts(spec, index)))
    except Exception as error:  # a library can raise anything for files that it does not expect
        return lacking_package(error)
    found = (_lacking_of(part_class, folder / name) for name, part_class in parts.items() if load_parts)
    return next(filter(None, found), None)


def _lacking_of(part_class: Any, folder: Path) -> str | None:
    if not folder.is_dir() or (isinstance(part_class, type) and issubclass(part_class, torch.nn.Module)):
        return None
    try:
        part_class.from_pretrained(folder, local_files_only=True)
    except Exception as error:
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
    """Return whether a package is installed, by the name of its module or distribution, or another one of it."""
    name = _INSTALLED_BY.get(package, package)
    return any(map(_is_found, (package, _MODULES.get(name, name))))


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None or bool(distribution(name))
    except (ImportError, ValueError):  # ImportError: of its parent, too; ValueError: of a module that has been hidden
        return False
