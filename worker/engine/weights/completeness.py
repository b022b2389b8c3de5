"""Checks that a model folder is complete: components, weights, and vocabularies.

Libraries load an incomplete one, with random weights or with a tokenizer that knows no words, or fail without naming
what is missing.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import PreTrainedTokenizerBase, modeling_utils

REMEDY = "copy or download the whole model again"
# Of as many words and letters: a tokenizer without words can still count them.
TEXTS = ("a red cat", "a big dog", "a new bus")
NAMED_TENSORS = 3
UNUSED_BY_ENCODERS = "lm_head."  # folders of text encoders omit the head of the language model that they were


def check_folder(folder: Path, index: Mapping[str, Any], unwanted: Mapping[str, None]) -> None:
    """Raise `ValueError` if a component of `index`, a model_index.json, that is not `unwanted` has no folder."""
    for name, entry in index.items():
        is_component = isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)
        if is_component and name not in unwanted and not (folder / name).is_dir() and not _makes_own(index, name):
            raise ValueError(f"it has no folder {name}, which model_index.json lists; {REMEDY}")


def _makes_own(index: Mapping[str, Any], name: str) -> bool:
    """Return whether a pipeline makes its noise scheduler: diffusers then saves none, as of LongCat-AudioDiT."""
    pipeline_class = getattr(diffusers, str(index.get("_class_name")), None)
    if name != "scheduler" or pipeline_class is None:
        return False
    parameter = inspect.signature(pipeline_class.__init__).parameters.get(name)
    return parameter is not None and parameter.default is None


@contextmanager
def all_weights_found() -> Iterator[None]:
    """Raise `ValueError` at the end if transformers loaded a model with random weights for want of others.

    It reports them only to its log. One thread at a time, as its report is replaced.
    """
    missing: dict[str, set[str]] = {}
    library: Any = modeling_utils
    report = library.log_state_dict_report

    def collect(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        info = kwargs.get("loading_info")
        names = {name for name in getattr(info, "missing_keys", ()) if not name.startswith(UNUSED_BY_ENCODERS)}
        if names:
            missing[type(model).__name__] = names
        report(model, *args, **kwargs)

    library.log_state_dict_report = collect
    try:
        yield
    finally:
        library.log_state_dict_report = report
    for name, tensors in missing.items():
        raise ValueError(_lacks(name, tensors))


def check_weights(pipeline: Any) -> None:
    """Raise `ValueError` if a tensor of a component has no values: diffusers leaves those that no file has empty."""
    for name, part in pipeline.components.items():
        if isinstance(part, torch.nn.Module):
            check_tensors(name, part)


def check_tensors(name: str, part: torch.nn.Module) -> None:
    """Raise `ValueError` if a tensor of a module has no values."""
    empty = {key for key, value in (*part.named_parameters(), *part.named_buffers()) if value.is_meta}
    if empty:
        raise ValueError(_lacks(name, empty))


def _lacks(name: str, tensors: set[str]) -> str:
    named = ", ".join(sorted(tensors)[:NAMED_TENSORS])
    rest = len(tensors) - NAMED_TENSORS
    return f"{name} has no weights for {named}{f' and {rest} more tensors' if rest > 0 else ''}; {REMEDY}"


def check_tokenizers(pipeline: Any) -> None:
    """Raise `ValueError` if a tokenizer gives all `TEXTS` the same tokens, as one without its vocabulary does."""
    for name, component in pipeline.components.items():
        tokenizer = getattr(component, "tokenizer", component)  # of a processor
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            first, *others = (list(tokenizer(text)["input_ids"]) for text in TEXTS)
            if all(other == first for other in others):
                raise ValueError(f"{name} gives different texts the same tokens: its vocabulary is missing; {REMEDY}")
