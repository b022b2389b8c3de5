"""hy3dgen's own classes for shapes: imported without what only other uses of the package need.

Its package of shapes imports pymeshlab (GPL, 100 MB) for postprocessing, and its image encoders import torchvision for
three operations on tensors; neither is needed here, and a torchvision that was built for another torch fails at import.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_SHAPES = "hy3dgen.shapegen"
_ONE_IMPORT = threading.Lock()
# Of hy3dgen's `models`, `schedulers` and `preprocessors`: a folder's configuration can name these and no others.
_ALLOWED = (
    ("models", ("Hunyuan3DDiT", "ShapeVAE", "SingleImageEncoder", "DualImageEncoder")),
    ("schedulers", ("FlowMatchEulerDiscreteScheduler", "ConsistencyFlowMatchEulerDiscreteScheduler")),
    ("preprocessors", ("ImageProcessorV2", "MVImageProcessorV2")),
)


@cache
def shape_classes() -> SimpleNamespace:
    """Return hy3dgen's pipeline as `pipeline`, its surface extractor as `surface`, cv2's error as `image_error`, and
    as `allowed` the classes that configurations can name; raises `ImportError` if a package is missing."""
    import transformers  # only here: `fusequeue doctor` imports this module for every model

    # While torchvision is replaced, transformers must not look for it.
    for name in ("CLIPVisionConfig", "CLIPVisionModelWithProjection", "Dinov2Config", "Dinov2Model"):
        getattr(transformers, name)
    with _ONE_IMPORT, _bare_package(), _tensor_transforms():
        modules = {name: importlib.import_module(f"{_SHAPES}.{name}") for name, _ in _ALLOWED}
        pipelines: Any = importlib.import_module(f"{_SHAPES}.pipelines")
    allowed = {
        f"{_SHAPES}.{module}.{name}": getattr(modules[module], name) for module, names in _ALLOWED for name in names
    }
    return SimpleNamespace(
        pipeline=pipelines.Hunyuan3DDiTFlowMatchingPipeline,
        surface=pipelines.SurfaceExtractors["mc"],
        image_error=modules["preprocessors"].cv2.error,
        allowed=allowed,
    )


@contextmanager
def _bare_package() -> Iterator[None]:
    """Let the modules of hy3dgen's package of shapes be imported without the package's own imports."""
    found = importlib.util.find_spec("hy3dgen")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'hy3dgen'", name="hy3dgen")
    if _SHAPES not in sys.modules:
        package = ModuleType(_SHAPES)
        package.__path__ = [str(Path(found.submodule_search_locations[0]) / "shapegen")]
        package.__spec__ = ModuleSpec(_SHAPES, None, is_package=True)
        sys.modules[_SHAPES] = package
    yield


@contextmanager
def _tensor_transforms() -> Iterator[None]:
    """Have `from torchvision import transforms` give the operations that the image encoders use.

    Their results were those of torchvision 0.28 to the last bit, in float32, float16 and bfloat16.
    """
    earlier = sys.modules.get("torchvision")
    stand_in: Any = ModuleType("torchvision")
    stand_in.transforms = SimpleNamespace(
        Compose=_compose,
        Resize=_resize,
        CenterCrop=_center_crop,
        Normalize=_normalize,
        InterpolationMode=SimpleNamespace(BILINEAR="bilinear"),
    )
    sys.modules["torchvision"] = stand_in
    try:
        yield
    finally:
        if earlier is None:
            del sys.modules["torchvision"]
        else:
            sys.modules["torchvision"] = earlier


Transform = Callable[[torch.Tensor], torch.Tensor]


def _compose(transforms: list[Transform]) -> Transform:
    def run(images: torch.Tensor) -> torch.Tensor:
        for transform in transforms:
            images = transform(images)
        return images

    return run


def _resize(size: int, interpolation: str, antialias: bool) -> Transform:
    """Return what brings images [..., height, width] to a shorter side of `size`, in float32 as torchvision does."""

    def run(images: torch.Tensor) -> torch.Tensor:
        short = min(images.shape[-2:])
        sides = [int(size * side / short) for side in images.shape[-2:]]
        if list(images.shape[-2:]) == sides:
            return images
        scaled = torch.nn.functional.interpolate(
            images.float(), size=sides, mode=interpolation, align_corners=False, antialias=antialias
        )
        return scaled.to(images.dtype)

    return run


def _center_crop(size: int) -> Transform:
    def run(images: torch.Tensor) -> torch.Tensor:
        top, left = (round((side - size) / 2) for side in images.shape[-2:])
        return images[..., top : top + size, left : left + size]

    return run


def _normalize(mean: list[float], std: list[float]) -> Transform:
    def run(images: torch.Tensor) -> torch.Tensor:
        means, deviations = (torch.as_tensor(values).to(images).view(-1, 1, 1) for values in (mean, std))
        return images.sub(means).div_(deviations)

    return run
