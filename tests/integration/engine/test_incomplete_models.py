"""Model folders that lack a part: refused with a sentence that names it, not loaded with random weights or tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from safetensors.torch import load_file, save_file

from shared.errors import ModelUnavailable

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

REMEDY = "copy or download the whole model again"
Change = Callable[[Path], None]


def without_tensor(component: str, name: str) -> Change:
    def change(folder: Path) -> None:
        (file,) = (folder / component).glob("*.safetensors")
        tensors = load_file(file)
        del tensors[name]
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def without_vocabulary(component: str) -> Change:
    return lambda folder: (folder / component / "tokenizer.json").unlink()


def without_folder(component: str) -> Change:
    return lambda folder: shutil.rmtree(folder / component)


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("sd", without_vocabulary("tokenizer"), "tokenizer gives different texts the same tokens"),
        ("sd3", without_vocabulary("tokenizer_3"), "tokenizer_3 gives different texts the same tokens"),
        ("sd", without_folder("tokenizer"), "it has no folder tokenizer"),
        ("sd", without_folder("scheduler"), "it has no folder scheduler"),
        ("sd", without_tensor("unet", "conv_in.bias"), "unet has no weights for conv_in.bias"),
        ("sd", without_tensor("vae", "decoder.conv_in.bias"), "vae has no weights for decoder.conv_in.bias"),
        (
            "sd",
            without_tensor("text_encoder", "final_layer_norm.weight"),
            "CLIPTextModel has no weights for final_layer_norm.weight",
        ),
    ],
)
def test_a_model_that_lacks_a_part_is_refused_with_its_name(
    family: str, change: Change, sentence: str, tiny_models: Path, tmp_path: Path
) -> None:
    """Without a vocabulary, or with random weights in a text encoder, its images would not depend on the prompt."""
    folder = tmp_path / "incomplete"
    shutil.copytree(tiny_models / family, folder)
    change(folder)
    error = EngineHarness(a_spec(folder)).run(a_job("one")).finished["one"].error
    assert isinstance(error, ModelUnavailable)
    assert sentence in error.message
    assert error.message.endswith(REMEDY)
