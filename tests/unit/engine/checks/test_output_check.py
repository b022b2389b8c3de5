"""The output type of a pipeline: the fastest that equals its PIL images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from harness.engine import a_spec
from PIL import Image

from shared.tasks import Task
from worker.engine.checks.output_check import choose_output_types
from worker.engine.fusion.module_proxy import ModuleProxy, shared_methods_of
from worker.engine.fusion.private_changes import ModuleWatch
from worker.engine.lora.per_row import ModelAdapters
from worker.engine.pipelines.chosen_schedulers import ChosenSchedulers
from worker.engine.pipelines.loaded_model import LoadedModel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Image tasks disable gradients for their thread, which is also the thread of other tests."""
    with torch.no_grad():
        yield
    torch.set_grad_enabled(True)


class Decoder(torch.nn.Module):
    """Counts its calls. Its output depends on their number, so that a second run equals the first only as a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (latents + 0.1 * self.calls).clamp(-1, 1)


class Checker(torch.nn.Module):
    """Finds nothing."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(image))


class Pipeline:
    """Decodes its noise, to values of -1 to 1, and returns what `convert` makes of them."""

    def __init__(self, convert: Callable[[Any, torch.Tensor, str], Any]) -> None:
        self.scheduler = DDIMScheduler()
        self.convert = convert

    def __call__(self, prompt: str, generator: Any, width: int, height: int, output_type: str = "pil") -> Any:
        image = self.vae.decode(torch.randn(1, 3, height, width, generator=generator))
        return self.convert(self, image, output_type)


def images(image: torch.Tensor, output_type: str, **more: Any) -> Any:
    """Return an image of 0 to 1 in the form of each output type, like most pipelines."""
    array = image.permute(0, 2, 3, 1).numpy()
    pil = [Image.fromarray((one * 255).round().astype(np.uint8)) for one in array]
    return SimpleNamespace(images={"pt": image, "np": array, "pil": pil}[output_type], **more)


def usual(_pipeline: Any, image: torch.Tensor, output_type: str) -> Any:
    return images(image / 2 + 0.5, output_type)


def raw_tensors(_pipeline: Any, image: torch.Tensor, output_type: str) -> Any:
    return images(image if output_type == "pt" else image / 2 + 0.5, output_type)


def no_tensors(_pipeline: Any, image: torch.Tensor, output_type: str) -> Any:
    if output_type == "pt":
        raise ValueError("output_type must be np or pil")
    return images(image / 2 + 0.5, output_type)


def marked_pil(_pipeline: Any, image: torch.Tensor, output_type: str) -> Any:
    image = image / 2 + 0.5
    if output_type == "pil":
        image[..., :4, :4] = 1 - image[..., :4, :4]
    return images(image, output_type)


def smaller_tensors(_pipeline: Any, image: torch.Tensor, output_type: str) -> Any:
    return images((image if output_type == "pil" else image[..., ::2, ::2]) / 2 + 0.5, output_type)


def checked_without_tensors(pipeline: Any, image: torch.Tensor, output_type: str) -> Any:
    if output_type != "pt":
        pipeline.safety_checker(image)
    return images(image / 2 + 0.5, output_type)


def flagged_without_tensors(_pipeline: Any, image: torch.Tensor, output_type: str) -> Any:
    return images(image / 2 + 0.5, output_type, nsfw_content_detected=[output_type != "pt"])


def black(_pipeline: Any, image: torch.Tensor, output_type: str) -> Any:
    return images(torch.zeros_like(image), output_type)


def broken(_pipeline: Any, _image: torch.Tensor, _output_type: str) -> Any:
    raise RuntimeError("no image")


def changed_in_place(_pipeline: Any, image: torch.Tensor, output_type: str) -> Any:
    return images(image.div_(2).add_(0.5), output_type)


def a_model(convert: Callable[[Any, torch.Tensor, str], Any]) -> tuple[LoadedModel, Decoder]:
    pipeline: Any = Pipeline(convert)
    decoder, checker = Decoder(), Checker()
    for name, module in (("vae", decoder), ("safety_checker", checker)):
        setattr(pipeline, name, ModuleProxy(module, shared_methods_of(name, module), CPU, torch.float32))
    spec: Any = a_spec("/nowhere", tasks=(Task.TEXT_TO_IMAGE,))  # type: ignore[arg-type]
    templates = {Task.TEXT_TO_IMAGE: pipeline}
    return LoadedModel(
        spec, CPU, templates, [], ChosenSchedulers(spec.id), 0, ModelAdapters({}), ModuleWatch({})
    ), decoder


@pytest.mark.parametrize(
    ("convert", "expected"),
    [
        (usual, "pt"),
        (changed_in_place, "pt"),
        (raw_tensors, "np"),
        (no_tensors, "np"),
        (checked_without_tensors, "np"),
        (flagged_without_tensors, "np"),
        (black, "np"),
        (marked_pil, "pil"),
        (smaller_tensors, "pil"),
        (broken, "pil"),
    ],
)
def test_the_fastest_output_type_that_equals_the_pil_images_is_chosen(
    convert: Callable[[Any, torch.Tensor, str], Any], expected: str
) -> None:
    model, _ = a_model(convert)
    choose_output_types(model, CPU)
    assert model.output_types == {Task.TEXT_TO_IMAGE: expected}


def test_forwards_run_once_for_all_output_types() -> None:
    """The others get the recorded outputs."""
    model, decoder = a_model(marked_pil)
    choose_output_types(model, CPU)
    assert decoder.calls == 1
