"""Texts split into tokens once: what a tokenizer gave is kept for pictures whose pipelines ask it the same.

Negative prompts are mostly alike, the pictures of one job have one prompt, and a client tries many seeds of one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

KEPT = 256
LONGEST = 16 * 1024  # characters


class CachedTokenizer:
    """Stands for a tokenizer inside pictures' pipelines. Only to be used on the engine's thread.

    It passes for the tokenizer's class, and gives out and takes its attributes; when one changes, such as the padding's
    side, what was kept is void.
    """

    def __init__(self, tokenizer: Any) -> None:
        vars(self).update(_tokenizer=tokenizer, _kept=OrderedDict())

    @property  # type: ignore[misc]  # isinstance() asks for it
    def __class__(self) -> type:
        return type(self._tokenizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = _frozen((args, kwargs))
        found = self._kept.get(key)
        if found is None:
            found = self._tokenizer(*args, **kwargs)
            if key is None or not _is_of_tensors(found):
                return found
            self._kept[key] = found
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return _copy_of(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self._tokenizer, name, self) != value:
            setattr(self._tokenizer, name, value)
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._tokenizer)


def cached_tokenizers(components: Mapping[str, Any]) -> dict[str, CachedTokenizer]:
    """Return what stands for the tokenizers among a pipeline's components, by their names."""
    return {
        name: CachedTokenizer(part) for name, part in components.items() if isinstance(part, PreTrainedTokenizerBase)
    }


def _frozen(value: Any) -> Hashable | None:
    """Return what is equal for equal plain values; None where there is another, or a long text."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST else None
    if value is None or isinstance(value, bool | int | float):
        return (type(value), value)
    if isinstance(value, Mapping):
        value = tuple(item for pair in value.items() for item in pair)
    if not isinstance(value, list | tuple):
        return None
    parts = tuple(_frozen(item) for item in value)
    return None if None in parts else (type(value), parts)


def _is_of_tensors(found: Any) -> bool:
    return isinstance(found, BatchEncoding) and all(isinstance(value, torch.Tensor) for value in found.values())


def _copy_of(found: BatchEncoding) -> BatchEncoding:
    """Return a copy whose tensors a pipeline may change in place."""
    copied = copy.copy(found)
    copied.data = {name: tensor.clone() for name, tensor in found.items()}
    return copied
