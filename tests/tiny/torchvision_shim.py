"""Makes torchvision importable beside a CPU build of torch, for which it has no build of its own.

Its Python side needs nothing of its compiled side but the names of two operators. Installed for tests only, and not
where other processes would find it: `pip install --no-deps --target FOLDER torchvision==0.28.*`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

_library = None  # an operator lives as long as the library that defined it


def make_importable(folder: Path | None = None) -> bool:
    """Return whether torchvision can be imported; to be asked before transformers is imported first."""
    global _library
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    if importlib.util.find_spec("torchvision") is None:
        return False
    if _library is None and "torchvision" not in sys.modules:
        _library = torch.library.Library("torchvision", "DEF")
        _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True
