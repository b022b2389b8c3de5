"""Which adapters a job may have, whose company it may share, and which rows take which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config import models_file
from shared.config.adapters import AdapterChoice, AdapterSpec, choose
from shared.errors import ConfigurationError, InvalidRequest
from shared.job import Adapter, Job
from shared.job_builder import check_limits
from shared.request import parse
from shared.signature import denoisers_of, mixable_fields, signature
from worker.engine.lora.adapter_files import LowRank
from worker.engine.lora.per_row import ModelAdapters, RowAdapters, Span, adapter_key, spans

ALLOWED = (
    AdapterSpec(id="ink", source="/loras/ink.safetensors"),
    AdapterSpec(id="oil", source="/loras/oil.safetensors", scale=0.6, max_scale=0.8),
)
A, B = (("a", 1.0),), (("b", 0.5),)

MODELS = """
[[model]]
id = "painter"
source = "{source}"
{more}
[[model.adapter]]
id = "ink"
source = "{adapter}"
"""


def test_a_job_names_adapters_of_its_model_and_gets_their_scales() -> None:
    chosen = choose([AdapterChoice(id="oil"), AdapterChoice(id="ink", scale=-1.5)], ALLOWED, most=2)
    assert chosen == (Adapter(id="oil", scale=0.6), Adapter(id="ink", scale=-1.5))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ([{"id": "ink"}, {"id": "pastel"}], "adapters.1.id", "there are: ink, oil"),
        ([{"id": "ink"}, {"id": "ink"}], "adapters.1.id", "twice"),
        ([{"id": "oil", "scale": -0.9}], "adapters.0.scale", "-0.8 to 0.8"),
        ([{"id": "oil", "scale": "much"}], "adapters.0.scale", "number"),
        ([{"id": "oil", "scale": float("nan")}], "adapters.0.scale", "finite"),
        ([{"id": "ink", "weight": 1}], "adapters.0.weight", "no such field"),
        ([{"scale": 1}], "adapters.0.id", "required"),
        ([{"id": "ink"}, {"id": "oil"}], "adapters", "at most 1"),
        ([{"id": "ink"}] * 17, "adapters", "at most 16"),
        ("ink", "adapters", "tuple"),
    ],
)
def test_what_a_model_does_not_allow_is_refused_by_name(body: Any, param: str, words: str) -> None:
    most = 1 if words == "at most 1" else 4
    spec = models_file.ModelSpec(
        id="m",
        source="/m",
        adapter=ALLOWED,
        limits=models_file.Limits(max_adapters=most),
        defaults=models_file.Defaults(),
    )
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_limits(parse({"model": "m", "prompt": "a", "adapters": body}), spec)
    assert caught.value.param == param


@pytest.mark.parametrize(("mixed", "together"), [(("adapters",), True), ((), False)])
def test_the_signature_keeps_apart_what_a_model_cannot_mix(
    mixed: tuple[str, ...], together: bool, make_job: Callable[..., Job]
) -> None:
    """Jobs with other adapters are claimed together exactly where the model's forward can mix them."""
    plain = make_job(mixed_fields=mixed)
    worn = plain.model_copy(update={"adapters": (Adapter(id="ink"),)})
    assert (signature(plain) == signature(worn)) is together


def test_a_folder_tells_what_its_model_mixes(tmp_path: Path) -> None:
    """The class of the denoiser is in the pipeline's index; the models file may say otherwise."""
    file = tmp_path / "models.toml"
    (tmp_path / "ink.safetensors").touch()
    for name, line, more, expected in (
        ("flux", '"transformer": ["diffusers", "FluxTransformer2DModel"]', "", ("adapters",)),
        ("other", '"transformer": ["diffusers", "SanaTransformer2DModel"]', "", ()),
        ("listed", '"transformer": ["diffusers", "ZImageTransformer2DModel"]', "", ("size",)),
        (
            "told",
            '"transformer": ["diffusers", "ZImageTransformer2DModel"]',
            'mixed_fields = ["adapters"]',
            ("adapters",),
        ),
        ("none", '"unet": ["diffusers", "UNet2DConditionModel"]', "mixed_fields = []", ()),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(f"{{{line}}}")
        file.write_text(MODELS.format(source=name, more=more, adapter="ink.safetensors"))
        (spec,) = models_file.load(file)
        assert spec.mixed_fields == expected, name
        assert spec.adapter[0].source == str(tmp_path / "ink.safetensors")


def test_both_of_two_denoisers_must_mix(tmp_path: Path) -> None:
    both = {"transformer": "WanTransformer3DModel", "transformer_2": "WanTransformer3DModel"}
    assert mixable_fields(both) == ("adapters",)
    assert mixable_fields(both | {"transformer_2": "Unheard"}) == ()
    assert mixable_fields({}) == ()
    assert denoisers_of(tmp_path) is None


@pytest.mark.parametrize(
    ("adapter", "more", "words"),
    [
        ("nowhere/ink", "", "needs a weight_name"),
        ("ink.safetensors", "scale = 3.0", "above max_scale"),
        ("ink.safetensors", 'weight_name = "ink.bin"', "weight_name"),
        ("ink.safetensors", '[[model.adapter]]\nid = "ink"\nsource = "ink.safetensors"', "appear twice: ink"),
    ],
)
def test_a_models_file_with_a_bad_adapter_is_refused(adapter: str, more: str, words: str, tmp_path: Path) -> None:
    """At the start of the program, with the file and what to change in it."""
    (tmp_path / "ink.safetensors").touch()
    file = tmp_path / "models.toml"
    file.write_text(MODELS.format(source="org/model", more="", adapter=adapter) + more)
    with pytest.raises(ConfigurationError, match=words):
        models_file.load(file)


def test_the_order_of_adapters_does_not_matter_and_a_scale_of_nothing_is_none() -> None:
    ink, oil, none = Adapter(id="ink", scale=0.5), Adapter(id="oil"), Adapter(id="pastel", scale=0.0)
    assert adapter_key((ink, none, oil)) == adapter_key((oil, ink)) == (("ink", 0.5), ("oil", 1.0))
    assert adapter_key((none,)) == ()


@pytest.mark.parametrize(
    ("keys", "rows", "merge", "expected"),
    [
        ([A, (), B], [2, 2, 1], True, [Span(0, 2, A), Span(4, 5, B)]),
        ([A, A, B, A], [1, 2, 1, 1], True, [Span(0, 3, A), Span(3, 4, B), Span(4, 5, A)]),
        ([A, A, B], [2, 2, 2], False, [Span(0, 2, A), Span(2, 4, A), Span(4, 6, B)]),
        ([(), ()], [2, 2], True, []),
        ([(), ()], [2, 2], False, []),
    ],
)
def test_calls_become_spans_of_rows(
    keys: Sequence[Any], rows: Sequence[int], merge: bool, expected: list[Span]
) -> None:
    """Neighbours alike are one span, unless bits must not hang on neighbours; rows without adapters are in none."""
    assert spans(keys, rows, merge=merge) == expected


@torch.no_grad()
def test_a_module_without_adapters_has_no_hooks_and_rows_take_their_own() -> None:
    layer = torch.nn.Linear(3, 4)
    module = torch.nn.Sequential(layer)
    adapters = RowAdapters(module)
    adapters.per_row = True
    x = torch.randn(3, 3)
    plain = module(x)
    changes = {key: LowRank(torch.randn(2, 3), torch.randn(4, 2)) for key in (A, B)}
    for key, change in changes.items():
        adapters.attach(key, {"0": change})
    assert not adapters.idle
    assert torch.equal(module(x), plain), "outside of a forward with keys nothing is added"
    with adapters.applied([B, (), A], [1, 1, 1], merge=True):
        mixed = module(x)
    for row, key in ((0, B), (2, A)):
        change = changes[key]
        torch.testing.assert_close(mixed[row], plain[row] + change.up @ (change.down @ x[row]))
    assert torch.equal(mixed[1], plain[1])
    adapters.detach(A)
    adapters.detach(B)
    assert adapters.idle
    assert not layer._forward_hooks


def test_the_least_recently_used_adapters_go_first_and_never_those_in_use() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4))
    adapters = ModelAdapters({"unet": RowAdapters(module)})
    change = LowRank(torch.zeros(1, 3), torch.zeros(4, 1))
    keys = [((name, 1.0),) for name in "abcd"]
    for key in keys:
        adapters.attach(key, {"unet": {"0": change}})
    assert adapters.nbytes == 4 * change.nbytes
    assert adapters.use(keys[0])
    assert adapters.use(())
    assert not adapters.use((("e", 1.0),))
    adapters.trim(2 * change.nbytes, {keys[1]})
    assert adapters.attached == (keys[1], keys[0])
    adapters.trim(0, {keys[1]})
    assert adapters.attached == (keys[1],)
    adapters.trim(0, set())
    assert adapters.attached == ()
    assert not module[0]._forward_hooks
