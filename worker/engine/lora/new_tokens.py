"""New tokens of text encoders: the vectors of embeddings (textual inversion), in the rows of their jobs only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Word(NamedTuple):
    """A word of prompts that stands for `tokens` new tokens."""

    text: str
    tokens: int


@dataclass(frozen=True)
class TokenVectors:
    """Vectors [tokens, width] of new tokens, whose ids begin at `first_id`: the table at `path` has none of them."""

    path: str
    first_id: int
    vectors: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.vectors.nbytes

    def fill_in(self, ids: torch.Tensor, embedded: torch.Tensor) -> None:
        """Replace the vectors of the new tokens among `ids` in `embedded`, without waiting for the device."""
        own = self.vectors[(ids - self.first_id).clamp(0, len(self.vectors) - 1)]
        embedded.copy_(torch.where((ids >= self.first_id)[..., None], own, embedded))


@dataclass(frozen=True)
class NewTokens:
    """The words of embeddings, and the vectors of all of them, in this order, by text encoder."""

    words: Sequence[Word] = ()
    tables: Mapping[str, TokenVectors] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables.values())


def join(embeddings: Sequence[NewTokens]) -> NewTokens:
    """Return the tokens of several embeddings of one model, one behind the other."""
    tables = {
        component: TokenVectors(
            table.path, table.first_id, torch.cat([one.tables[component].vectors for one in embeddings])
        )
        for component, table in (embeddings[0].tables.items() if embeddings else ())
    }
    return NewTokens(tuple(word for one in embeddings for word in one.words), tables)


def move(tokens: NewTokens, modules: Mapping[str, torch.nn.Module], device: torch.device) -> NewTokens:
    """Return `tokens` on `device`, in the dtypes of a model's `modules`."""
    tables = {}
    for component, table in tokens.tables.items():
        dtype: torch.dtype = getattr(modules[component], "dtype", torch.float32)
        tables[component] = TokenVectors(table.path, table.first_id, table.vectors.to(device, dtype))
    return NewTokens(tokens.words, tables)
