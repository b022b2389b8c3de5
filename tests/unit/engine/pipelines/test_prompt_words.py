"""Words of embeddings in prompts: the tokens are those of a tokenizer to which diffusers has added them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tokens
from transformers import CLIPTokenizer

from worker.engine.lora.new_tokens import Word
from worker.engine.pipelines.prompt_words import MOST_MARKS, WordTokenizer, tokenizers_with
from worker.engine.pipelines.text_cache import CachedTokenizer

WORDS = (Word("<cat>", 1), Word("EasyNeg", 3), Word("easyneg-2", 2))
PLAIN = tokens.clip()


@pytest.fixture(scope="module", name="known")
def known_() -> WordTokenizer:
    return WordTokenizer(CachedTokenizer(PLAIN), WORDS)


def with_tokens() -> Any:
    """Return a tokenizer with the tokens that diffusers adds, and how it writes each word."""
    tokenizer, written = copy.deepcopy(PLAIN), {}
    for word in WORDS:
        names = [word.text, *(f"{word.text}_{at}" for at in range(1, word.tokens))]
        tokenizer.add_tokens(names)
        written[word.text] = " ".join(names)
    return tokenizer, written


ADDED, WRITTEN = with_tokens()
TEXTS = ("a", "hill", ", ", " ", "'s", "1", "(", ")", "é", "\u0131", "<|startoftext|>", "<|endoftext|>")
PIECES = st.sampled_from([*WORDS, *TEXTS])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=40), st.booleans())
def test_texts_get_the_tokens_of_a_tokenizer_with_added_ones(pieces: list[Any], short: bool) -> None:
    """Also where a text is cut, and with marks in it."""
    known = WordTokenizer(CachedTokenizer(PLAIN), WORDS)
    text = " ".join(one.text if isinstance(one, Word) else one for one in pieces)
    added = " ".join(WRITTEN[one.text] if isinstance(one, Word) else one for one in pieces)
    options = {"padding": "max_length", "max_length": 77, "truncation": True, "return_tensors": "pt"} if short else {}
    expected, found = ADDED([added], **options).input_ids, known([text], **options).input_ids
    assert (found.tolist() if short else found) == (expected.tolist() if short else expected)


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("<cat>", [80]),
        ("a<CAT>'s", [80]),
        ("EASYNEG, easyneg", [81, 82, 83, 81, 82, 83]),
        ("ea\u017fyneg", [81, 82, 83]),  # a long s, which is an s where case does not count
        ("(EasyNeg:1.2)", [81, 82, 83]),
        ("easyneg-2", [84, 85]),
        ("easyneg-2 easyneg -2", [84, 85, 81, 82, 83]),
        ("easynegative uneasyneg easyneg_1 easyneg2", []),
        ("cat", []),
    ],
)
def test_a_word_counts_in_any_case_but_not_within_another(known: WordTokenizer, text: str, new: list[int]) -> None:
    assert [id_ for id_ in known(text).input_ids if id_ >= len(PLAIN)] == new


def test_tokens_of_words_are_decoded_and_end_with_their_last(known: WordTokenizer) -> None:
    ids = known("a <cat> and easyneg", add_special_tokens=False).input_ids
    assert known.decode(ids) == "a <cat> and EasyNeg"
    assert [known.convert_ids_to_tokens(id_).endswith("</w>") for id_ in ids[-3:]] == [False, False, True]
    assert known.most_tokens("<cat>") >= 1


def test_a_text_of_many_words_does_not_become_huge() -> None:
    """Of 75 vectors for each letter: what is not read is not tokenized either."""
    known = WordTokenizer(CachedTokenizer(PLAIN), (Word("a", 75),))
    read = known(["a " * 1000] * 3).input_ids
    assert MOST_MARKS <= sum(len(ids) for ids in read) < MOST_MARKS + 4000


def test_only_the_tokenizers_of_a_job_with_words_are_replaced() -> None:
    class Pipeline:
        tokenizer = CachedTokenizer(PLAIN)
        tokenizer_2 = None

    assert tokenizers_with((), Pipeline()) == {}
    (found,) = tokenizers_with(WORDS, Pipeline()).values()
    assert isinstance(found, CLIPTokenizer)
    assert found.model_max_length == 77
    assert Pipeline.tokenizer("<cat>").input_ids == PLAIN("<cat>").input_ids
