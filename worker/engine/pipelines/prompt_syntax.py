"""The syntax of prompts with weights, as people write it for Stable Diffusion: `(word:1.3)`, `[word]`, `BREAK`."""

import re
from collections.abc import Iterator
from typing import NamedTuple

MORE, LESS = 1.1, 1 / 1.1
"""Weights of `(word)` and `[word]`."""

MOST_WEIGHT = 10.0
"""Of either sign. Images of much smaller ones are noise, and float16 has no room for much larger ones."""

_PIECES = re.compile(
    r"\\(?P<escaped>[()\[\]\\])"
    r"|(?P<open>[(\[])"
    r"|:\s*(?P<weight>[+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*\)"
    r"|(?P<close>[)\]])"
    r"|[^\\()\[\]:]+|[\\:]"
)
_BREAK = re.compile(r"\bBREAK\b")  # without the space around it: `\s*BREAK` takes a square of a long space's length
_OVERFLOWING = 1e9


class Fragment(NamedTuple):
    """A part of a prompt, and how much its words count."""

    text: str
    weight: float


def parse_prompt(prompt: str) -> list[list[Fragment]]:
    """Return the parts of a prompt between its `BREAK`s, at least one, as fragments of different weights.

    Any text is a prompt: a bracket that is never closed counts to the end, and one that closes nothing is text.
    """
    parts: list[list[Fragment]] = [[]]
    for text, weight in _weighted(prompt):
        first, *others = _BREAK.split(text)
        _append(parts[-1], first, weight)
        for other in others:
            parts.append([])
            _append(parts[-1], other, weight)
    return [part for part in parts if any(fragment.text.strip() for fragment in part)] or [[Fragment("", 1.0)]]


def words_of(prompt: str) -> str:
    """Return a prompt without brackets, weights and `BREAK`."""
    return " ".join("".join(fragment.text for fragment in part) for part in parse_prompt(prompt))


def has_weights(prompt: str) -> bool:
    return any(fragment.weight != 1.0 for part in parse_prompt(prompt) for fragment in part)


def _append(part: list[Fragment], text: str, weight: float) -> None:
    """Add a text, to the last fragment if that has its weight: words are not divided at an escaped bracket."""
    if part and part[-1].weight == weight:
        part[-1] = Fragment(part[-1].text + text, weight)
    elif text:
        part.append(Fragment(text, weight))


def _weighted(prompt: str) -> Iterator[tuple[str, float]]:
    """Yield the texts of a prompt with the product of the weights of the brackets around each."""
    pieces = list(_PIECES.finditer(prompt))
    factors, closing = _pairs(pieces)
    products = {"(": [1.0], "[": [1.0]}
    for at, piece in enumerate(pieces):
        if (bracket := piece["open"]) is not None:
            inside = products[bracket][-1] * factors[at]
            products[bracket].append(_within(inside, _OVERFLOWING))
        elif (opened := closing.get(at)) is not None:
            products[opened].pop()
        else:
            yield piece["escaped"] or piece[0], _within(products["("][-1] * products["["][-1], MOST_WEIGHT)


def _pairs(pieces: list[re.Match[str]]) -> tuple[dict[int, float], dict[int, str]]:
    """Return the weight of each opening bracket, by its index, and which bracket each closing one closes."""
    factors: dict[int, float] = {}
    closing: dict[int, str] = {}
    opened: dict[str, list[int]] = {"(": [], "[": []}
    for at, piece in enumerate(pieces):
        if (bracket := piece["open"]) is not None:
            factors[at] = MORE if bracket == "(" else LESS
            opened[bracket].append(at)
        elif piece["weight"] is not None or piece["close"] is not None:
            bracket = "[" if piece["close"] == "]" else "("
            if opened[bracket]:
                closing[at] = bracket
                start = opened[bracket].pop()
                factors[start] = factors[start] if piece["weight"] is None else float(piece["weight"])
    return factors, closing


def _within(value: float, most: float) -> float:
    return max(-most, min(most, value))
