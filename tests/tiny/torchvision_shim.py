"""Makes torchvision importable with a CPU build of torch, for which there is no torchvision build.

Its Python code needs only the names of two operators of its compiled code. Installed for tests only, in a folder that
other processes do not use: `pip install --no-deps --target FOLDER torchvision==0.28.*`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

_library = None  # an operator lives as long as the library that defined it


def make_importable(folder: Path | None = None) -> bool:
    """Return whether torchvision can be imported; call it before the first import of transformers."""
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
