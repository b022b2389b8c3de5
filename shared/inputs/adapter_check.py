"""Checks an uploaded adapter without torch: a safetensors file of finite LoRA weights or embeddings, within bounds.

What workers read later is exactly what was checked.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

from shared.errors import AdapterRejected
from shared.inputs.embedding_check import WIDTHS, check_vectors, is_embedding, tensors_of
from shared.inputs.formats import FormatFault
from shared.inputs.formats.safetensors import TensorEntry, header_length, is_finite, read_header
from shared.inputs.lycoris_shapes import MAGNITUDE, MAX_KERNEL, PART, Size, check_norms, core_sizes, product_sizes

MAX_HEADER_BYTES = 4 * 1024 * 1024
"""The header of a large adapter of SDXL has 0.4 MB; trainers add up to 1 MB of notes. It takes 60 ms to decode."""

MAX_RANK = 512
"""Rows of a forward share its time, and an adapter costs time by its rank."""

MAX_LOHA_RANK = 128
"""A LoHa's weights are computed in each forward, which takes as long as tokens by the sum of its two ranks."""

_UNSUPPORTED = {
    "oft_": "OFT and BOFT rotate the outputs of layers, and rows take additions only",
    "lora_embedding": "a LoRA of embeddings changes the table of tokens, which has no rows",
}
"""Parts of names of weights that cannot be applied, and why."""

_DOWN = re.compile(r"lora_A|lora_down|lora[12]?\.down|lora_linear_layer\.down")
_UP = re.compile(r"lora_B|lora_up|lora[12]?\.up|lora_linear_layer\.up")
_USUAL = re.compile(rf"(?:{_DOWN.pattern}|{_UP.pattern}|lora_mid).*\.(?:weight|bias)$|\.alpha$")
_PEFT_NAME = re.compile(r"([a-z][a-z0-9_]*)\.(.+)\.lora_([AB])\.weight")
_PEFT_LAYER = re.compile(r"([a-z][a-z0-9_]*)\.(.+)")
_PICKLES = (b"PK\x03\x04", b"\x80")
_READ_BYTES = 1024 * 1024


def check_file(file: BinaryIO, size: int) -> tuple[str, Sequence[TensorEntry]]:
    """Return the SHA-256 and the tensors of a file of `size` bytes, or raise `AdapterRejected`."""
    file.seek(0)
    head = file.read(8)
    if head.startswith(_PICKLES) and int.from_bytes(head, "little") > MAX_HEADER_BYTES:
        _refuse("it is no safetensors file but a pickle (.pt, .bin), which can run code when it is read; convert it")
    try:
        header = file.read(header_length(head, size, MAX_HEADER_BYTES))
        tensors = read_header(header, size - 8 - len(header))
    except FormatFault as fault:
        _refuse(str(fault))
    _check_weights(tensors)
    digest = hashlib.sha256(head + header)
    for tensor in tensors:
        for data in _pieces(file, tensor):
            digest.update(data)
            if not is_finite(data, tensor.dtype):
                _refuse(f"{tensor.name} has values that are not finite")
    return digest.hexdigest(), tensors


def unsupported_format(names: Iterable[str]) -> str | None:
    """Return why weights of some of these names cannot be applied, None if all can."""
    for name in sorted(names):
        for part, reason in _UNSUPPORTED.items():
            if part in name:
                return f"weights such as {name} are not supported: {reason}"
    return None


def _check_weights(tensors: Sequence[TensorEntry]) -> None:
    """Raise `AdapterRejected` for weights that cannot be applied."""
    shapes = shapes_of(tensors)
    if is_embedding(shapes):
        return _refused_if_invalid(check_vectors, shapes)
    if (refusal := unsupported_format(shapes)) is not None:
        _refuse(refusal)
    found = bool(_check_products(tensors))
    for tensor in tensors:
        if tensor.name.endswith(".alpha") and math.prod(tensor.shape) != 1:
            _refuse(f"{tensor.name} is {list(tensor.shape)}, but an alpha is one number")
        rank_at = 0 if _DOWN.search(tensor.name) else 1 if _UP.search(tensor.name) else None
        if rank_at is None or not tensor.name.endswith(".weight"):
            continue
        if len(tensor.shape) < 2:
            _refuse(f"{tensor.name} is no matrix")
        if tensor.shape[rank_at] > MAX_RANK:
            _refuse(f"{tensor.name} has rank {tensor.shape[rank_at]}; at most {MAX_RANK} is allowed")
        found = True
    if not found:
        _refuse("it holds no LoRA weights, and no embedding (emb_params, clip_l and clip_g, or its word)")
    return None


def _check_products(tensors: Sequence[TensorEntry]) -> dict[str, Size]:
    """Return the sizes of the layers of LoHa and LoKr; raises `AdapterRejected` for tensors that do not fit."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    try:
        core_sizes(shapes)
        sizes = product_sizes(shapes)
        check_norms(shapes, sizes)
    except ValueError as error:
        _refuse(str(error))
    for layer, size in sizes.items():
        most = MAX_LOHA_RANK if size.is_loha else MAX_RANK
        if size.rank > most:
            _refuse(f"{layer} has rank {size.rank}; at most {most} is allowed")
    return sizes


def unusual_weights(tensors: Sequence[TensorEntry]) -> str | None:
    """Return a warning about weights that are no part of an update; None: there are none.

    Which of them have an effect depends on the model: a worker that reads the file names those that it leaves out.
    """
    if is_embedding(shapes_of(tensors)):
        return None
    names = sorted(tensor.name for tensor in tensors if not _is_usual(tensor.name))
    if not names:
        return None
    return (
        f"{len(names)} weights, such as {names[0]}, are no weights of an adapter; a job names those that have no effect"
    )


def _is_usual(name: str) -> bool:
    return any((_USUAL.search(name), PART.fullmatch(name), MAGNITUDE.fullmatch(name)))


def check_layers(tensors: Sequence[TensorEntry], layers: Mapping[str, Sequence[int]], component: str | None) -> None:
    """Raise `AdapterRejected` for the first weight by PEFT's names whose layer the model lacks, or of another shape.

    `layers` are inputs and outputs by path, empty if they are not known; `component` replaces that of the names.
    Weights by other names are left to the worker, which converts them. The vectors of an embedding must be those of the
    model's text encoders.
    """
    shapes = shapes_of(tensors)
    if is_embedding(shapes):
        if WIDTHS not in layers:  # they are not known, or of a worker of an earlier version
            return None
        widths = {path[len(WIDTHS) :]: size[1] for path, size in layers.items() if path.startswith(WIDTHS)}
        del widths[""]
        if not widths:
            _refuse("it is an embedding, and the model takes none: diffusers loads them into CLIP text encoders only")
        return _refused_if_invalid(tensors_of, shapes, widths)
    components = {path.partition(".")[0] for path in layers}
    for tensor in tensors:
        match = _PEFT_NAME.fullmatch(tensor.name)
        if match is None or match[1] not in components:
            continue
        path = _known_path(match[1], match[2], layers, component)
        at, what = (0, "inputs") if match[3] == "A" else (1, "outputs")
        found = tensor.shape[1 - at]
        if found != layers[path][at]:
            _refuse(f"{tensor.name} has {found} {what}, but the layer of the model has {layers[path][at]}")
    for layer, size in _check_products(tensors).items():
        match = _PEFT_LAYER.fullmatch(layer)
        if match is None or match[1] not in components:
            continue
        inputs, outputs = layers[_known_path(match[1], match[2], layers, component)]
        kernel, rest = divmod(size.columns, inputs)
        if size.outputs != outputs or rest or kernel > MAX_KERNEL:
            has = f"{size.outputs} outputs and {size.columns} inputs"
            _refuse(f"the product of {layer} has {has}, but the layer of the model {outputs} and {inputs}")
    return None


def _known_path(named: str, path: str, layers: Mapping[str, Sequence[int]], component: str | None) -> str:
    whole = f"{component or named}.{path}"
    if whole not in layers:
        _refuse(f"it changes {whole}, which the model does not have")
    return whole


def shapes_of(tensors: Sequence[TensorEntry]) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in tensors}


def _refused_if_invalid(check: Callable[..., object], *arguments: Any) -> None:
    """Run a check that raises `ValueError`, and raise `AdapterRejected` instead."""
    try:
        check(*arguments)
    except ValueError as error:
        _refuse(str(error))


def _pieces(file: BinaryIO, tensor: TensorEntry) -> Iterator[bytes]:
    for start in itertools.count(tensor.start, _READ_BYTES):
        if start >= tensor.end:
            return
        wanted = min(_READ_BYTES, tensor.end - start)
        data = file.read(wanted)
        if len(data) != wanted:
            _refuse("it is incomplete")
        yield data


def _refuse(reason: str) -> NoReturn:
    raise AdapterRejected(f"file: {reason}", param="file")
