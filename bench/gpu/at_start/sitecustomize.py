"""Lets unmodified workers load made models: Python imports this at its start when the folder is on its path.

When the engine's module for loading is imported, its loader is replaced by one that makes the models of folders with a
`made.json` and loads all others.
"""

import importlib.util
import sys
from typing import Any

LOADING = "worker.engine.pipelines.loading"


class _Finder:
    def find_spec(self, name, _path=None, _target=None):  # type: ignore[no-untyped-def]
        if name != LOADING:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            run(module)
            from bench.gpu.made_models import Loader

            module._LOADER = Loader(module._LOADER)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
