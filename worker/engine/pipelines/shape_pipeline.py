"""A pipeline from images to a mesh: hy3dgen's own call, with the parts that jobs share as its components.

The volume is decoded chunk by chunk through a component of its own, so that chunks of several jobs share forwards.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from shared.errors import InferenceFailed, NonFiniteLatents, NoSurface
from shared.model_inputs import ModelInput
from shared.tasks import Task
from worker.engine.channel import shared_array
from worker.engine.outputs import Mesh
from worker.engine.weights.shape_classes import shape_classes

VIEWS = ("front", "left", "back", "right")
"""Of several images, in this order."""

MAX_VERTICES = 5_000_000
"""Of a mesh; one of 1.2 million is usual at a resolution of 512, and that of noise could have 500 million."""

BOUND = 1.01
"""Half the side of the cube in which the surface is looked for, as in hy3dgen."""

_RESOLUTION, _CHUNK, _LEVEL = (16, 384, 512), (1_000, 8_000, 100_000), (-10.0, 0.0, 10.0)


def _bounded(kind: str, bounds: tuple[float, float, float]) -> tuple[dict[str, Any], float]:
    return {"type": kind, "minimum": bounds[0], "maximum": bounds[2]}, bounds[1]


_DESCRIBED: Mapping[str, tuple[str, tuple[dict[str, Any], float]]] = {
    "octree_resolution": (
        "Cells along each side of the volume in which the surface is looked for.",
        _bounded("integer", _RESOLUTION),
    ),
    "mc_level": ("Value of the volume at the surface.", _bounded("number", _LEVEL)),
    "num_chunks": ("Points of the volume that one forward decodes.", _bounded("integer", _CHUNK)),
}


class ShapePipeline:
    """hy3dgen's pipeline of flow matching, in the form of diffusers': its parts are `components`."""

    _parts = ("transformer", "conditioner", "shape_vae", "geo_decoder", "scheduler", "image_processor")

    def __init__(self, parts: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Take the `parts` that hy3dgen's configuration names."""
        vae = parts["vae"]
        self.transformer = parts["model"]
        self.conditioner = parts["conditioner"]
        self.geo_decoder = vae.geo_decoder
        del vae.geo_decoder  # its weights would count twice
        self.shape_vae = vae
        self.scheduler = parts["scheduler"]
        self.image_processor = parts["image_processor"]
        self.dtype = dtype
        self.config: Mapping[str, Any] = {}

    @property
    def components(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._parts}

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.transformer.parameters()).device
        return device

    def to(self, device: torch.device) -> None:
        for part in self.components.values():
            if isinstance(part, torch.nn.Module):
                part.to(device)

    def progress_bar(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(update=lambda: None)

    @torch.no_grad()
    def __call__(  # noqa: PLR0913  # the inputs of jobs, by hy3dgen's names
        self,
        image: Image.Image | list[Image.Image],
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        generator: torch.Generator | None = None,
        octree_resolution: int = _RESOLUTION[1],
        mc_level: float = _LEVEL[1],
        num_chunks: int = _CHUNK[1],
    ) -> Mesh:
        """Return the mesh of an object in images; raises `ValueError` for images that it cannot use, and `NoSurface`
        if nothing is found in the volume."""
        processed = self._process(image)
        steps = self.progress_bar(total=num_inference_steps)
        vertices, faces = inspect.unwrap(shape_classes().pipeline.__call__)(
            self._inner(lambda _: processed),
            image=[None],  # processed above
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            generator=generator,
            box_v=BOUND,
            octree_resolution=octree_resolution,
            mc_level=mc_level,
            num_chunks=num_chunks,
            output_type="mesh",
            enable_pbar=False,
            callback=lambda *_: steps.update(),
            callback_steps=1,
        )
        return mesh_of(vertices, faces)

    def _inner(self, image_processor: Callable[[Any], Any]) -> Any:
        """Return hy3dgen's pipeline of the parts of this one, without its constructor, which would move them."""
        inner = shape_classes().pipeline.__new__(shape_classes().pipeline)
        vars(inner).update(
            vae=_Volume(self.shape_vae, self.geo_decoder),
            model=self.transformer,
            conditioner=self.conditioner,
            scheduler=self.scheduler,
            image_processor=image_processor,
            device=self.device,
            dtype=self.dtype,
            kwargs={},
        )
        return inner

    def _process(self, image: Image.Image | list[Image.Image]) -> Any:
        """Return the pixels of an image, or of the views that several images are."""
        images = image if isinstance(image, list) else [image]
        most = len(VIEWS) if getattr(self.image_processor, "return_view_idx", False) else 1
        if len(images) > most:
            raise ValueError(f"it takes {most} of them, not {len(images)}")
        try:
            return self.image_processor(images[0] if most == 1 else dict(zip(VIEWS, images, strict=False)))
        except shape_classes().image_error:
            raise ValueError("what it shows is too narrow") from None


class _Volume:
    """The VAE as hy3dgen's pipeline uses it: latents, then the values at the points of a volume, then its surface."""

    def __init__(self, vae: Any, geo_decoder: Callable[..., torch.Tensor]) -> None:
        self._vae, self._geo_decoder = vae, geo_decoder
        self.scale_factor, self.latent_shape = vae.scale_factor, vae.latent_shape

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self._vae(latents)
        return values

    def latents2mesh(
        self, latents: torch.Tensor, bounds: float, mc_level: float, num_chunks: int, octree_resolution: int, **_: Any
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        grid = decode_volume(latents, self._geo_decoder, bounds, num_chunks, octree_resolution)
        check_surface(grid, mc_level)
        surface = shape_classes().surface()
        vertices, faces = surface.run(grid, mc_level=mc_level, bounds=bounds, octree_resolution=octree_resolution)
        return vertices, faces


def decode_volume(
    latents: torch.Tensor, geo_decoder: Callable[..., torch.Tensor], bound: float, chunk: int, resolution: int
) -> torch.Tensor:
    """Return the values at all points of a cube, [points, points, points] in float32 on the host.

    The same as those of hy3dgen's decoder, which holds the coordinates of all points: 5 GB instead of 0.5 at 512.
    """
    side = resolution + 1
    along = torch.from_numpy(np.linspace(-bound, bound, side, dtype=np.float32)).to(latents)
    grid = torch.empty(side**3, dtype=torch.float32)
    for start in range(0, side**3, chunk):
        at = torch.arange(start, min(start + chunk, side**3), device=latents.device)
        points = torch.stack([along[at // side**2], along[at // side % side], along[at % side]], dim=-1)
        values = geo_decoder(queries=points[None], latents=latents)
        grid[start : start + len(at)] = values[0, :, 0].float().cpu()
    return grid.view(side, side, side)


def check_surface(grid: torch.Tensor, level: float) -> None:
    """Raise an error for values without a surface at `level`, with one that is too large, or that are not finite."""
    values = grid.numpy()
    low, high = float(values.min()), float(values.max())  # of values with a NaN, it is NaN
    if not math.isfinite(low) or not math.isfinite(high):
        raise NonFiniteLatents("the decoder of the volume returned values that are not finite")
    inside = values > level
    # A vertex is where the surface crosses an edge of the grid. Counted in numpy: torch's sum of booleans is slow.
    vertices = int(np.count_nonzero(inside[1:] != inside[:-1]))
    vertices += int(np.count_nonzero(inside[:, 1:] != inside[:, :-1]))
    vertices += int(np.count_nonzero(inside[:, :, 1:] != inside[:, :, :-1]))
    if not vertices:
        raise NoSurface(
            f"no surface: all values of the volume are {low:.3g} to {high:.3g}, and none crosses mc_level {level:g}; "
            "try another image, seed or mc_level"
        )
    if vertices > MAX_VERTICES:
        raise InferenceFailed(
            f"the mesh would have {vertices} vertices, more than {MAX_VERTICES}; lower octree_resolution",
            param="extra.octree_resolution",
        )


def mesh_of(vertices: np.ndarray[Any, Any], faces: np.ndarray[Any, Any]) -> Mesh:
    """Return a mesh with the faces turned outwards, as in hy3dgen, in memory that processes share."""
    made = Mesh(shared_array(vertices.shape, np.float32), shared_array(faces.shape, np.uint32))
    made.vertices[:] = vertices
    made.faces[:] = faces[:, ::-1]
    return made


def describe_shape_inputs() -> Sequence[ModelInput]:
    """Return the inputs of the call that jobs have no field for."""
    return [
        ModelInput(name=name, description=text, schema=schema, default=default, tasks=(Task.IMAGE_TO_MESH,))
        for name, (text, (schema, default)) in _DESCRIBED.items()
    ]
