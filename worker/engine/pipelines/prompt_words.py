"""Words of embeddings in prompts: a job's own view of a shared tokenizer, which reads them as new tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from cachetools import LRUCache
from transformers import CLIPTokenizer

from shared.inputs.embedding_check import MAX_VECTORS
from shared.job import Job
from shared.job_record import FieldWarning
from worker.engine.lora.new_tokens import Word
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.text_cache import CachedTokenizer
from worker.engine.pipelines.weighted_prompts import MOST_CHUNKS, SHOWN_CHUNKS

MOST_MARKS = (MOST_CHUNKS + SHOWN_CHUNKS) * MAX_VECTORS
"""Of a prompt: more tokens are neither read nor shown, and a short text can have thousands of words with 75 vectors."""

_CACHED_PROMPTS = 8
_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")


class WordTokenizer(CachedTokenizer):
    """Stand-in for a CLIP tokenizer that knows more words; the ids of their tokens follow those of the tokenizer.

    The tokenizer reads a mark in place of each token of a word: that of the start of a text, a token wherever it is.
    """

    def __init__(self, tokenizer: CachedTokenizer, words: Sequence[Word]) -> None:
        ids: dict[str, range] = {}
        names: dict[int, str] = {}
        next_id = len(tokenizer)
        for word in words:
            ids[word.text] = range(next_id, next_id + word.tokens)
            names |= dict.fromkeys(ids[word.text], "") | {next_id: word.text}
            next_id += word.tokens
        longest_first = sorted(ids, key=len, reverse=True)
        super().__init__(tokenizer)
        mark = str(tokenizer.bos_token)
        vars(self).update(
            prompts=LRUCache(_CACHED_PROMPTS),
            _ids=[ids[word] for word in longest_first],  # as the groups of the pattern
            _names=names,
            _ends={some[-1] for some in ids.values()},
            _mark=mark,
            _pattern=re.compile(f"{re.escape(mark)}|(?i:{'|'.join(f'({_whole(word)})' for word in longest_first)})"),
        )

    def __call__(self, text: str | Sequence[str], *args: Any, **kwargs: Any) -> Any:
        marked: list[tuple[str, list[int]]] = []
        for one in [text] if isinstance(text, str) else text:
            marked.append(self._marked(one, MOST_MARKS - sum(len(tokens) for _, tokens in marked)))
        plain = [one for one, _ in marked]
        encoding = self._tokenizer(plain[0] if isinstance(text, str) else plain, *args, **kwargs)
        ids = encoding["input_ids"]
        first = 1 if kwargs.get("add_special_tokens", True) else 0  # the mark of the text's own start
        rows = [ids] if isinstance(text, str) and isinstance(ids, list) else ids
        for row, (_, tokens) in zip(rows, marked, strict=True):
            values = row if isinstance(row, list) else row.tolist()
            places = [at for at, id_ in enumerate(values) if id_ == self.bos_token_id][first:]
            for at, id_ in zip(places, tokens, strict=False):  # a long text is cut
                row[at] = id_
        return encoding

    def _marked(self, text: str, most: int = MOST_MARKS) -> tuple[str, list[int]]:
        """Return a text with marks for its words, and the id of each mark; one that the text itself has stays.

        After `most` marks, words stay as they are.
        """
        tokens: list[int] = []

        def replace(match: re.Match[str]) -> str:
            if match.lastindex is None:  # the mark itself
                tokens.append(self.bos_token_id)
                return match[0]
            if len(tokens) >= most:
                return match[0]
            own = self._ids[match.lastindex - 1]
            tokens.extend(own)
            return " ".join([self._mark] * len(own))

        pattern: re.Pattern[str] = self._pattern
        return pattern.sub(replace, text), tokens

    def most_tokens(self, text: str) -> int:
        return super().most_tokens(text) + len(self._marked(text)[1])

    def decode(self, ids: Sequence[int], *args: Any, **kwargs: Any) -> str:
        parts = []
        for is_new, some in groupby(ids, lambda id_: id_ in self._names):
            if is_new:
                parts += [name for id_ in some if (name := self._names[id_])]
            else:
                parts.append(self._tokenizer.decode(list(some), *args, **kwargs))
        return " ".join(parts)

    def convert_ids_to_tokens(self, id_: int) -> str:
        """Return the text of one token. A word ends with its last one, so that it is not divided."""
        name: str | None = self._names.get(id_)
        if name is None:
            return str(self._tokenizer.convert_ids_to_tokens(id_))
        return name + ("</w>" if id_ in self._ends else "")


def _whole(word: str) -> str:
    """Return a pattern of a word that is not within a longer one."""
    return (r"(?<!\w)" if word[0] != "<" else "") + re.escape(word) + (r"(?!\w)" if word[-1] != ">" else "")


def tokenizers_with(words: Sequence[Word], pipeline: Pipeline) -> Mapping[str, WordTokenizer]:
    """Return the stand-ins for the tokenizers of a pipeline whose text encoders have new tokens for `words`."""
    found = {name: getattr(pipeline, name, None) for name in _TOKENIZERS} if words else {}
    return {
        name: WordTokenizer(tokenizer, words)
        for name, tokenizer in found.items()
        if isinstance(tokenizer, CLIPTokenizer)
    }


def unused_words(words: Sequence[Word], job: Job) -> Iterator[FieldWarning]:
    """Yield a warning for each word that is in no prompt of a job: its embedding has no effect."""
    texts = " ".join(filter(None, (job.prompt, job.prompt_2, job.negative_prompt)))
    for word in words:
        if not re.search(_whole(word.text), texts, re.IGNORECASE):
            message = f"adapters: the word of an embedding, {word.text!r}, is in none of the prompts"
            yield FieldWarning(param="adapters", message=message)
