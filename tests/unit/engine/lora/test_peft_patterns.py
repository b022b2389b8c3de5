"""PEFT's values by layer: names of layers count, and other expressions are refused, as a file's could run for hours."""

from __future__ import annotations

import pytest
from peft.utils.other import get_pattern_key

from shared.errors import AdapterUnavailable
from worker.engine.lora.peft_patterns import value_of

PATHS = ("to_q", "attn1.to_q", "blocks.0.attn1.to_q", "blocks.0.xto_q", "blocks.0.to_q.x")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["to_q", "attn1.to_q", r"attn1\.to_q", "^to_q", "to_q$", "^blocks.0.attn1.to_q$"])
def test_a_name_is_found_as_by_peft(key: str, path: str) -> None:
    values = {key: 5}
    expected = values.get(get_pattern_key([key], path), 8)
    assert value_of({"alpha_pattern": values}, "alpha_pattern", path, 8) == expected


@pytest.mark.parametrize("key", ["(a+)+b", ".*to_q", "to_[qk]", "", "a" * 100 + "|"])
def test_an_expression_is_refused_by_name(key: str) -> None:
    with pytest.raises(AdapterUnavailable, match="no name of a layer"):
        value_of({"rank_pattern": {key: 1}}, "rank_pattern", "to_q", 8)


def test_without_a_mapping_the_default_counts() -> None:
    assert value_of({}, "alpha_pattern", "to_q", 8) == 8
    with pytest.raises(AdapterUnavailable, match="no mapping"):
        value_of({"alpha_pattern": ["to_q"]}, "alpha_pattern", "to_q", 8)
