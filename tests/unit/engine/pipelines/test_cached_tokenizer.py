"""The cached tokenizer: what it keeps, and that it stands in for the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

from worker.engine.pipelines import text_cache
from worker.engine.pipelines.text_cache import CachedTokenizer, cached_tokenizers


class LetterTokenizer(PreTrainedTokenizerBase):
    """Splits texts into letters, and counts its calls."""

    padding_side = "right"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.calls += 1
        ids = [[ord(letter) for letter in text] for text in texts]
        if options.get("return_tensors") != "pt":
            return BatchEncoding({"input_ids": ids})
        sign = -1 if self.padding_side == "left" else 1
        return BatchEncoding({"input_ids": sign * torch.tensor(ids)})

    def __len__(self) -> int:
        return 26


def ids(tokenizer: Any, text: str, **options: Any) -> Any:
    return tokenizer([text], **{"return_tensors": "pt", **options}).input_ids


def test_the_same_text_is_tokenized_once() -> None:
    real = LetterTokenizer()
    tokenizer = CachedTokenizer(real)
    assert torch.equal(ids(tokenizer, "ab"), ids(tokenizer, "ab"))
    assert real.calls == 1
    assert ids(tokenizer, "ba").tolist() == [[98, 97]]
    ids(tokenizer, "ab", max_length=1)
    ids(tokenizer, "ab", max_length=True)
    assert real.calls == 4, "other texts and other options are other keys, and True is not 1"


def test_a_pipelines_change_of_its_tokens_does_not_change_others() -> None:
    tokenizer = CachedTokenizer(LetterTokenizer())
    for _ in range(3):
        encoding = tokenizer(["ab"], return_tensors="pt")
        assert encoding.input_ids.tolist() == [[97, 98]]
        encoding.input_ids.zero_()
        encoding["more"] = torch.ones(1)


def test_a_changed_attribute_clears_the_cache() -> None:
    real = LetterTokenizer()
    tokenizer = CachedTokenizer(real)
    ids(tokenizer, "ab")
    tokenizer.padding_side = "right"
    assert ids(tokenizer, "ab").tolist() == [[97, 98]]
    assert real.calls == 1, "the attribute did not change"
    tokenizer.padding_side = "left"
    assert real.padding_side == tokenizer.padding_side == "left"
    assert ids(tokenizer, "ab").tolist() == [[-97, -98]]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        pytest.param("ab", {"return_tensors": None}, id="lists of numbers"),
        pytest.param("ab", {"hook": print}, id="an option that is no plain value"),
        pytest.param("a" * (text_cache.LONGEST_TEXT + 1), {}, id="a long text"),
    ],
)
def test_texts_that_cannot_be_cached_are_tokenized_each_time(text: str, options: dict[str, Any]) -> None:
    real = LetterTokenizer()
    tokenizer = CachedTokenizer(real)
    for _ in range(2):
        assert len(ids(tokenizer, text, **options)[0]) == len(text)
    assert real.calls == 2


def test_the_least_recently_used_text_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cache, "CACHED_TEXTS", 2)
    real = LetterTokenizer()
    tokenizer = CachedTokenizer(real)
    for text in ("a", "b", "a", "c", "a"):
        ids(tokenizer, text)
    assert real.calls == 3
    ids(tokenizer, "b")
    assert real.calls == 4


def test_it_has_the_tokenizers_class_and_attributes() -> None:
    real = LetterTokenizer()
    stand_ins = cached_tokenizers({"tokenizer": real, "scheduler": object(), "tokenizer_2": None})
    assert list(stand_ins) == ["tokenizer"]
    assert isinstance(stand_ins["tokenizer"], LetterTokenizer)
    assert len(stand_ins["tokenizer"]) == 26
