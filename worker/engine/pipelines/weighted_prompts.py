"""Prompts of any length, with weights, for pipelines with CLIP as text encoders (`prompt_syntax = "weights"`).

A prompt is encoded in chunks of 75 tokens, each by the same call of the shared text encoder that a pipeline makes for a
prompt of that length. The pipeline gets the states of all chunks, one behind the other. The T5 of Stable Diffusion 3
reads the words without weights, as the pipeline calls it, and its states follow those of CLIP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from inspect import Parameter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from shared.architectures.registry import WEIGHTED_PROMPTS
from shared.config.model_spec import ModelSpec
from shared.job import Job
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.prompt_syntax import Fragment, parse_prompt, words_of
from worker.engine.pipelines.task_pipelines import call_parameters
from worker.engine.pipelines.text_cache import CachedTokenizer

MOST_CHUNKS = 16
"""Of a prompt: 1,200 tokens, about 5,000 letters."""

SHOWN_CHUNKS = 8
"""Of what is left out."""

_FRAGMENTS_AT_ONCE = 64

_LIBRARY = "compel"  # imported when a model needs it, as it imports many pipelines
_WITH_T5 = "SD3Transformer2DModel"
_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TEXTS = ("prompt", "prompt_2", "negative_prompt")


class Token(NamedTuple):
    """A token of a prompt, and its weight."""

    id: int
    weight: float


Chunk = Sequence[Token]


class PromptChunks(NamedTuple):
    """The chunks of a prompt that are encoded, and the beginning of the text that is left out, which can be empty."""

    chunks: Sequence[Chunk]
    left_out: str


def check_syntax(spec: ModelSpec, pipelines: Iterable[Pipeline]) -> None:
    """Raise `ValueError` if a pipeline cannot have the `prompt_syntax`, and `ImportError` for a missing package."""
    if spec.prompt_syntax == "weights":
        import_module(_LIBRARY)
        for pipeline in pipelines:
            if (refusal := weights_refused(pipeline)) is not None:
                raise ValueError(f'prompt_syntax = "weights": {refusal}; remove the key')


def weights_refused(pipeline: Pipeline) -> str | None:
    """Return why the prompts of a pipeline can have no weights, None if they can."""
    names = _ENCODERS[:2] if has_t5(pipeline) else _ENCODERS
    encoders = [one for one in (getattr(pipeline, name, None) for name in names) if one is not None]
    if not encoders or not all(isinstance(one, CLIPTextModel | CLIPTextModelWithProjection) for one in encoders):
        return "its text encoders are not CLIP only"
    denoiser = getattr(pipeline, "unet", None).__class__.__name__  # of a module proxy that of its module
    parameters = call_parameters(pipeline)
    takes_embeddings = "prompt_embeds" in parameters and parameters["prompt"].default is not Parameter.empty
    is_known = len(encoders) == len(names) if has_t5(pipeline) else denoiser in WEIGHTED_PROMPTS
    return None if is_known and takes_embeddings else f"{type(pipeline).__name__} is not supported"


def has_t5(pipeline: Pipeline) -> bool:
    """Return whether a pipeline has the states of T5 behind those of two CLIP encoders, or zeros without a T5."""
    denoiser = getattr(pipeline, "transformer", None).__class__.__name__
    return denoiser == _WITH_T5 and hasattr(pipeline, "_get_t5_prompt_embeds")


def with_embeddings(pipeline: Pipeline, job: Job, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a pipeline's call with the embeddings of its prompts in place of the prompts."""
    accepted, prompt = call_parameters(pipeline), arguments["prompt"]
    texts = {"": (prompt, arguments.get("prompt_2") or prompt)}
    encoders = {"": list(prompt_encoders(pipeline, arguments.get("clip_skip")))}
    negative = arguments.get("negative_prompt")
    zeros = negative is None and getattr(pipeline.config, "force_zeros_for_empty_prompt", False)
    if job.guidance_scale > 1 and not zeros and "negative_prompt_embeds" in accepted:  # as diffusers' pipelines do
        texts["negative_"] = (negative or "",) * 2
        encoders["negative_"] = list(prompt_encoders(pipeline, None))
    chunks = {
        name: [encoder.read(text).chunks for encoder, text in zip(encoders[name], of_both, strict=False)]
        for name, of_both in texts.items()
    }
    count = max(len(one) for several in chunks.values() for one in several)
    values = {name: value for name, value in arguments.items() if name not in _TEXTS}
    for name, several in chunks.items():
        states = [encoder.states(one, count) for encoder, one in zip(encoders[name], several, strict=True)]
        of_clip = torch.cat(states, dim=-1).to(encoders[name][-1].dtype)
        with_t5 = has_t5(pipeline)
        values[f"{name}prompt_embeds"] = _with_t5(pipeline, of_clip, texts[name][0], arguments) if with_t5 else of_clip
        if "pooled_prompt_embeds" in accepted:
            pooling = list(zip(encoders[name], several, strict=True))[0 if with_t5 else -1 :]
            pooled = [encoder.pooled(one[0]) for encoder, one in pooling]
            values[f"{name}pooled_prompt_embeds"] = torch.cat(pooled, dim=-1)
    return values


def _with_t5(pipeline: Any, of_clip: torch.Tensor, text: str, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Return the states of CLIP, as wide as those of T5, and behind them those of T5 for the words of a prompt."""
    given = arguments.get("max_sequence_length")
    length = given or call_parameters(pipeline)["max_sequence_length"].default
    of_t5: torch.Tensor = pipeline._get_t5_prompt_embeds(words_of(text), max_sequence_length=length)
    wide = torch.nn.functional.pad(of_clip, (0, of_t5.shape[-1] - of_clip.shape[-1]))
    return torch.cat([wide, of_t5.to(wide.dtype)], dim=-2)


def prompt_encoders(pipeline: Pipeline, clip_skip: int | None = None) -> Iterator[PromptEncoder]:
    """Yield the encoders of a pipeline's prompts, in the order in which it joins their states."""
    is_xl = "pooled_prompt_embeds" in call_parameters(pipeline)
    convert = getattr(pipeline, "maybe_convert_prompt", _unchanged)
    for number in ("", "_2"):
        encoder = getattr(pipeline, f"text_encoder{number}", None)
        if encoder is not None:
            layer = _Layer(encoder, clip_skip, is_xl=is_xl)
            yield PromptEncoder(getattr(pipeline, f"tokenizer{number}"), encoder, layer, convert)


def _unchanged(text: str, _tokenizer: Any) -> str:
    return text


class PromptEncoder:
    """A text encoder with its tokenizer. `convert` replaces learned tokens of several vectors in a text."""

    def __init__(
        self, tokenizer: CachedTokenizer, encoder: Any, layer: _Layer, convert: Callable[[str, Any], str]
    ) -> None:
        provider_class: Any = import_module(_LIBRARY).EmbeddingsProvider
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._convert = convert
        self._provider = provider_class(tokenizer, layer, truncate=False, device=layer.device)
        self.dtype: torch.dtype = encoder.dtype

    def read(self, prompt: str) -> PromptChunks:
        """Return the chunks of a prompt: cached, as each image of a job reads it."""
        read: PromptChunks | None = self._tokenizer.prompts.get(prompt)
        if read is None:
            chunks = self._chunks(parse_prompt(prompt))
            left_out = [token.id for chunk in chunks[MOST_CHUNKS:][:SHOWN_CHUNKS] for token in chunk]
            read = PromptChunks(chunks[:MOST_CHUNKS], str(self._tokenizer.decode(left_out)) if left_out else "")
            self._tokenizer.prompts[prompt] = read
        return read

    def _chunks(self, parts: Iterable[Sequence[Fragment]]) -> list[Chunk]:
        """Return the chunks of a prompt, of a longer one those that are read or shown: more would take seconds."""
        most = self._tokenizer.model_max_length - 2  # beside the marks of its start and its end
        chunks: list[Chunk] = []
        for part in parts:
            tokens: list[Token] = []
            for start in range(0, len(part), _FRAGMENTS_AT_ONCE):
                if len(tokens) > (MOST_CHUNKS + SHOWN_CHUNKS) * most:
                    break
                tokens += self._tokens(part[start : start + _FRAGMENTS_AT_ONCE])
            chunks += divide(tokens, most, self._ends_word)
            if len(chunks) > MOST_CHUNKS + SHOWN_CHUNKS:
                break
        return chunks

    def _tokens(self, part: Sequence[Fragment]) -> list[Token]:
        part = [fragment for fragment in part if fragment.text.strip()]  # the others have no tokens
        if not part:
            return []
        texts = [self._convert(fragment.text, self._tokenizer) for fragment in part]
        ids = self._provider.get_token_ids(texts, include_start_and_end_markers=False)
        return [Token(one, fragment.weight) for fragment, some in zip(part, ids, strict=True) for one in some]

    def _ends_word(self, token: Token) -> bool:
        return str(self._tokenizer.convert_ids_to_tokens(token.id)).endswith("</w>")

    def states(self, chunks: Sequence[Chunk], count: int) -> torch.Tensor:
        """Return the weighted states of `chunks`, and of empty ones up to `count`: [1, tokens, width]."""
        marked = [token for chunk in (*chunks, *[()] * (count - len(chunks))) for token in self._marked(chunk)]
        ids = torch.tensor([token.id for token in marked])
        weights = torch.tensor([token.weight for token in marked])
        states: torch.Tensor = self._provider.build_weighted_embedding_tensor(ids, weights)
        return states

    def pooled(self, chunk: Chunk) -> torch.Tensor:
        """Return the encoder's output for the whole of one chunk, which has no weights: [1, width]."""
        ids = torch.tensor([[token.id for token in self._marked(chunk)]])
        pooled: torch.Tensor = self._encoder(ids.to(self._encoder.device), output_hidden_states=True)[0]
        return pooled

    def _marked(self, chunk: Chunk) -> list[Token]:
        """Return a chunk with its marks, padded to the length that the encoder reads."""
        own = self._tokenizer
        marked = [Token(own.bos_token_id, 1.0), *chunk, Token(own.eos_token_id, 1.0)]
        return marked + [Token(own.pad_token_id, 1.0)] * (own.model_max_length - len(marked))


class _Layer:
    """What compel calls as a text encoder: it calls the shared one as diffusers' pipelines do, for the same layer."""

    def __init__(self, encoder: Any, clip_skip: int | None, *, is_xl: bool) -> None:
        self._encoder, self._skip, self._is_xl = encoder, clip_skip, is_xl
        self.device: torch.device = encoder.device

    def __call__(self, token_ids: torch.Tensor, _mask: None, **_options: Any) -> Any:
        ids = token_ids.to(self.device, torch.long)
        if self._is_xl:
            states = self._encoder(ids, output_hidden_states=True).hidden_states[-2 - (self._skip or 0)]
        elif self._skip is None:
            states = self._encoder(ids, attention_mask=None)[0]
        else:
            output = self._encoder(ids, attention_mask=None, output_hidden_states=True)
            states = self._encoder.text_model.final_layer_norm(output.hidden_states[-1 - self._skip])
        return SimpleNamespace(last_hidden_state=states)


def divide(tokens: Sequence[Token], most: int, ends_word: Callable[[Token], bool]) -> list[Chunk]:
    """Divide tokens into chunks of at most `most`, at least one; between words, unless one is longer than a chunk."""
    chunks: list[Chunk] = []
    start = 0
    while len(tokens) - start > most:
        ends = (at + 1 for at in range(start + most - 1, start - 1, -1) if ends_word(tokens[at]))
        end = next(ends, start + most)
        chunks.append(tokens[start:end])
        start = end
    return [*chunks, tokens[start:]]
