"""Uploads of LoHa, LoKr and DoRA are accepted if their tensors fit each other; else the first one is named."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tiny.safetensors_file import file_of

from shared.errors import AdapterRejected
from shared.inputs.adapter_check import check_file, check_layers, unusual_weights
from shared.inputs.formats.safetensors import TensorEntry

Shapes = Mapping[str, Sequence[int]]

LOHA = {"hada_w1_a": (4, 2), "hada_w1_b": (2, 6), "hada_w2_a": (4, 3), "hada_w2_b": (3, 6)}
CORE = {"hada_w1_a": (2, 4), "hada_w1_b": (2, 6), "hada_t1": (2, 2, 3, 3)}
LOHA_CORES = {**CORE, **{name.replace("1", "2", 1): shape for name, shape in CORE.items()}}
LOKR = {"lokr_w1": (2, 3), "lokr_w2": (2, 2)}
LOKR_HALVES = {"lokr_w1_a": (2, 1), "lokr_w1_b": (1, 3), "lokr_w2_a": (2, 1), "lokr_w2_b": (1, 2)}
LOKR_CORE = {"lokr_w1": (2, 3), "lokr_w2_a": (1, 2), "lokr_w2_b": (1, 2), "lokr_t2": (1, 1, 3, 3)}
LORA = {"lora_down.weight": (2, 6), "lora_up.weight": (4, 2)}
FORMS: dict[str, Shapes] = {
    "loha": LOHA,
    "loha-cores": LOHA_CORES,
    "lokr": LOKR,
    "lokr-halves": LOKR_HALVES,
    "lokr-core": LOKR_CORE,
    "lokr-convolution": {"lokr_w1": (2, 3), "lokr_w2": (2, 2, 3, 3)},
}


LOCON_CORE = {"lora_down.weight": (2, 6, 1, 1), "lora_up.weight": (4, 2, 1, 1), "lora_mid.weight": (2, 2, 3, 3)}


def check(shapes: Shapes, layer: str = "lora_unet_x", value: float = 0.5) -> Sequence[TensorEntry]:
    tensors = {f"{layer}.{part}": (list(shape), [value] * math.prod(shape)) for part, shape in shapes.items()}
    data = file_of(tensors)
    return check_file(io.BytesIO(data), len(data))[1]


@pytest.mark.parametrize("norms", [{}, {"dora_scale": (4, 1)}, {"dora_scale": (1, 6)}])
@pytest.mark.parametrize("layer", ["lora_unet_x", "transformer.x.0", "base_model.model.x", "lycoris_x"])
@pytest.mark.parametrize("form", ["loha", "lokr", "lokr-halves"])
def test_layers_of_lycoris_are_accepted(form: str, layer: str, norms: Shapes) -> None:
    assert unusual_weights(check({**FORMS[form], "alpha": (1,), **norms}, layer)) is None


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_their_tensors_are_accepted(form: str) -> None:
    assert unusual_weights(check(FORMS[form])) is None


@pytest.mark.parametrize(
    "norms",
    [{"dora_scale": (4, 1)}, {"dora_scale": (1, 6)}, {"lora_magnitude_vector": (4,)}, {"dora_scale": (4, 1, 1, 1)}],
)
def test_norms_of_lora_matrices_are_accepted(norms: Shapes) -> None:
    assert unusual_weights(check({**LORA, **norms})) is None


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({**LOHA, "hada_w1_b": (3, 6)}, r"lora_unet_x\.hada_w1_b has rank 3, but hada_w1_a has 2"),
        ({**LOHA, "hada_w2_b": (3, 5)}, r"lora_unet_x\.hada_w1_a and _b make \[4, 6\], but hada_w2_a and _b \[4, 5\]"),
        ({name: LOHA[name] for name in LOHA if name != "hada_w2_b"}, r"lora_unet_x\.hada_w2_b is missing"),
        ({**LOHA, "hada_w1_a": (4,)}, r"lora_unet_x\.hada_w1_a is no matrix"),
        ({**LOHA_CORES, "hada_t1": (2, 3, 3, 3)}, r"lora_unet_x\.hada_t1 is \[2, 3, 3, 3\]"),
        ({name: LOHA_CORES[name] for name in LOHA_CORES if name != "hada_t2"}, r"lora_unet_x\.hada_t2 is missing"),
        ({**LOHA, "hada_w1_a": (4, 129), "hada_w1_b": (129, 6)}, "lora_unet_x has rank 129; at most 128"),
        ({**LOKR_HALVES, "lokr_w2_a": (2, 513), "lokr_w2_b": (513, 2)}, "lora_unet_x has rank 513; at most 512"),
        ({"lokr_w1": (2, 3)}, r"lora_unet_x\.lokr_w2_a is missing"),
        ({**LOKR, "lokr_w1": (2,)}, r"lora_unet_x\.lokr_w1 is no matrix"),
        ({**LOKR_HALVES, "lokr_w2_b": (2, 2)}, r"lora_unet_x\.lokr_w2_b has rank 2, but lokr_w2_a has 1"),
        ({**LOKR_CORE, "lokr_t2": (1, 1)}, r"lora_unet_x\.lokr_t2 is \[1, 1\]"),
        ({**LOKR, "lokr_w1_a": (2, 9)}, r"lora_unet_x\.lokr_w1_a is beside lokr_w1, which is all of its matrix"),
        ({**LOKR, "lokr_w2_b": (2, 9)}, r"lora_unet_x\.lokr_w2_b is beside lokr_w2"),
        ({**LOKR, "lokr_t2": (1, 1, 3, 3)}, r"lora_unet_x\.lokr_t2 is beside lokr_w2"),
        ({**LOKR, "alpha": (4,)}, r"lora_unet_x\.alpha is \[4\], but an alpha is one number"),
        ({**LORA, "alpha": (1, 2)}, r"lora_unet_x\.alpha is \[1, 2\], but an alpha is one number"),
        ({**LOKR, **LOHA}, "lora_unet_x has weights of both LoHa and LoKr"),
        ({**LORA, "dora_scale": (3, 1)}, r"lora_unet_x\.dora_scale is \[3, 1\], but its layer has 4 outputs"),
        ({**LORA, "dora_scale": (1, 5)}, r"lora_unet_x\.dora_scale is \[1, 5\]"),
        ({**LOKR, "dora_scale": (5, 1)}, r"lora_unet_x\.dora_scale is \[5, 1\]"),
        ({**LORA, "lora_magnitude_vector": (6,)}, r"lora_unet_x\.lora_magnitude_vector is \[6\]"),
        ({"dora_scale": (4, 1)}, r"lora_unet_x\.dora_scale has no weights that it is for"),
        ({**LORA, "oft_blocks": (2, 2, 2)}, "oft_blocks are not supported: OFT and BOFT rotate the outputs"),
        ({**LORA, "lora_embedding_A": (2, 2)}, "lora_embedding_A are not supported: a LoRA of embeddings"),
    ],
)
def test_tensors_that_do_not_fit_are_named(shapes: Shapes, reason: str) -> None:
    with pytest.raises(AdapterRejected, match=reason):
        check(shapes)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"lokr_w1": (600, 1), "lokr_w2": (600, 1)}, r"the product of lora_unet_x is \[360000, 1\]; at most"),
        ({"lokr_w1": (1, 2100), "lokr_w2": (1, 2100)}, r"the product of lora_unet_x is \[1, 4410000\]; at most"),
        ({**LOKR_CORE, "lokr_t2": (1, 1, 300, 300)}, r"lora_unet_x\.lokr_t2 has a kernel of \[300, 300\]; at most 49"),
        ({**LOHA_CORES, "hada_t1": (2, 2, 50, 1)}, r"lora_unet_x\.hada_t1 has a kernel of \[50, 1\]"),
        ({**LOCON_CORE, "lora_mid.weight": (2, 2, 8, 7)}, r"lora_unet_x\.lora_mid\.weight has a kernel of \[8, 7\]"),
        ({**LOCON_CORE, "lora_mid.weight": (2, 2)}, r"lora_unet_x\.lora_mid\.weight is \[2, 2\]"),
        (
            {**LOCON_CORE, "lora_down.weight": (1, 6), "lora_mid.weight": (2, 1, 3, 3)},
            r"lora_unet_x\.lora_mid\.weight is \[2, 1, 3, 3\], but lora_up and lora_down have the ranks \[2, 1\]",
        ),
        ({**LOKR, "lora_mid.weight": (2, 2, 3, 3)}, r"lora_mid\.weight has no lora_down and lora_up"),
        (
            {**LOCON_CORE, "lora_down.weight": (2, 90_000), "lora_mid.weight": (2, 2, 7, 7)},
            r"lora_unet_x\.lora_mid\.weight makes a lora_down with 4410000 columns",
        ),
    ],
)
def test_small_tensors_of_large_products_are_refused(shapes: Shapes, reason: str) -> None:
    with pytest.raises(AdapterRejected, match=reason):
        check(shapes)


@pytest.mark.parametrize(
    "shapes",
    [
        {"hada_w1_a": (96, 32), "hada_w1_b": (32, 96), "hada_w2_a": (96, 32), "hada_w2_b": (32, 96)},
        {"hada_w1_a": (96, 128), "hada_w1_b": (128, 96), "hada_w2_a": (96, 1), "hada_w2_b": (1, 96)},
        {"lokr_w1": (8, 8), "lokr_w2": (640, 160)},
        {"lokr_w1": (16, 16), "lokr_w2_a": (80, 512), "lokr_w2_b": (512, 80)},
    ],
)
def test_ranks_and_factors_that_trainers_use_are_accepted(shapes: Shapes) -> None:
    check(shapes)


def test_a_core_of_lora_matrices_is_accepted() -> None:
    assert unusual_weights(check(LOCON_CORE)) is None


def test_all_products_of_a_file_together_are_bounded() -> None:
    """Each has the most outputs that one may have, of 1,024 numbers in the file."""
    layers = {f"x{number}.{part}": (512, 1) for number in range(129) for part in ("lokr_w1", "lokr_w2")}
    with pytest.raises(AdapterRejected, match=r"the products up to lora_unet\.x128 have 33816576 outputs in all"):
        check(layers, "lora_unet")


@pytest.mark.parametrize("form", FORMS)
def test_values_that_are_not_finite_are_named(form: str) -> None:
    with pytest.raises(AdapterRejected, match=r"lora_unet_x\.(hada_|lokr_)\w+ has values that are not finite"):
        check(FORMS[form], value=math.nan)


@pytest.mark.parametrize(
    ("layer", "shapes", "reason"),
    [
        ("unet.x", LOKR, None),
        ("unet.x", FORMS["lokr-convolution"], None),
        ("lora_unet_z", LOKR, None),
        ("unet.z", LOHA, r"it changes unet\.z, which the model does not have"),
        ("unet.x", {**LOKR, "lokr_w1": (1, 3)}, r"the product of unet\.x has 2 outputs and 6 inputs, but the layer"),
        ("unet.x", {"lokr_w1": (2, 3), "lokr_w2": (2, 200)}, "has 4 outputs and 600 inputs, but the layer of the"),
        ("unet.x", {**LOKR, "lokr_w1": (2, 2)}, "has 4 outputs and 4 inputs, but the layer of the model 4 and 6"),
    ],
)
def test_products_by_known_names_are_compared_with_the_layers(layer: str, shapes: Any, reason: str | None) -> None:
    tensors = check(shapes, layer)
    if reason is None:
        check_layers(tensors, {"unet.x": (6, 4)}, None)
    else:
        with pytest.raises(AdapterRejected, match=reason):
            check_layers(tensors, {"unet.x": (6, 4)}, None)
