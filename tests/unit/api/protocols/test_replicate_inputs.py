"""Inputs of Replicate's models as job requests, and model names of Replicate's clients."""

from __future__ import annotations

from typing import Any

import pytest
from harness.http_server import ROOT

from api.jobs.request import JobRequest
from api.protocols.model_names import find_model, owner_and_name
from api.protocols.replicate.model_routes import version_object
from api.protocols.replicate.prediction_inputs import parse_input, size_for
from api.protocols.replicate.predictions import model_of_version, model_version
from shared.config import models_file
from shared.config.adapters import AdapterSpec
from shared.config.catalog import Catalog
from shared.config.controls import ControlSpec
from shared.config.model_spec import ModelSpec
from shared.config.refiners import RefinerSpec
from shared.config.request_limits import Limits
from shared.errors import FusequeueError, InvalidRequest, UnknownModel
from shared.tasks import Task

CATALOG = models_file.load(ROOT / "models.toml")
DEMO = CATALOG.get("demo")
FILE = "in_0123456789abcdef0123456789abcdef"
IN_A, IN_B = "in_" + 32 * "a", "in_" + 32 * "b"
EDITS = ModelSpec(id="edits", source="x", tasks=(Task.EDIT,), limits=Limits(max_input_images=3), safety_checker=False)
FILMS = ModelSpec(id="films", source="x", tasks=(Task.TEXT_TO_VIDEO,), limits=Limits(max_frames=81, frames_multiple=4))


def read(spec: ModelSpec = DEMO, **values: Any) -> JobRequest:
    return parse_input({"prompt": "a red circle", **values}, spec, {"priority": "interactive"})[0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"seed": 7, "negative_prompt": "green", "scheduler": None}, {"seed": 7, "negative_prompt": "green"}),
        ({"image": "data:application/octet-stream;base64,AA=="}, {"image": "data:;base64,AA=="}),
        ({"image": f"https://a.example/compat/replicate/v1/files/{FILE}"}, {"image": FILE}),
        ({"image": f"http://a.example:8000/x/compat/replicate/v1/files/{FILE}"}, {"image": FILE}),
        ({"image": f"https://a.example/{FILE}"}, {"image": f"https://a.example/{FILE}"}),
        ({"scheduler": "K_EULER"}, {"scheduler": "K_EULER"}),
        ({"scheduler": "DDIMScheduler"}, {"scheduler": "DDIMScheduler"}),
        ({"output_format": "jpg", "output_quality": 0}, {"output_format": "jpeg", "output_quality": 1}),
        ({"width": 128, "height": 64, "aspect_ratio": "custom"}, {"width": 128, "height": 64}),
        ({"aspect_ratio": "1:1"}, {"width": 64, "height": 64}),
        ({"aspect_ratio": "2:1"}, {"width": 128, "height": 64}),
        ({"megapixels": 1e-7}, {"width": 64, "height": 64}),
        ({"megapixels": 1e-7, "aspect_ratio": "1:2"}, {"width": 64, "height": 128}),
        ({"go_fast": True, "disable_safety_checker": False, "apply_watermark": False}, {"priority": "interactive"}),
        ({"prompt_strength": 0.8, "mask": None}, {"strength": None, "prompt": "a red circle"}),
        ({"lora_scale": 0.6}, {"adapters": ()}),
        ({"refine": "no_refiner", "high_noise_frac": 0.8, "refine_steps": None, "apply_watermark": True}, {"n": 1}),
    ],
)
def test_replicate_fields_become_job_fields(values: dict[str, Any], expected: dict[str, Any]) -> None:
    request = read(**values)
    assert {name: getattr(request, name) for name in expected} == expected


REFINED = ModelSpec(id="refined", source="x", tasks=(Task.TEXT_TO_IMAGE, Task.INPAINT), refiner=RefinerSpec(source="y"))


@pytest.mark.parametrize(
    ("values", "start"),
    [
        ({}, None),
        ({"high_noise_frac": 0.6, "refine_steps": 5}, None),
        ({"refine": "no_refiner", "high_noise_frac": 0.6}, 1.0),
        ({"refine": "expert_ensemble_refiner"}, 0.8),
        ({"refine": "expert_ensemble_refiner", "high_noise_frac": 0.6}, 0.6),
        ({"refiner_start": 0.5}, 0.5),
    ],
)
def test_refine_chooses_where_a_refiner_goes_on(values: dict[str, Any], start: float | None) -> None:
    assert read(REFINED, **values).refiner_start == start


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"high_noise_frac": 0}, "high_noise_frac", "input.high_noise_frac: Input should be greater than 0"),
        ({"high_noise_frac": 1.1}, "high_noise_frac", "input.high_noise_frac: "),
        ({"refiner_start": 0.5}, "refine", "input.refine: send either refine or refiner_start"),
        ({"denoising_end": 0.5}, "refine", "input.refine excludes denoising_end"),
        ({"image": IN_A, "mask": IN_B}, "refine", "input.refine: model 'refined' has no refiner for inpaint"),
    ],
)
def test_a_fault_of_the_refiner_names_the_field_of_the_input(values: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(REFINED, refine="expert_ensemble_refiner", **values)
    assert error.value.param == f"input.{param}"
    assert message in error.value.message


def test_several_images_and_videos_have_field_aliases() -> None:
    request = read(EDITS, input_images=[IN_A, f"https://a.example/compat/replicate/v1/files/{FILE}"])
    assert request.images == (IN_A, FILE)
    same = read(EDITS, image=IN_A, aspect_ratio="match_input_image", disable_safety_checker=True)
    assert (same.width, same.height) == (None, None)
    film = read(FILMS, num_frames=21, frames_per_second=8)
    assert (film.frames, film.fps) == (21, 8)


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"stepz": 1}, "stepz", "input.stepz: there is no such field"),
        ({"prompt": None}, "prompt", "input.prompt: Field required"),
        ({"num_inference_steps": 1000}, "num_inference_steps", "input.num_inference_steps must be 1 to 100, not 1000"),
        ({"num_inference_steps": "5"}, "num_inference_steps", "input.num_inference_steps: Input should be a valid int"),
        ({"num_outputs": 99}, "num_outputs", "input.num_outputs is at most 8"),
        ({"guidance": 99}, "guidance", "input.guidance is at most 20"),
        ({"guidance": 1, "guidance_scale": 1}, "guidance", "send either guidance_scale or guidance"),
        ({"init_image": "a", "input_image": "b"}, "input_image", "send either init_image or input_image"),
        ({"strength": 0.5}, "strength", "input.strength needs an image"),
        ({"image": IN_A, "prompt_strength": 2}, "prompt_strength", "input.prompt_strength: "),
        ({"size": "64"}, "size", "input.size: invalid: 64; use WxH"),
        ({"size": "64x64", "width": 64}, "size", "input.size: send either size"),
        ({"size": "64x64", "aspect_ratio": "1:1"}, "size", "input.size: send either size"),
        ({"size": "64x4096"}, "size", "input.size must be 64 to 128, not 4096"),
        ({"refine": "expert_ensemble_refiner"}, "refine", "input.refine: model 'demo' has no refiner; use no_refiner"),
        ({"refine": "base_image_refiner"}, "refine", "input.refine: base_image_refiner is not supported; use expert"),
        ({"refine": "refiner"}, "refine", "input.refine: Input should be 'no_refiner', 'expert_ensemble_refiner'"),
        ({"output_quality": 101}, "output_quality", "input.output_quality: "),
        ({"output_format": "gif"}, "output_format", "input.output_format: "),
        ({"output_format": "mp4"}, "output_format", "input.output_format must be png, jpeg or webp"),
        ({"aspect_ratio": "wide"}, "aspect_ratio", "input.aspect_ratio: "),
        ({"aspect_ratio": "0:1"}, "aspect_ratio", "input.aspect_ratio: "),
        ({"aspect_ratio": "3:1"}, "aspect_ratio", "input.aspect_ratio must be 64 to 128, not 192"),
        ({"aspect_ratio": "2:1", "width": 64}, "aspect_ratio", "send either aspect_ratio or width and height"),
        ({"aspect_ratio": "custom", "width": 64}, "aspect_ratio", "custom needs width and height"),
        ({"aspect_ratio": "match_input_image"}, "aspect_ratio", "needs an image, and a model that changes"),
        ({"megapixels": 1}, "megapixels", "input.megapixels must be 64 to 128, not 1024"),
        ({"width": 65}, "width", "input.width must be a multiple of 8"),
        ({"lora_weights": "ink"}, "lora_weights", "input.lora_weights"),
        ({"lora_scale": "strong"}, "lora_scale", "input.lora_scale: "),
        ({"disable_safety_checker": True}, "disable_safety_checker", "only the operator can disable"),
        ({"model": "other"}, "model", "there is no such field"),
        ({"webhook": "https://a.example"}, "webhook", "there is no such field"),
        ({"image": ["a"]}, "image", "input.image: "),
    ],
)
def test_an_error_names_the_field_of_the_input(values: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(**values)
    assert error.value.param == f"input.{param}"
    assert message in error.value.message


def test_an_error_names_which_field_of_an_adapter_is_wrong() -> None:
    inked = DEMO.model_copy(update={"adapter": (AdapterSpec(id="ink", source="x"),)})
    assert [chosen.scale for chosen in read(inked, lora_weights="ink", lora_scale=0.5).adapters] == [0.5]
    for values, param in (
        ({"lora_weights": "ink", "lora_scale": 99.0}, "lora_scale"),
        ({"lora_weights": "oil", "lora_scale": 0.5}, "lora_weights"),
    ):
        with pytest.raises(InvalidRequest, match=rf"^input\.{param}\b") as error:
            read(inked, **values)
        assert error.value.param == f"input.{param}"


@pytest.mark.parametrize(
    ("ratio", "pixels", "size"),
    [
        (1.0, 1024 * 1024, (1024, 1024)),
        (16 / 9, 1024 * 1024, (1368, 768)),
        (9 / 16, 1024 * 1024, (768, 1368)),
        (3 / 2, 256 * 1024, (624, 416)),
        (4.0, 64 * 64, (256, 64)),  # the shorter side would be 32, below the minimum
    ],
)
def test_an_aspect_ratio_keeps_about_the_same_number_of_pixels(
    ratio: float, pixels: int, size: tuple[int, int]
) -> None:
    assert size_for(ratio, pixels, EDITS) == size


def test_a_model_is_found_by_owner_and_name() -> None:
    """The owner must match if the id contains one; otherwise any owner is accepted."""
    owned = DEMO.model_copy(update={"id": "acme/flux"})
    served = Catalog((DEMO, owned))
    assert (owner_and_name("demo"), owner_and_name("acme/flux")) == (("fusequeue", "demo"), ("acme", "flux"))
    assert find_model("stability-ai", "demo", served) is DEMO
    assert find_model("acme", "flux", served) is owned
    with pytest.raises(UnknownModel, match=r"'other/flux'; available: acme/flux, fusequeue/demo"):
        find_model("other", "flux", served)


def test_a_version_is_served_until_its_weights_change() -> None:
    hub = DEMO.model_copy(update={"id": "sdxl", "source": "stabilityai/sdxl"})
    served = Catalog((DEMO, hub))
    for version in (model_version(hub), f"a/sdxl:{model_version(hub)}", "sdxl", "a/sdxl"):
        assert model_of_version(version, served) is hub
    newer = hub.model_copy(update={"revision": "abc"})
    for version in (
        model_version(hub),
        f"a/sdxl:{model_version(hub)}",
        f"a/demo:{model_version(newer)}",
        "no/such",
        "none",
        "",
    ):
        with pytest.raises(FusequeueError) as error:
            model_of_version(version, Catalog((DEMO, newer)))
        assert error.value.param == "version"


def test_the_path_of_a_folder_does_not_change_the_version() -> None:
    assert model_version(DEMO) == model_version(DEMO.model_copy(update={"source": "/other/demo"}))
    files = [DEMO.model_copy(update={"checkpoint": path}) for path in ("/x/a.safetensors", "/y/a.safetensors", "/x/b")]
    versions = [model_version(spec) for spec in files]
    assert versions[0] == versions[1]
    assert len({model_version(DEMO), *versions}) == 3


@pytest.mark.parametrize(
    ("tasks", "offered", "left_out"),
    [
        (
            (Task.TEXT_TO_AUDIO, Task.AUDIO_TO_AUDIO),
            {"audio", "duration_s", "lyrics", "prompt_strength", "seed"},
            {"width", "height", "aspect_ratio", "image", "mask", "num_frames", "video", "controls", "repaint_end_s"},
        ),
        (
            (Task.TEXT_TO_IMAGE, Task.INPAINT),
            {"width", "height", "aspect_ratio", "image", "mask", "mask_blur", "prompt_strength"},
            {"audio", "duration_s", "num_frames", "last_image"},
        ),
        ((Task.TEXT_TO_VIDEO,), {"width", "num_frames", "fps"}, {"image", "video", "audio", "prompt_strength"}),
    ],
)
def test_the_schema_offers_the_fields_that_a_model_takes(
    tasks: tuple[Task, ...], offered: set[str], left_out: set[str]
) -> None:
    limits = Limits(max_frames=81, max_duration_s=60)
    version = version_object(ModelSpec(id="one", source="x", tasks=tasks, limits=limits))
    properties = version["openapi_schema"]["components"]["schemas"]["Input"]["properties"]
    assert offered <= properties.keys()
    assert not left_out & properties.keys()


@pytest.mark.parametrize(
    ("spec", "required", "is_offered"),
    [
        (DEMO, ["prompt"], True),
        (ModelSpec(id="redux", source="x", control=(ControlSpec(id="like", kind="redux", source="y"),)), [], True),
        (ModelSpec(id="mesh", source="x", tasks=(Task.IMAGE_TO_MESH,)), [], False),
    ],
    ids=["demo", "redux", "mesh"],
)
def test_the_schema_requires_a_prompt_where_every_job_needs_one(
    spec: ModelSpec, required: list[str], is_offered: bool
) -> None:
    schema = version_object(spec)["openapi_schema"]["components"]["schemas"]["Input"]
    assert schema.get("required", []) == required
    assert ("prompt" in schema["properties"]) is is_offered
