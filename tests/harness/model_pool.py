"""Models that the engines of tests have loaded and checked, for the engines of later tests.

A tiny model takes 0.9 s of CPU time to load and check, and an image of four steps 0.07 s. An engine gets a model of the
pool as one that is kept in CPU memory, which it neither loads nor checks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shared.config.model_spec import ModelSpec
from worker.engine.engine import Engine
from worker.engine.models.cpu_memory import KeptModel
from worker.engine.pipelines.loaded_model import LoadedModel

MAX_MODELS = 12

_models: OrderedDict[str, LoadedModel] = OrderedDict()
_active = False


@contextmanager
def shared_models() -> Iterator[None]:
    """Let the engines that start meanwhile take their models from the pool, and return them to it."""
    global _active
    before, _active = _active, True
    try:
        yield
    finally:
        _active = before


@contextmanager
def lent_to(engine: Engine, specs: Sequence[ModelSpec]) -> Iterator[None]:
    """Lend `engine` the models of `specs`; take them when it has stopped, also those that it has loaded itself."""
    if not _active or not specs:
        yield
        return
    for spec in specs:
        model = _models.pop(_key(spec), None)
        if model is not None:
            model.spec = spec
            engine._models.kept._models[spec.id] = KeptModel(model, copies=False)
    yield
    if engine.join(0) and not engine._failed:
        for model in (one for one in engine._models.loaded.values() if one.spec in specs):
            engine._models.adapters.trim(model, set(), keep_unused=False)
            _take_back(model)


def _take_back(model: LoadedModel) -> None:
    if not _is_as_checked(model):
        return
    model.release_tensors()
    model.text_cache.clear()
    _models[_key(model.spec)] = model
    if len(_models) > MAX_MODELS:
        _models.popitem(last=False)


def _is_as_checked(model: LoadedModel) -> bool:
    """Return whether the model has passed its check, and no part of an adapter is on it."""
    passed = model.verified and all(one.stacker is not None or one._rules is None for one in model.shared_methods)
    adapted = any(one._layers for one in model.adapters.modules.values())
    return bool(passed) and model.ranks is None and not adapted


def _key(spec: ModelSpec) -> str:
    """Return what a load depends on."""
    limits = spec.limits.model_copy(update={"max_images": 1})
    return spec.model_copy(update={"id": "", "max_batch": 1, "adapter": (), "limits": limits}).model_dump_json()
