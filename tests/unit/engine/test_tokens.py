"""Texts split into tokens once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

from worker.engine.pipelines import text_cache
from worker.engine.pipelines.text_cache import CachedTokenizer, cached_tokenizers


class Spelling(PreTrainedTokenizerBase):
    """Splits into letters, and counts how often it is asked."""

    padding_side = "right"

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.asked += 1
        ids = [[ord(letter) for letter in text] for text in texts]
        if options.get("return_tensors") != "pt":
            return BatchEncoding({"input_ids": ids})
        sign = -1 if self.padding_side == "left" else 1
        return BatchEncoding({"input_ids": sign * torch.tensor(ids)})

    def __len__(self) -> int:
        return 26


def ids(tokenizer: Any, text: str, **options: Any) -> Any:
    return tokenizer([text], **{"return_tensors": "pt", **options}).input_ids


def test_the_same_text_is_split_once() -> None:
    real = Spelling()
    tokenizer = CachedTokenizer(real)
    assert torch.equal(ids(tokenizer, "ab"), ids(tokenizer, "ab"))
    assert real.asked == 1
    assert ids(tokenizer, "ba").tolist() == [[98, 97]]
    ids(tokenizer, "ab", max_length=1)
    ids(tokenizer, "ab", max_length=True)
    assert real.asked == 4, "another text and other options are something else, and True is not 1"


def test_what_a_pipeline_does_to_its_tokens_changes_nobody_elses() -> None:
    tokenizer = CachedTokenizer(Spelling())
    for _ in range(3):
        found = tokenizer(["ab"], return_tensors="pt")
        assert found.input_ids.tolist() == [[97, 98]]
        found.input_ids.zero_()
        found["more"] = torch.ones(1)


def test_an_attribute_that_changes_makes_what_was_kept_void() -> None:
    real = Spelling()
    tokenizer = CachedTokenizer(real)
    ids(tokenizer, "ab")
    tokenizer.padding_side = "right"
    assert ids(tokenizer, "ab").tolist() == [[97, 98]]
    assert real.asked == 1, "it was so already"
    tokenizer.padding_side = "left"
    assert real.padding_side == tokenizer.padding_side == "left"
    assert ids(tokenizer, "ab").tolist() == [[-97, -98]]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        pytest.param("ab", {"return_tensors": None}, id="lists of numbers"),
        pytest.param("ab", {"hook": print}, id="asked with more than plain values"),
        pytest.param("a" * (text_cache.LONGEST_TEXT + 1), {}, id="a long text"),
    ],
)
def test_what_cannot_be_kept_is_asked_for_each_time(text: str, options: dict[str, Any]) -> None:
    real = Spelling()
    tokenizer = CachedTokenizer(real)
    for _ in range(2):
        assert len(ids(tokenizer, text, **options)[0]) == len(text)
    assert real.asked == 2


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cache, "CACHED_TEXTS", 2)
    real = Spelling()
    tokenizer = CachedTokenizer(real)
    for text in ("a", "b", "a", "c", "a"):
        ids(tokenizer, text)
    assert real.asked == 3
    ids(tokenizer, "b")
    assert real.asked == 4


def test_it_passes_for_the_tokenizer() -> None:
    real = Spelling()
    stand_ins = cached_tokenizers({"tokenizer": real, "scheduler": object(), "tokenizer_2": None})
    assert list(stand_ins) == ["tokenizer"]
    assert isinstance(stand_ins["tokenizer"], Spelling)
    assert len(stand_ins["tokenizer"]) == 26
