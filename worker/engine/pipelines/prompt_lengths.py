"""What of a long prompt no text encoder reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import CLIPTokenizer, T5Tokenizer

from shared.job import Job
from shared.job_record import FieldWarning
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.prompt_syntax import has_weights
from worker.engine.pipelines.task_pipelines import call_parameters
from worker.engine.pipelines.weighted_prompts import MOST_CHUNKS, has_t5, prompt_encoders, weights_refused

MOST_SHOWN = 200
"""Characters of the text that is left out."""


def cut_prompts(pipeline: Pipeline, job: Job) -> tuple[FieldWarning, ...]:
    """Return warnings about the ends of prompts that all text encoders of the pipeline leave out.

    None for a pipeline with other encoders than CLIP and T5, which add texts of their own.
    """
    readers = list(_readers(pipeline, job))
    if not readers or None in readers or job.prompt_2 is not None:
        return ()
    remedy = "" if weights_refused(pipeline) else '; prompt_syntax = "weights" in the models file makes it read all'
    warnings = []
    for param, text in (("prompt", job.prompt), ("negative_prompt", job.negative_prompt or "")):
        left_out = min((_left_out(tokenizer, text, most) for tokenizer, most in filter(None, readers)), key=len)
        if left_out:
            what = f"too long for the text encoders of model {job.model!r}, which leave out: {_shown(left_out)!r}"
            warnings.append(FieldWarning(param=param, message=f"{param}: {what}{remedy}"))
    return tuple(warnings)


def cut_weighted_prompts(pipeline: Pipeline, job: Job) -> tuple[FieldWarning, ...]:
    """Return warnings about the ends of prompts that are left out although they are read in chunks, and about weights
    that count for some of the text encoders only."""
    encoders = list(prompt_encoders(pipeline))
    second = job.prompt_2 if len(encoders) > 1 else None
    reads_t5 = has_t5(pipeline) and getattr(pipeline, "text_encoder_3", None) is not None
    texts = {"prompt": job.prompt, "negative_prompt": job.negative_prompt, "prompt_2": second}
    warnings = []
    for param, text in texts.items():
        encoder = encoders[-1 if param == "prompt_2" else 0]
        if text and (left_out := encoder.read(text).left_out):
            what = f"longer than {MOST_CHUNKS} chunks of tokens, which leaves out: {_shown(left_out)!r}"
            warnings.append(FieldWarning(param=param, message=f"{param}: {what}"))
        if text and param != "prompt_2" and reads_t5 and has_weights(text):
            what = "the weights count for the two CLIP text encoders; T5 reads the words without them"
            warnings.append(FieldWarning(param=param, message=f"{param}: {what}"))
    return tuple(warnings)


def _shown(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


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
    if tokenizer.most_tokens(text) < most - 2:
        return ""
    tokens = tokenizer(text, verbose=False).input_ids
    rest = str(tokenizer.decode(tokens[most - 1 : -1])) if len(tokens) > most else ""
    return rest.strip("\ufffd \n")  # of a character whose first bytes are read
