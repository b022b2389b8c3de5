"""A prompt that no text encoder reads to its end has a warning with the text that is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

LONG = "a dog " * 40
WORDS = "dog"  # of the part that is left out


@pytest.mark.parametrize(
    ("model", "fields", "named"),
    [
        ("sdxl", {"prompt": "a dog"}, []),
        ("sdxl", {"prompt": LONG}, ["prompt"]),
        ("sdxl", {"prompt": "a dog", "negative_prompt": LONG}, ["negative_prompt"]),
        ("sd3", {"prompt": LONG}, []),
        ("sd3", {"prompt": LONG, "max_sequence_length": 16}, ["prompt"]),
        ("flux", {"prompt": LONG, "max_sequence_length": 16}, ["prompt"]),
    ],
)
def test_the_end_of_a_prompt_that_is_left_out_is_named(
    tiny_models: Path, model: str, fields: dict[str, Any], named: list[str]
) -> None:
    """Also where CLIP cuts it and T5 reads on, there is nothing to say. Where a key makes it read all, it is named."""
    recorder = EngineHarness(a_spec(tiny_models / model)).run(a_job("x", **fields))
    warnings = recorder.finished["x"].warnings
    assert [one.param for one in warnings] == named
    assert all(WORDS in one.message for one in warnings)
    assert all(('prompt_syntax = "weights"' in one.message) == (model != "flux") for one in warnings)
