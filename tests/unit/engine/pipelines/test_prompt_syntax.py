"""The syntax of prompts with weights: any text is a prompt, and takes a time in proportion to its length."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.pipelines.prompt_syntax import LESS, MORE, MOST_WEIGHT, Fragment, has_weights, parse_prompt, words_of

MIXED = st.text(alphabet="ab ()[]\\:.19-+BREAK\n", max_size=60)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a dog", [[("a dog", 1.0)]]),
        ("a (dog:1.3) here", [[("a ", 1.0), ("dog", 1.3), (" here", 1.0)]]),
        ("a (dog)", [[("a ", 1.0), ("dog", MORE)]]),
        ("((dog))", [[("dog", MORE * MORE)]]),
        ("[dog]", [[("dog", LESS)]]),
        ("(a [dog:1.5)", [[("a ", 1.5), ("dog", 1.5 * LESS)]]),
        ("(a (dog:2):0.5)", [[("a ", 0.5), ("dog", 1.0)]]),
        ("(a [b) c]", [[("a ", MORE), ("b", MORE * LESS), (" c", LESS)]]),
        (r"a \(dog\) \[x\] \\", [[(r"a (dog) [x] " + "\\", 1.0)]]),
        (r"a\b", [[(r"a\b", 1.0)]]),
        ("(dog : 1.3 )", [[("dog ", 1.3)]]),
        ("(dog:.5)", [[("dog", 0.5)]]),
        ("(dog:+2.)", [[("dog", 2.0)]]),
        ("(dog:0)", [[("dog", 0.0)]]),
        ("(dog:-1)", [[("dog", -1.0)]]),
        ("(dog:1000000)", [[("dog", MOST_WEIGHT)]]),
        (f"(dog:-{'9' * 500})", [[("dog", -MOST_WEIGHT)]]),
        ("(dog:nan)", [[("dog:nan", MORE)]]),
        ("(dog:1e9)", [[("dog:1e9", MORE)]]),
        ("(dog:1.2.3)", [[("dog:1.2.3", MORE)]]),
        ("ratio 16:9", [[("ratio 16:9", 1.0)]]),
        ("dog:1.3)", [[("dog:1.3)", 1.0)]]),
        ("a) b] c", [[("a) b] c", 1.0)]]),
        ("(a dog", [[("a dog", MORE)]]),
        ("a [dog", [[("a ", 1.0), ("dog", LESS)]]),
        ("", [[("", 1.0)]]),
        ("()", [[("", 1.0)]]),
        ("a BREAK b", [[("a ", 1.0)], [(" b", 1.0)]]),
        ("(a BREAK b:1.2)", [[("a ", 1.2)], [(" b", 1.2)]]),
        ("BREAK", [[("", 1.0)]]),
        ("BREAK a BREAK BREAK", [[(" a ", 1.0)]]),
        ("BREAKFAST break", [[("BREAKFAST break", 1.0)]]),
    ],
)
def test_brackets_and_breaks_become_weights_and_parts(
    prompt: str, expected: Sequence[Sequence[tuple[str, float]]]
) -> None:
    assert parse_prompt(prompt) == [[Fragment(text, pytest.approx(weight)) for text, weight in one] for one in expected]


@given(MIXED)
def test_any_text_is_a_prompt_with_finite_weights(prompt: str) -> None:
    fragments = [fragment for part in parse_prompt(prompt) for fragment in part]
    assert fragments
    assert all(abs(fragment.weight) <= MOST_WEIGHT and math.isfinite(fragment.weight) for fragment in fragments)
    assert {letter for one in fragments for letter in one.text} <= set(prompt)


@pytest.mark.parametrize(
    "piece",
    ["(", "(a", "[a", ")", "(a)", "(a:2)", "(a:9", " ", ":", ": ", ":1", "\\", "BREAK ", "a BREAK", "1", "(a:0) "],
)
def test_a_long_prompt_takes_a_time_in_proportion(piece: str) -> None:
    """20,000 characters take some hundredths of a second; a square of that would be minutes."""
    started = time.process_time()
    parse_prompt(piece * (20_000 // len(piece)))
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("prompt", "words", "weighted"),
    [
        ("a dog,  on a hill", "a dog,  on a hill", False),
        ("a (dog:1.4) on ((a hill))", "a dog on a hill", True),
        (r"rain \(wet\)", "rain (wet)", False),
        ("(plain:1.0) [text", "plain text", True),
        ("a cat BREAK the moon", "a cat   the moon", False),
        ("", "", False),
    ],
)
def test_words_are_those_of_the_prompt_without_its_syntax(prompt: str, words: str, weighted: bool) -> None:
    assert (words_of(prompt), has_weights(prompt)) == (words, weighted)
