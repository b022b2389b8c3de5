"""Rules of architectures: their arguments exist; times per token, substitutes and several outputs of video models."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import diffusers
import diffusers.pipelines.ltx
import diffusers.pipelines.ltx2
import pytest
import torch
import transformers
from tiny.meshes import hy3dgen_fault

from shared.architectures.registry import ARCHITECTURES, FAMILIES
from shared.architectures.stacking_rules import Argument, Kind, StackingRules
from worker.engine.errors import StackingError
from worker.engine.fusion.batch_key import add_substitutes, batch_key
from worker.engine.fusion.module_proxy import ModuleProxy, SharedMethod, shared_methods_of
from worker.engine.fusion.stacking import Stacker, split
from worker.engine.weights.shape_classes import shape_classes

OF_MESHES = ("Hunyuan3DDiT", "SingleImageEncoder", "DualImageEncoder", "ShapeVAE", "CrossAttentionDecoder")
BY_KEYWORD = ("guidance", "view_idxs")  # of those that take any
LTX = ARCHITECTURES["LTX2VideoTransformer3DModel"]["forward"]
WAN = ARCHITECTURES["WanTransformer3DModel"]["forward"]
HELIOS = ARCHITECTURES["HeliosTransformer3DModel"]["forward"]
TOKENS = 6


def ltx_call(rows: int, timestep: torch.Tensor, **more: Any) -> dict[str, Any]:
    call = {
        "hidden_states": torch.zeros(rows, TOKENS, 4),
        "audio_hidden_states": torch.zeros(rows, 3, 8),
        "timestep": timestep,
        "sigma": torch.full((rows,), 0.5),
        "isolate_modalities": False,
    }
    return add_substitutes(LTX, call | more)


PACKAGES: tuple[Any, ...] = (
    *(diffusers, diffusers.models, diffusers.pipelines.ltx, diffusers.pipelines.ltx2),
    transformers,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_name_of_a_family_is_that_of_a_class(name: str) -> None:
    """A misspelled one would never be found."""
    family = FAMILIES[name]
    nets = [net for one in family.denoisers.values() for net in (one.control_net, *one.other_nets) if net is not None]
    names = {
        *family.denoisers,
        *family.encoders,
        *(one for net in nets for one in (net.name, net.several, *net.pipelines, *net.pipelines.values()) if one),
        *(one for one, _ in family.siblings),
        *family.siblings.values(),
        *family.control_pipelines,
        *family.control_pipelines.values(),
        *family.denoising_parts,
        *family.listed_images,
        *family.fixed_rates,
        *family.upscalers,
    }
    packages = mesh_packages() if names & set(OF_MESHES) else PACKAGES
    assert {one for one in names if not any(hasattr(package, one) for package in packages)} == set()


def mesh_packages() -> tuple[Any, ...]:
    """Return hy3dgen's modules with classes of models; skips the test where it is not installed."""
    if fault := hy3dgen_fault():
        pytest.skip(fault)
    shape_classes()
    return tuple(import_module(f"hy3dgen.shapegen.models{name}") for name in ("", ".autoencoders"))


@pytest.mark.parametrize(
    ("architecture", "method"), [(name, method) for name, methods in ARCHITECTURES.items() for method in methods]
)
def test_every_rule_names_arguments_of_its_class(architecture: str, method: str) -> None:
    """A misspelled argument would have to be equal, which prevents fused forwards."""
    packages = mesh_packages() if architecture in OF_MESHES else PACKAGES
    model_class = next(getattr(package, architecture) for package in packages if hasattr(package, architecture))
    parameters = set(inspect.signature(getattr(model_class, method)).parameters)
    rules = ARCHITECTURES[architecture][method]
    assert set(rules.arguments) <= parameters | (set(BY_KEYWORD) if "kwargs" in parameters else set())
    assert {rule.like for rule in rules.arguments.values()} - {None} <= set(rules.arguments)


def test_times_per_row_become_times_per_token_if_another_call_has_those() -> None:
    """Text-to-video has one time per row; image-to-video sets its first frame's tokens to time zero."""
    per_token = torch.tensor([[0.0, 0, 7, 7, 7, 7]])
    calls = [ltx_call(2, torch.tensor([3.0, 3.0])), ltx_call(1, per_token, audio_timestep=torch.tensor([7.0]))]
    assert batch_key(LTX, calls[0]) == batch_key(LTX, calls[1])
    stacked = Stacker(LTX).stack(calls, [2, 1])
    assert stacked["timestep"].tolist() == [[3.0] * TOKENS, [3.0] * TOKENS, per_token[0].tolist()]
    assert stacked["audio_timestep"].tolist() == [3.0, 3.0, 7.0]
    assert stacked["sigma"].shape == (3,)


def test_one_row_of_times_per_token_serves_all_rows_of_its_call() -> None:
    """It is broadcast."""
    calls = [ltx_call(2, torch.arange(TOKENS).float()[None]), ltx_call(1, torch.tensor([9]))]
    assert Stacker(LTX).stack(calls, [2, 1])["timestep"].tolist() == [*[[0, 1, 2, 3, 4, 5]] * 2, [9] * TOKENS]


def test_a_wrong_number_of_times_is_refused() -> None:
    """Two rows with three times would shift the times of other calls."""
    with pytest.raises(StackingError):
        Stacker(LTX).stack([ltx_call(2, torch.zeros(3, TOKENS)), ltx_call(1, torch.zeros(1))], [2, 1])


def wan_call(rows: int, images: int) -> dict[str, Any]:
    marks = torch.arange(rows * images).float()[:, None, None].expand(-1, 5, 16)
    return {"hidden_states": torch.zeros(rows, 4, 3, 8, 8), "encoder_hidden_states_image": marks}


def test_first_and_last_images_stay_with_their_row() -> None:
    """Their embedding has two entries per row; a call with one entry per row has another batch key."""
    assert batch_key(WAN, wan_call(1, 2)) == batch_key(WAN, wan_call(2, 2)) != batch_key(WAN, wan_call(2, 1))
    stacked = Stacker(WAN).stack([wan_call(1, 2), wan_call(2, 2)], [1, 2])
    assert stacked["encoder_hidden_states_image"][:, 0, 0].tolist() == [0, 1, 0, 1, 2, 3]
    with pytest.raises(StackingError):
        Stacker(WAN).stack([wan_call(1, 2), wan_call(2, 1)], [1, 2])


def test_a_given_argument_is_not_substituted() -> None:
    """Only an omitted argument gets the value of its substitute, if that is given."""
    rules = StackingRules("x", {"x": Argument(Kind.STACKED), "y": Argument(Kind.ROWS, like="x")})
    assert add_substitutes(rules, {"x": 1, "y": 2}) == {"x": 1, "y": 2}
    assert add_substitutes(rules, {"x": 1}) == {"x": 1, "y": 1}
    assert add_substitutes(rules, {}) == {}


def test_frames_and_audio_are_split_by_the_same_rows() -> None:
    """A forward with two outputs."""
    first, second = split((torch.arange(3.0)[:, None], torch.arange(3.0)[:, None, None] * 10), [2, 1])
    assert [part.flatten().tolist() for part in first] == [[0, 1], [0, 10]]
    assert [part.flatten().tolist() for part in second] == [[2], [20]]


@pytest.mark.parametrize(
    ("rules", "one", "other"),
    [
        (WAN, {"hidden_states": torch.zeros(1, 4, 3, 8, 8)}, {"hidden_states": torch.zeros(1, 4, 5, 8, 8)}),
        (
            WAN,
            {"hidden_states": torch.zeros(1, 4, 3, 8, 8)},
            {"hidden_states": torch.zeros(1, 4, 3, 8, 8), "encoder_hidden_states_image": torch.zeros(1, 5, 16)},
        ),
        (
            HELIOS,
            {"hidden_states": torch.zeros(1, 4, 9, 8, 8), "indices_hidden_states": torch.arange(9)[None]},
            {"hidden_states": torch.zeros(1, 4, 9, 8, 8), "indices_hidden_states": torch.arange(8)[None]},
        ),
        (LTX, ltx_call(1, torch.zeros(1)), ltx_call(1, torch.zeros(1), isolate_modalities=True)),
        (LTX, ltx_call(1, torch.zeros(1)), ltx_call(1, torch.zeros(1), spatio_temporal_guidance_blocks=[1])),
    ],
    ids=["frames", "an image's embedding", "history", "isolated modalities", "perturbed blocks"],
)
def test_calls_that_differ_in_an_argument_of_the_whole_forward_have_other_batch_keys(
    rules: StackingRules, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """They run in separate forwards."""
    assert batch_key(rules, one) != batch_key(rules, other)


def test_a_proxy_ignores_the_options_of_a_cache_context() -> None:
    """Wan passes the step and the noise level."""
    module = torch.nn.Linear(2, 2)
    methods: dict[str, SharedMethod] = shared_methods_of("transformer", module)
    with ModuleProxy(module, methods, torch.device("cpu"), torch.float32).cache_context(
        "cond", step_index=1, sigma=0.5
    ):
        pass
