"""What the installed diffusers, the engine and the grids say about each pipeline class."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from diffusers import DiffusionPipeline, ModularPipeline, utils
from diffusers.pipelines.pag.pag_utils import PAGMixin
from parity.cells import Cell

from shared.architectures.registry import ARCHITECTURES, CONTROL_NETS, CONTROL_PIPELINES
from shared.signature import DENOISERS
from shared.tasks import Task
from worker.engine.pipelines.modular import task_fault
from worker.engine.pipelines.task_pipelines import call_parameters, supports

# What every worker has (`pip install '.[worker]'`).
INSTALLED = frozenset({"torch", "transformers", "sentencepiece"})
# Arguments that the engine gives to every call that takes them.
GIVEN = frozenset({"prompt", "image", "mask_image", "control_image"})
_CONTROLLED = frozenset(CONTROL_PIPELINES.values()).union(
    *(net.pipelines.values() for nets in CONTROL_NETS.values() for net in nets)
)
_ABSTRACT = ("DiffusionPipeline", "ModularPipeline")


@dataclass(frozen=True)
class Row:
    """A row of a grid: its page, and whether its jobs must share forwards."""

    page: str
    fused: bool


@dataclass(frozen=True)
class Facts:
    """What is known of one class.

    `packages` are those that it needs and workers lack; `denoisers` the classes of its denoisers, of which `ruled` have
    stacking rules. `inputs` are required arguments of its call that the engine never gives. `fault` is why the blocks
    of a modular one do no task.
    """

    name: str
    fault: str | None = None
    packages: tuple[str, ...] = ()
    deprecated: bool = False
    tasks: tuple[Task, ...] = ()
    inputs: tuple[str, ...] = ()
    takes_prompt: bool = True
    needs_image: bool = False
    control_net: bool = False
    chosen_for_controls: bool = False
    changes_denoiser: bool = False
    denoisers: tuple[str, ...] = ()
    ruled: tuple[str, ...] = ()
    row: Row | None = None


def all_facts(module: ModuleType, rows: Mapping[str, Row]) -> list[Facts]:
    """Return the facts of the pipeline classes that `module` exports, by name."""
    lacking = _lacking_packages()
    known = [Facts(name, packages=packages) for name, packages in lacking.items()]
    known += [facts_of(one, rows.get(name)) for name, one in exported_classes(module) if name not in lacking]
    return sorted(known, key=lambda facts: facts.name.lower())


def exported_classes(module: ModuleType) -> Iterator[tuple[str, type[Any]]]:
    """Yield the pipeline classes that a module exports under their names."""
    for name in dir(module):
        one = getattr(module, name) if name[0] != "_" else None
        if inspect.isclass(one) and issubclass(one, DiffusionPipeline | ModularPipeline) and name not in _ABSTRACT:
            yield name, one


def facts_of(pipeline_class: type[Any], row: Row | None) -> Facts:
    name = pipeline_class.__name__
    if issubclass(pipeline_class, ModularPipeline):
        return _modular_facts(pipeline_class, row)
    bare = object.__new__(pipeline_class)
    accepted = call_parameters(bare)
    parts = inspect.signature(pipeline_class.__init__).parameters
    denoisers = [one for part in DENOISERS if part in parts for one in _classes_in(parts[part].annotation)]
    return Facts(
        name,
        deprecated=".deprecated." in pipeline_class.__module__ or hasattr(pipeline_class, "_last_supported_version"),
        tasks=tuple(task for task in Task if supports(task, bare)),
        inputs=tuple(one for one in _required(accepted) if one not in GIVEN),
        takes_prompt="prompt" in accepted,
        needs_image="image" in _required(accepted),
        control_net="controlnet" in parts,
        chosen_for_controls=name in _CONTROLLED,
        changes_denoiser=issubclass(pipeline_class, PAGMixin),
        denoisers=tuple(denoisers),
        ruled=tuple(one for one in denoisers if one in ARCHITECTURES),
        row=row,
    )


def _modular_facts(pipeline_class: type[Any], row: Row | None) -> Facts:
    """Return what the default blocks of a modular class say; `fault` is why they do no task."""
    blocks = pipeline_class()._blocks
    faults = {task: task_fault(task, blocks) for task in Task}
    tasks = tuple(task for task, fault in faults.items() if fault is None)
    needs = [fault for fault in faults.values() if fault is not None and fault.startswith("it needs")]
    parts = {part.name: part.type_hint for part in blocks.expected_components}
    denoisers = tuple(kind.__name__ for name, kind in parts.items() if name in DENOISERS)
    return Facts(
        pipeline_class.__name__,
        fault=None if tasks else needs[-1] if needs else faults[Task.TEXT_TO_IMAGE],
        tasks=tasks,
        denoisers=denoisers,
        ruled=tuple(one for one in denoisers if one in ARCHITECTURES),
        row=row,
    )


def rows_of(cells: Iterable[Cell], page: str) -> dict[str, Row]:
    """Return the rows of a grid by the classes that they run; one says `Base, ...Suffix` for siblings of a class.

    Rows of text-to-image run the control pipeline of their class too.
    """
    rows: dict[str, Row] = {}
    for cell in cells:
        base, *others = (one.strip() for one in cell.pipelines.split(","))
        siblings = (one.replace("...", base.removesuffix("Pipeline")) for one in others)
        controlled = [CONTROL_PIPELINES[base]] if base in CONTROL_PIPELINES and Task.TEXT_TO_IMAGE in cell.tasks else []
        rows |= dict.fromkeys((base, *siblings, *controlled), Row(page, getattr(cell, "fused", True)))
    return rows


def _lacking_packages() -> dict[str, tuple[str, ...]]:
    """Return the classes that need packages which workers lack, also where these are installed."""
    lacking = {}
    for found in pkgutil.iter_modules(utils.__path__, "diffusers.utils."):
        if re.search(r"\.dummy_\w+_objects$", found.name):
            for name, one in inspect.getmembers(importlib.import_module(found.name), inspect.isclass):
                packages = tuple(package for package in getattr(one, "_backends", ()) if package not in INSTALLED)
                if packages and name.endswith("Pipeline"):
                    lacking[name] = packages
    return lacking


def _required(accepted: Mapping[str, inspect.Parameter]) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, one in accepted.items()
        if name != "self" and one.default is inspect.Parameter.empty and one.kind in named
    ]


def _classes_in(annotation: Any) -> list[str]:
    """Return the classes that an annotation names, which can be a string."""
    text = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    return [name for name in re.findall(r"\b[A-Z]\w+", text) if name not in ("None", "Union", "Optional")]
