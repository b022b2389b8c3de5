"""What of a long prompt no text encoder reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import CLIPTokenizer, T5Tokenizer

from shared.job import FieldWarning, Job
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.task_pipelines import call_parameters

MOST_SHOWN = 200
"""Characters of the text that is left out."""


def cut_prompts(pipeline: Pipeline, job: Job) -> tuple[FieldWarning, ...]:
    """Return warnings about the ends of prompts that all text encoders of the pipeline leave out.

    None for a pipeline with other encoders than CLIP and T5, which add texts of their own.
    """
    readers = list(_readers(pipeline, job))
    if not readers or None in readers or job.prompt_2 is not None:
        return ()
    warnings = []
    for param, text in (("prompt", job.prompt), ("negative_prompt", job.negative_prompt or "")):
        left_out = min((_left_out(tokenizer, text, most) for tokenizer, most in filter(None, readers)), key=len)
        if left_out:
            shown = left_out if len(left_out) <= MOST_SHOWN else f"{left_out[:MOST_SHOWN]}…"
            message = f"{param}: too long for the text encoders of model {job.model!r}, which leave out: {shown!r}"
            warnings.append(FieldWarning(param=param, message=message))
    return tuple(warnings)


def _readers(pipeline: Pipeline, job: Job) -> Iterator[tuple[Any, int] | None]:
    """Yield each tokenizer with the most tokens that its encoder gets; None for one that is not known."""
    sequence = call_parameters(pipeline).get("max_sequence_length")
    for number in ("", "_2", "_3"):
        tokenizer = getattr(pipeline, f"tokenizer{number}", None)
        if tokenizer is None or getattr(pipeline, f"text_encoder{number}", None) is None:
            continue
        if isinstance(tokenizer, CLIPTokenizer):
            yield tokenizer, tokenizer.model_max_length
        elif isinstance(tokenizer, T5Tokenizer) and sequence is not None and isinstance(sequence.default, int):
            yield tokenizer, job.max_sequence_length or sequence.default
        else:
            yield None


def _left_out(tokenizer: Any, text: str, most: int) -> str:
    """Return the end of a text beyond `most` tokens, of which the last one is its end."""
    if len(text.encode("utf-8", "replace")) < most - 2:  # a token has at least one byte
        return ""
    tokens = tokenizer(text, verbose=False).input_ids
    rest = str(tokenizer.decode(tokens[most - 1 : -1])) if len(tokens) > most else ""
    return rest.strip("\ufffd \n")  # of a character whose first bytes are read
