"""Adapters of a request, and the mixed fields of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.jobs.request import parse
from api.jobs.resolve import resolve_for_model
from shared.config import models_file
from shared.config.adapters import Adapter, AdapterChoice, AdapterSpec, resolve_adapters
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.errors import ConfigurationError, InvalidRequest
from shared.job import Job
from shared.signature import denoisers_of, mixable_fields, signature

ALLOWED = (
    AdapterSpec(id="ink", source="/loras/ink.safetensors"),
    AdapterSpec(id="oil", source="/loras/oil.safetensors", scale=0.6, max_scale=0.8),
    AdapterSpec(id="easy", source="/loras/easy.safetensors", token="easy"),
    AdapterSpec(id="easy-2", source="/loras/easy-2.safetensors", token="EASY"),
)

MODELS = """
[[model]]
id = "painter"
source = "{source}"
{more}
[[model.adapter]]
id = "ink"
source = "{adapter}"
"""


CONTROL = '[[model.control]]\nid = "edges"\nsource = "nets/edges"'


def test_adapters_get_their_default_scale() -> None:
    chosen = resolve_adapters([AdapterChoice(id="oil"), AdapterChoice(id="ink", scale=-1.5)], ALLOWED, limit=2)
    assert chosen == (Adapter(id="oil", scale=0.6), Adapter(id="ink", scale=-1.5))
    assert resolve_adapters([AdapterChoice(id="easy", scale=1)], ALLOWED, limit=2) == (Adapter(id="easy", scale=1.0),)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ([{"id": "ink"}, {"id": "pastel"}], "adapters.1.id", "available: ink, oil"),
        ([{"id": "ink"}, {"id": "ink"}], "adapters.1.id", "duplicate"),
        ([{"id": "oil", "scale": -0.9}], "adapters.0.scale", "-0.8 to 0.8"),
        ([{"id": "easy", "scale": 0.5}], "adapters.0.scale", "is an embedding, which has no scale"),
        ([{"id": "easy"}, {"id": "easy-2"}], "adapters.1.id", "embeddings of the same word, 'EASY'"),
        ([{"id": "oil", "scale": "much"}], "adapters.0.scale", "number"),
        ([{"id": "oil", "scale": float("nan")}], "adapters.0.scale", "finite"),
        ([{"id": "ink", "weight": 1}], "adapters.0.weight", "no such field"),
        ([{"scale": 1}], "adapters.0", "send one of id, url and hub"),
        ([{"id": "ink", "url": "https://a.example/a"}], "adapters.0", "send one of id, url and hub"),
        ([{"id": "ink", "file": "a.safetensors"}], "adapters.0", "file and revision need hub"),
        ([{"hub": "ink"}], "adapters.0.hub", "pattern"),
        ([{"hub": "owner/ink", "file": "a.ckpt"}], "adapters.0.file", "pattern"),
        ([{"hub": "owner/ink", "file": "a/../a.safetensors"}], "adapters.0", "no empty parts"),
        ([{"hub": "owner/ink", "revision": "a//b"}], "adapters.0", "no empty parts"),
        ([{"hub": "owner/.."}], "adapters.0", "no empty parts"),
        ([{"url": "https://a.example/a", "scale": 4.1}], "adapters.0.scale", "-4.0 to 4.0"),
        ([{"url": "https://a.example/a"}] * 2, "adapters.1.url", "duplicate"),
        ([{"hub": "owner/ink"}] * 2, "adapters.1.hub", "duplicate"),
        ([{"id": "ink"}, {"id": "oil"}], "adapters", "at most 1"),
        ([{"id": "ink"}] * 17, "adapters", "at most 16"),
        ("ink", "adapters", "list"),
    ],
)
def test_error_names_the_invalid_adapter_field(body: Any, param: str, words: str) -> None:
    limit = 1 if words == "at most 1" else 4
    spec = ModelSpec(
        id="m",
        source="/m",
        adapter=ALLOWED,
        limits=Limits(max_adapters=limit),
        defaults=Defaults(),
    )
    with pytest.raises(InvalidRequest, match=words) as caught:
        resolve_for_model(parse({"model": "m", "prompt": "a", "adapters": body}), spec, "t", 0)
    assert caught.value.param == param


@pytest.mark.parametrize(("mixed", "together"), [(("adapters", "controls"), True), ((), False)])
@pytest.mark.parametrize("chosen", [{"adapters": (Adapter(id="ink"),)}, {"control_ids": ("edges",)}])
def test_signature_separates_adapters_and_controls_that_cannot_be_mixed(
    chosen: dict[str, Any], mixed: tuple[str, ...], together: bool, make_job: Callable[..., Job]
) -> None:
    plain = make_job(mixed_fields=mixed)
    assert (signature(plain) == signature(plain.model_copy(update=chosen))) is together


def test_mixed_fields_of_a_folder_follow_from_its_denoiser(tmp_path: Path) -> None:
    """The pipeline index has its class; the models file can override them."""
    file = tmp_path / "models.toml"
    (tmp_path / "ink.safetensors").touch()
    for name, line, more, expected in (
        ("flux", '"transformer": ["diffusers", "FluxTransformer2DModel"]', "", ("adapters",)),
        ("other", '"transformer": ["diffusers", "SanaTransformer2DModel"]', "", ()),
        ("listed", '"transformer": ["diffusers", "ZImageTransformer2DModel"]', "", ("size",)),
        (
            "set",
            '"transformer": ["diffusers", "ZImageTransformer2DModel"]',
            'mixed_fields = ["adapters"]',
            ("adapters",),
        ),
        ("none", '"unet": ["diffusers", "UNet2DConditionModel"]', "mixed_fields = []", ()),
        ("unet", '"unet": ["diffusers", "UNet2DConditionModel"]', CONTROL, ("adapters", "controls")),
        ("tokens", '"transformer": ["diffusers", "FluxTransformer2DModel"]', CONTROL, ("adapters",)),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(f"{{{line}}}")
        file.write_text(MODELS.format(source=name, more=more, adapter="ink.safetensors"))
        (spec,) = models_file.load(file)
        assert spec.mixed_fields == expected, name
        assert spec.adapter[0].source == str(tmp_path / "ink.safetensors")


def test_both_denoisers_must_support_mixing(tmp_path: Path) -> None:
    both = {"transformer": "WanTransformer3DModel", "transformer_2": "WanTransformer3DModel"}
    assert mixable_fields(both) == ("adapters",)
    assert mixable_fields(both | {"transformer_2": "Unknown"}) == ()
    assert mixable_fields({}) == ()
    assert denoisers_of(tmp_path) is None


@pytest.mark.parametrize(
    ("adapter", "more", "words"),
    [
        ("nowhere/ink", "", "needs a weight_name"),
        ("ink.safetensors", "scale = 3.0", "above max_scale"),
        ("ink.safetensors", 'token = "ink"\nscale = 0.5', "takes no scale"),
        ("ink.safetensors", 'token = "(ink)"', "token"),
        ("ink.safetensors", 'weight_name = "ink.bin"', "weight_name"),
        ("ink.safetensors", '[[model.adapter]]\nid = "ink"\nsource = "ink.safetensors"', "duplicate adapter ids: ink"),
        (
            "ink.safetensors",
            '[[model.adapter]]\nid = "adapter_01k5zt8e2vw8r4n6y9qbcdefgh"\nsource = "ink.safetensors"',
            "like those of uploaded adapters: adapter_01k5",
        ),
    ],
)
def test_models_file_with_an_invalid_adapter_is_rejected(adapter: str, more: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "ink.safetensors").touch()
    file = tmp_path / "models.toml"
    file.write_text(MODELS.format(source="org/model", more="", adapter=adapter) + more)
    with pytest.raises(ConfigurationError, match=words):
        models_file.load(file)
