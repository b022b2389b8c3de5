"""Uploaded adapters: files of LoRA weights are accepted, everything else is refused with its reason."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny.safetensors_file import demo_lora, file_of, raw_file

from shared.errors import AdapterRejected
from shared.inputs.adapter_check import MAX_RANK, check_file, check_layers, unusual_weights
from shared.inputs.formats.safetensors import MAX_TENSORS

A, B = "unet.x.lora_A.weight", "unet.x.lora_B.weight"
GOOD = {A: ([1, 2], [1, 2]), B: ([2, 1], [1, 2])}


def entry(start: int, end: int, dtype: Any = "F32", shape: Any = (1, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def check(data: bytes) -> None:
    check_file(io.BytesIO(data), len(data))


def test_the_file_of_a_lora_is_accepted() -> None:
    data = demo_lora(1)
    digest, tensors = check_file(io.BytesIO(data), len(data))
    assert digest == hashlib.sha256(data).hexdigest()
    assert len(tensors) == 6


@pytest.mark.parametrize(
    "name",
    [
        "unet.x.lora_{}.weight",
        "lora_unet_x.lora_{}.weight",
        "unet.x.lora.{}.weight",
        "double_blocks.0.processor.proj_lora1.{}.weight",
        "single_blocks.0.processor.qkv_lora.{}.weight",
        "base_model.model.x.lora_{}.weight",
    ],
)
def test_the_names_of_trainers_are_accepted(name: str) -> None:
    halves = ("A", "B") if name.startswith(("unet.x.lora_", "base_model")) else ("down", "up")
    data = file_of(dict(zip((name.format(half) for half in halves), GOOD.values(), strict=True)))
    _, tensors = check_file(io.BytesIO(data), len(data))
    assert unusual_weights(tensors) is None


@pytest.mark.parametrize("name", ["blocks.0.norm3.diff", "head.head.diff_b", "blocks.0.diff_m"])
def test_weights_that_may_have_no_effect_are_named(name: str) -> None:
    data = file_of({**GOOD, name: ([2], [1, 2])})
    _, tensors = check_file(io.BytesIO(data), len(data))
    assert name in (unusual_weights(tensors) or "")


@pytest.mark.parametrize(("dtype", "size"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_types_of_weights_and_notes_are_accepted(dtype: str, size: int) -> None:
    """Alphas can be whole numbers, and trainers add notes."""
    header = {
        "__metadata__": {"ss_network_dim": "8"},
        A: entry(0, 2 * size, dtype),
        B: entry(2 * size, 4 * size, dtype, (2, 1)),
        "unet.x.alpha": entry(4 * size, 4 * size + 8, "I64", ()),
    }
    check(raw_file(header, bytes(4 * size + 8)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no safetensors file"),
        (b"PK\x03\x04 a zip, as torch.save writes", "but a pickle .* which can run code when it is read"),
        (b"\x80\x02}q\x00(X\x10\x00\x00\x00 as older files", "but a pickle"),
        (struct.pack("<Q", 1 << 62) + b"{}", "no safetensors file"),
        (struct.pack("<Q", 5 << 20) + b"{" + bytes(5 << 20), "header is above"),
        (file_of(GOOD)[:-1], "it is incomplete"),
        (file_of(GOOD)[:60], "no safetensors file"),
        (file_of(GOOD) + b"\0", "incomplete or has more"),
        (raw_file(b"[]", b""), "no JSON object"),
        (raw_file(b"{nonsense}", b""), "not valid JSON"),
        (raw_file(b'{"a":' + b"[" * 200_000, b""), "JSON|nested"),
        (raw_file(b'{"a": ' + b"9" * 10_000 + b"}", b""), "not valid JSON"),
        (raw_file(b'{"a": 1, "a": 1}', b""), "a name twice"),
        (raw_file(b'{"\xff": 1}', b""), "not valid JSON"),
        (raw_file({}, b""), "0 tensors"),
        (raw_file({f"a{at}": {} for at in range(MAX_TENSORS + 1)}, b""), f"1 to {MAX_TENSORS}"),
        (raw_file({"__metadata__": {"a": 1}, A: entry(0, 8)}, bytes(8)), "are not texts"),
        (raw_file({A: entry(0, 8), B: entry(4, 12)}, bytes(12)), "overlap"),
        (raw_file({A: entry(0, 8), B: entry(0, 8)}, bytes(8)), "overlap"),
        (raw_file({A: entry(0, 8), B: entry(16, 24)}, bytes(24)), "leave a gap"),
        (raw_file({A: entry(8, 0)}, bytes(8)), "do not fit its shape"),
        (raw_file({A: entry(0, 8, shape=(1, 3))}, bytes(8)), "do not fit its shape"),
        (raw_file({A: entry(0, 0, shape=(0, 2))}, b""), "are invalid"),
        (raw_file({A: entry(-8, 0)}, b""), "are invalid"),
        (raw_file({A: entry(0, 8, shape=(True, 2))}, bytes(8)), "are invalid"),
        (raw_file({A: entry(0, 8, shape=(1 << 62, 1 << 62))}, bytes(8)), "are invalid"),
        (raw_file({A: entry(0, 8, shape=(1, 1, 1, 1, 1, 2))}, bytes(8)), "are invalid"),
        (raw_file({A: {**entry(0, 8), "more": 1}}, bytes(8)), "does not have dtype"),
        (raw_file({A: [0, 8]}, bytes(8)), "does not have dtype"),
        (raw_file({A: entry(0, 16, "F64")}, bytes(16)), "F64; use F32, F16, BF16"),
        (raw_file({A: entry(0, 2, "F8_E4M3")}, bytes(2)), "F8_E4M3; use"),
        (raw_file({A: entry(0, 8, ["F32"])}, bytes(8)), "use F32"),
        (raw_file({A: entry(0, 16, "I64")}, bytes(16)), "I64; use"),
        (raw_file({"../../etc/passwd": entry(0, 8)}, bytes(8)), "no name of a weight"),
        (raw_file({"a..b": entry(0, 8)}, bytes(8)), "no name of a weight"),
        (raw_file({"": entry(0, 8)}, bytes(8)), "no name of a weight"),
        (raw_file({"a" * 513: entry(0, 8)}, bytes(8)), "no name of a weight"),
        (file_of({"unet.conv.weight": ([1], [1])}), "no LoRA weights, and no embedding"),
        (file_of({"emb_params": ([76, 1], [0] * 76)}), "76 vectors; at most 75"),
        (file_of({"emb_params": ([1, 2], [1, math.nan])}), "emb_params has values that are not finite"),
        (file_of({**GOOD, "emb_params": ([1], [1])}), "an embedding is one tensor"),
        (file_of({A: ([1], [1])}), "is no matrix"),
        (file_of({A: ([MAX_RANK + 1, 1], [0] * (MAX_RANK + 1))}), f"at most {MAX_RANK}"),
        (file_of({B: ([1, MAX_RANK + 1], [0] * (MAX_RANK + 1))}), f"at most {MAX_RANK}"),
        (file_of({**GOOD, A: ([1, 2], [1, math.nan])}), "not finite"),
        (file_of({**GOOD, A: ([1, 2], [-math.inf, 1])}), "not finite"),
        (raw_file({A: entry(0, 4, "F16")}, struct.pack("<ee", 1, math.nan)), "not finite"),
        (raw_file({A: entry(0, 4, "BF16")}, struct.pack("<HH", 0x3F80, 0x7FC0)), "not finite"),
    ],
)
def test_other_files_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(AdapterRejected, match=reason) as refused:
        check(data)
    assert refused.value.param == "file"
    assert len(refused.value.message) < 700


LAYERS = {"unet.x": (2, 2), "transformer_2.y": (4, 2)}
CLIP = {**LAYERS, "embeddings.": (0, 0), "embeddings.text_encoder": (49408, 2)}


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (CLIP, None),
        ({}, None),
        (LAYERS, None),  # of a worker that does not know embeddings
        ({**LAYERS, "embeddings.": (0, 0)}, "the model takes none"),
        ({**CLIP, "embeddings.text_encoder": (49408, 3)}, "text_encoder of the model takes 3"),
        ({**CLIP, "embeddings.text_encoder_2": (49408, 2)}, "needs clip_l and clip_g"),
    ],
)
@pytest.mark.parametrize("name", ["emb_params", "<cat>", "кот"])
def test_an_embedding_is_compared_with_the_text_encoders(name: str, layers: dict[str, Any], reason: str | None) -> None:
    data = file_of({name: ([3, 2], [1.0] * 6)})
    _, entries = check_file(io.BytesIO(data), len(data))
    assert unusual_weights(entries) is None
    with contextlib.nullcontext() if reason is None else pytest.raises(AdapterRejected, match=reason):
        check_layers(entries, layers, None)


@pytest.mark.parametrize(
    ("tensors", "component", "reason"),
    [
        (GOOD, None, None),
        ({"unet.z.lora_A.weight": ([1, 2], [1, 2])}, None, "unet.z, which the model does not have"),
        ({A: ([1, 3], [1, 2, 3])}, None, "has 3 inputs, but the layer of the model has 2"),
        ({B: ([3, 1], [1, 2, 3])}, None, "has 3 outputs, but the layer of the model has 2"),
        ({"unet.y.lora_A.weight": ([1, 4], [1, 2, 3, 4])}, "transformer_2", None),
        ({"unet.y.lora_A.weight": ([1, 2], [1, 2])}, "transformer_2", "has 2 inputs"),
        ({"lora_unet_z.lora_down.weight": ([1, 3], [1, 2, 3])}, None, None),
        ({"text_encoder.z.lora_A.weight": ([1, 3], [1, 2, 3])}, None, None),
    ],
)
def test_weights_by_known_names_are_compared_with_the_layers(
    tensors: dict[str, Any], component: str | None, reason: str | None
) -> None:
    """Other names are left to the worker; so is everything if no worker has loaded the model."""
    data = file_of(tensors)
    _, entries = check_file(io.BytesIO(data), len(data))
    check_layers(entries, {}, component)
    with contextlib.nullcontext() if reason is None else pytest.raises(AdapterRejected, match=reason):
        check_layers(entries, LAYERS, component)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_file_is_accepted_or_refused(data: st.DataObject) -> None:
    """No damage makes the check fail in another way."""
    damaged = bytearray(demo_lora(1)[:2_000])
    length = int.from_bytes(damaged[:8], "little")
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, min(length + 8, len(damaged)) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(AdapterRejected):
        check(bytes(damaged))


VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=8), st.lists, max_leaves=4)


@settings(max_examples=100)
@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_any_header_is_refused_with_a_reason(header: dict[str, Any]) -> None:
    with pytest.raises(AdapterRejected):
        check(raw_file(json.dumps(header).encode(), b""))
