"""LRU caches of tokenized texts and of text encoder outputs.

Negative prompts repeat, the images of one job share a prompt, and clients try many seeds of one prompt.
"""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from cachetools import LRUCache
from transformers import BatchEncoding, PreTrainedTokenizerBase

from worker.engine.fusion.module_proxy import ParkedCall, Stage
from worker.engine.fusion.stacking import map_tensors

CACHE_BYTES = 64 * 1024 * 1024
"""Per model. An output above a quarter of it (every layer's states of a large language model) is not kept."""

LONGEST_TOKENS = 4096
CACHED_TEXTS = 256
CACHED_PROMPTS = 64  # of which each has up to 1,200 tokens
LONGEST_TEXT = 16 * 1024  # characters


class TextCache:
    """LRU cache of the text encoder outputs of one model, by input tokens."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._outputs: LRUCache[Hashable, Any] = LRUCache(max_bytes, getsizeof=lambda output: bytes_of(output) or 0)

    @property
    def nbytes(self) -> int:
        return int(self._outputs.currsize)

    def get(self, call: ParkedCall) -> Any | None:
        """Return a copy of the cached output of a call; None if it must run."""
        key = tokens_key(call)
        output = None if key is None else self._outputs.get(key)
        return None if output is None else try_copy(output)

    def get_or_run(self, calls: Sequence[ParkedCall], run: Callable[[Sequence[int]], Sequence[Any]]) -> list[Any]:
        """Return the outcome of each call; `run(indexes)` runs those that are not cached, equal ones once.

        No two outcomes share memory, as pipelines can change them in place. Calls whose output cannot be copied, for
        example for lack of memory, run one by one.
        """
        # A call that has more inputs than tokens gets its index as a key: it equals no other call.
        keys = [tokens_key(call) or at for at, call in enumerate(calls)]
        known = {key: output for key in keys if (output := self._outputs.get(key)) is not None}
        missing = [at for at, key in enumerate(keys) if key not in known and key not in keys[:at]]
        ran = dict(zip(missing, run(missing), strict=True)) if missing else {}
        for at, outcome in ran.items():
            known[keys[at]] = outcome
            self._keep(keys[at], outcome)
        outcomes = [ran[at] if at in ran else try_copy(known[key]) for at, key in enumerate(keys)]
        rest = [at for at, outcome in enumerate(outcomes) if outcome is None]
        for at, outcome in zip(rest, run(rest), strict=True) if rest else ():
            outcomes[at] = outcome
        return outcomes

    def _keep(self, key: Hashable, outcome: Any) -> None:
        if not isinstance(key, int) and 0 < (bytes_of(outcome) or 0) <= self._outputs.maxsize // 4:
            output = try_copy(outcome)
            if output is not None:
                self._outputs[key] = output

    def clear(self) -> None:
        self._outputs.clear()


def tokens_key(call: ParkedCall) -> Hashable | None:
    """Return a key that is equal for calls with equal output; None for a call that has more inputs than tokens."""
    if call.private:
        return None  # its hooks must see the forward
    if call.shared_method.stage is not Stage.ENCODE or call.shared_method.method != "forward":
        return None
    if call.tokens is None:
        call.tokens = _read_tokens(call)
    return (
        (id(call.shared_method), call.adapter, call.autocast, call.changes_key, *call.tokens) if call.tokens else None
    )


def _read_tokens(call: ParkedCall) -> tuple[Hashable, ...]:
    """Return the arguments of a call by value, empty if they are more than tokens; waits for the device."""
    key: list[Hashable] = []
    tokens = 0
    for name, value in (*enumerate(call.args), *sorted(call.kwargs.items())):
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() or value.numel() > LONGEST_TOKENS:
                return ()
            tokens += value.numel()
            key.append((name, value.dtype, value.shape, value.cpu().numpy().tobytes()))
        elif value is None or isinstance(value, bool | int | float | str):
            key.append((name, value))
        else:
            return ()
    return tuple(key) if tokens else ()


def try_copy(outcome: Any) -> Any:
    """Return a copy with cloned tensors; None if copying fails, which must not end the engine's thread."""
    try:
        return map_tensors(outcome, lambda tensor: tensor.clone())
    except (RuntimeError, TypeError):  # no memory, or an output class with another constructor
        return None


def bytes_of(tree: Any) -> int | None:
    """Return the memory of the tensors of a tree; None for a tree with more than tensors and plain values.

    A language model's cache of keys and values, for example, can be many times larger than its states.
    """
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    items = list(tree.values()) if isinstance(tree, Mapping) else tree
    if isinstance(items, list | tuple):
        sizes = [bytes_of(item) for item in items]
        return None if None in sizes else sum(size or 0 for size in sizes)
    return 0 if tree is None or isinstance(tree, bool | int | float | str) else None


class CachedTokenizer:
    """Stand-in for a tokenizer inside pipelines, with an LRU cache. For the engine's thread only.

    It has the tokenizer's class and attributes. A changed attribute, such as the padding side, clears the caches.
    `prompts` has what `PromptEncoder` read of each.
    """

    prompts: LRUCache[str, Any]

    def __init__(self, tokenizer: Any) -> None:
        vars(self).update(
            _tokenizer=tokenizer, _encodings=LRUCache(CACHED_TEXTS), prompts=LRUCache[str, Any](CACHED_PROMPTS)
        )

    @property  # type: ignore[misc]  # isinstance() reads it
    def __class__(self) -> type:
        cls: type = self._tokenizer.__class__
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = _freeze((args, kwargs))
        encoding = self._encodings.get(key)
        if encoding is None:
            encoding = self._tokenizer(*args, **kwargs)
            copyable = isinstance(encoding, BatchEncoding) and all(map(torch.is_tensor, encoding.values()))
            if key is None or not copyable:
                return encoding
            self._encodings[key] = encoding
        copied = copy.copy(encoding)  # with its own tensors: a pipeline can change them in place
        copied.data = {name: tensor.clone() for name, tensor in encoding.items()}
        return copied

    def most_tokens(self, text: str) -> int:
        """Return a number of tokens that a text does not exceed, without its marks: a token has at least one byte."""
        return len(text.encode("utf-8", "replace"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self._tokenizer, name, self) != value:
            setattr(self._tokenizer, name, value)
            self._encodings.clear()
            self.prompts.clear()

    def __len__(self) -> int:
        return len(self._tokenizer)


def cached_tokenizers(components: Mapping[str, Any]) -> dict[str, CachedTokenizer]:
    return {
        name: CachedTokenizer(item) for name, item in components.items() if isinstance(item, PreTrainedTokenizerBase)
    }


def _freeze(value: Any) -> Hashable | None:
    """Return a key that is equal for equal plain values; None for other values and long texts."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else None
    if value is None or isinstance(value, bool | int | float):
        return (type(value), value)
    if isinstance(value, Mapping):
        value = tuple(item for pair in value.items() for item in pair)
    if not isinstance(value, list | tuple):
        return None
    items = tuple(_freeze(item) for item in value)
    return None if None in items else (type(value), items)
