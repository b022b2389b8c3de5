"""What the peers' programs share: their settings, and one call of the pipeline for the requests of equal steps."""

from __future__ import annotations

import base64
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image

HOST = "127.0.0.1"
ROUTE = "/v1/images/generations"
TIMEOUT_S = 120
ROWS = 8
_PREFIX = "FUSEQUEUE_PEER_"

ImageRequest = Mapping[str, Any]


@dataclass(frozen=True)
class PeerSettings:
    """Folder of the model, port, most requests taken at once, and milliseconds to wait for them."""

    model: str
    port: int
    requests: int
    wait_ms: int

    @classmethod
    def from_environment(cls) -> PeerSettings:
        values = {name: os.environ[_PREFIX + name.upper()] for name in ("model", "port", "requests", "wait_ms")}
        model = values.pop("model")
        return cls(model, **{name: int(value) for name, value in values.items()})


def groups(steps: Sequence[int]) -> Iterator[list[int]]:
    """Yield the positions of requests of equal steps, at most `ROWS` at a time."""
    positions: defaultdict[int, list[int]] = defaultdict(list)
    for at, count in enumerate(steps):
        positions[count].append(at)
    for same in positions.values():
        for first in range(0, len(same), ROWS):
            yield same[first : first + ROWS]


class BatchCall:
    """The pipeline on one torch thread; its call takes one number of steps for all rows."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self._pipeline: Any = DiffusionPipeline.from_pretrained(model, local_files_only=True)
        self._pipeline.set_progress_bar_config(disable=True)

    def __call__(self, requests: Sequence[ImageRequest]) -> list[dict[str, Any]]:
        """Return the responses to the requests, each with one PNG image."""
        images = [""] * len(requests)
        for group in groups([int(request["steps"]) for request in requests]):
            for at, image in zip(group, self._generate([requests[at] for at in group]), strict=True):
                images[at] = image
        return [{"data": [{"b64_json": image}]} for image in images]

    @torch.no_grad()
    def _generate(self, requests: Sequence[ImageRequest]) -> list[str]:
        width, height = map(int, str(requests[0]["size"]).split("x"))
        images = self._pipeline(
            [str(request["prompt"]) for request in requests],
            num_inference_steps=int(requests[0]["steps"]),
            guidance_scale=float(requests[0]["guidance_scale"]),
            width=width,
            height=height,
            generator=[torch.Generator().manual_seed(int(request["seed"])) for request in requests],
            output_type="pt",
        ).images
        return [_png(pixels) for pixels in (images.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()]


def _png(pixels: Any) -> str:
    """Return an image as fusequeue encodes it (worker/output/image_encoding.py), as base64."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return base64.b64encode(file.getvalue()).decode()
