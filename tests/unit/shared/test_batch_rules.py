"""The rules file: which rule counts, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.config import batch_rules, models_file
from shared.config.batch_rules import BatchRules, Rule
from shared.errors import ConfigurationError

QWEN = ("qwen", "Qwen/Qwen-Image")
RULES = BatchRules(
    rules=(
        Rule(model_contains="qwen-image", resolution="1024x1024", max_batch_size=2),
        Rule(model_contains="QWEN", max_batch_size=6),
        Rule(model_contains="flux", resolution="512x512", max_batch_size=64),
    )
)


@pytest.mark.parametrize(
    ("names", "size", "most", "why"),
    [
        (QWEN, (1024, 1024), 2, "of two rules that fit, the lower"),
        (QWEN, (512, 512), 6, "a rule without a resolution is for every size"),
        (QWEN, (1024, 768), 6, "a resolution is both sides"),
        (("qwen", "/models/q"), (1024, 1024), 6, "the id or the source is to contain the name"),
        (("flux", "f"), (512, 512), 8, "no rule raises what models.toml allows"),
        (("sd", "s"), (512, 512), 8, "no rule, no change"),
    ],
)
def test_the_lowest_rule_that_fits_counts(names: tuple[str, ...], size: tuple[int, int], most: int, why: str) -> None:
    """models.toml allows eight here."""
    assert RULES.cap(names, *size, most=8) == most, why


RULE = {"model_contains": "a", "max_batch_size": 2}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"schema_version": 1, "rules": [], "rule": []}, "rule: there is no such key"),
        ({"schema_version": 1, "rules": [{**RULE, "max_batch": 2}]}, "rules.0.max_batch: there is no such key"),
        ({"schema_version": 2, "rules": []}, "schema_version: Input should be 1"),
        ({"rules": []}, "schema_version: Field required"),
        ({"schema_version": 1}, "rules: Field required"),
        ({"schema_version": 1, "rules": [{"model_contains": "a"}]}, "rules.0.max_batch_size: Field required"),
        ({"schema_version": 1, "rules": [{**RULE, "max_batch_size": 0}]}, "rules.0.max_batch_size: Input should be "),
        ({"schema_version": 1, "rules": [{**RULE, "max_batch_size": "2"}]}, "rules.0.max_batch_size: Input should be "),
        ({"schema_version": 1, "rules": [{**RULE, "resolution": "1024"}]}, "rules.0.resolution: String should match"),
        ([], "Input should be an object"),
    ],
)
def test_a_wrong_rules_file_is_told_by_file_and_key(tmp_path: Path, content: object, told: str) -> None:
    """A misspelt key would be a rule that does nothing."""
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(ConfigurationError) as caught:
        batch_rules.load(path)
    assert caught.value.message.startswith(f"{path}: {told}")


def test_a_missing_or_garbled_file_is_told(tmp_path: Path) -> None:
    """The message names the setting that points to it."""
    with pytest.raises(ConfigurationError, match="FUSEQUEUE_BATCH_RULES"):
        batch_rules.load(tmp_path / "nowhere.json")
    (tmp_path / "garbled.json").write_text("{", "utf-8")
    with pytest.raises(ConfigurationError, match="Invalid JSON"):
        batch_rules.load(tmp_path / "garbled.json")


def test_a_catalog_gives_models_with_their_rules_applied(tmp_path: Path) -> None:
    """Both sides ask it, so that the line and the worker agree on what a full batch is."""
    (tmp_path / "models.toml").write_text('[[model]]\nid = "a"\nsource = "b"\nmax_batch = 8\n', "utf-8")
    (tmp_path / "rules.json").write_text(
        json.dumps({"schema_version": 1, "rules": [{**RULE, "resolution": "512x512"}]}), "utf-8"
    )
    served = models_file.load(tmp_path / "models.toml", tmp_path / "rules.json")
    assert served.for_size("a", 512, 512).max_batch == 2
    assert served.for_size("a", 512, 768).max_batch == 8
    assert models_file.load(tmp_path / "models.toml").for_size("a", 512, 512).max_batch == 8
