"""The models file: what it says, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import models_file
from shared.errors import ConfigurationError

GOOD = '[[model]]\nid = "a"\nsource = "b"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "model: Field required"),
        ("model = []", "model: Tuple should have at least 1 item after validation, not 0"),
        (GOOD + "max_bach = 3\n", "model.0.max_bach: there is no such key"),
        (GOOD + "[model.limits]\nmax_step = 3\n", "model.0.limits.max_step: there is no such key"),
        (GOOD + GOOD, "model ids appear twice: a"),
        ('[[model]]\nid = "a"\n', "model.0.source: Field required"),
        ("[[model", "Expected "),
    ],
)
def test_a_wrong_models_file_is_told_by_file_and_key(tmp_path: Path, text: str, told: str) -> None:
    """One fault gives one sentence."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        models_file.load(path)
    assert caught.value.message.startswith(f"{path}: {told}")
    assert ";" not in caught.value.message


def test_a_models_file_that_is_missing_names_the_setting(tmp_path: Path) -> None:
    """It is found by FUSEQUEUE_MODELS."""
    with pytest.raises(ConfigurationError, match="FUSEQUEUE_MODELS"):
        models_file.load(tmp_path / "none.toml")


def test_a_folder_beside_the_file_is_taken(tmp_path: Path) -> None:
    """Other sources stay as they are: hub ids."""
    (tmp_path / "b").mkdir()
    (spec,) = models_file.load(written(tmp_path, GOOD))
    assert spec.source == str(tmp_path / "b")
    (spec,) = models_file.load(written(tmp_path, GOOD.replace("b", "someone/model")))
    assert spec.source == "someone/model"
