"""What makes a model folder incomplete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diffusers import DDIMScheduler, UNet2DModel
from tiny import tokens

from worker.engine.weights.completeness import check_folder, check_tokenizers, check_weights


class Parts:
    """A pipeline of which only the components are read."""

    def __init__(self, **components: Any) -> None:
        self.components = components


@pytest.mark.parametrize(
    ("index", "missing"),
    [
        pytest.param({"unet": ["diffusers", "UNet2DModel"]}, None, id="there"),
        pytest.param({"tokenizer": ["transformers", "CLIPTokenizer"]}, "tokenizer", id="missing"),
        pytest.param({"image_encoder": [None, None]}, None, id="a component that the model has not"),
        pytest.param({"safety_checker": ["stable_diffusion", "Checker"]}, None, id="not wanted"),
        pytest.param({"_class_name": "Pipeline", "sizes": [64, 64], "is_distilled": True}, None, id="settings"),
    ],
)
def test_each_component_of_the_index_has_a_folder(index: dict[str, Any], missing: str | None, tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    if missing is None:
        check_folder(tmp_path, index, {"safety_checker": None})
    else:
        with pytest.raises(ValueError, match=f"it has no folder {missing}, "):
            check_folder(tmp_path, index, {"safety_checker": None})


@pytest.mark.parametrize("name", ["clip", "t5", "gemma", "qwen", "xlm_roberta", "mistral", "glm"])
def test_tokenizers_that_know_letters_or_bytes_pass(name: str) -> None:
    """Also in a processor, and beside components that are no tokenizers."""
    tokenizer = getattr(tokens, name)()

    class Processor:
        def __init__(self) -> None:
            self.tokenizer = tokenizer

    check_tokenizers(Parts(tokenizer=tokenizer, processor=Processor(), scheduler=DDIMScheduler(), tokenizer_2=None))


@pytest.mark.parametrize("name", ["clip", "t5", "gemma", "qwen", "xlm_roberta"])
def test_a_tokenizer_without_its_vocabulary_is_named(name: str, tmp_path: Path) -> None:
    """Some then count letters or words, so texts of different lengths still get different tokens."""
    whole = getattr(tokens, name)()
    whole.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer_2 gives different texts the same tokens"):
        check_tokenizers(Parts(tokenizer=whole, tokenizer_2=type(whole).from_pretrained(tmp_path)))


def test_tensors_without_values_are_named() -> None:
    """At most three, and the number of the rest."""
    unet = UNet2DModel(
        block_out_channels=(4, 4),
        norm_num_groups=2,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        attention_head_dim=2,
    )
    check_weights(Parts(unet=unet))
    count = sum(1 for _ in unet.parameters())
    with pytest.raises(ValueError, match=rf"^unet has no weights for conv_in\.bias, .* and {count - 3} more tensors; "):
        check_weights(Parts(unet=unet.to("meta")))
