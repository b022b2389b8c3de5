"""Tokens are divided into chunks between words, as compel does by `SplitLongTextMode.WORDS`."""

from __future__ import annotations

import pytest

from worker.engine.pipelines.weighted_prompts import Token, divide


@pytest.mark.parametrize(
    ("words", "chunks"),
    [
        ("", [""]),
        ("ab.", ["ab."]),
        ("ab.cd", ["ab.cd"]),
        ("ab.cde.", ["ab.", "cde."]),
        ("abcd.ef.", ["abcd.", "ef."]),
        ("abcdefgh.i.", ["abcde", "fgh.", "i."]),
        ("a.b.c.d.e.", ["a.b.", "c.d.", "e."]),
    ],
)
def test_a_chunk_ends_with_a_word_if_one_ends_in_it(words: str, chunks: list[str]) -> None:
    """In chunks of five tokens, where a token is a letter or a dot that ends a word."""
    tokens = [Token(ord(letter), 1.0) for letter in words]
    divided = divide(tokens, 5, lambda token: chr(token.id) == ".")
    assert ["".join(chr(token.id) for token in chunk) for chunk in divided] == chunks
