"""From a job to a pipeline call, and from its result to pixels."""

from __future__ import annotations

import io
import struct
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from harness.engine import a_job
from PIL import Image, ImageOps

from shared.errors import InferenceFailed, ModelUnavailable, NonFiniteLatents
from shared.job import Job, Task
from worker.engine.pipelines.call_arguments import (
    arguments_for,
    effective_strength,
    make_results,
    make_scheduler,
    to_frames,
    to_pixels,
)
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import InputImages, fit_image, fit_mask, prepare_inputs
from worker.engine.pipelines.task_pipelines import pipeline_for, supports, takes_last_image
from worker.engine.protocol import InputFiles


class Narrow:
    """A pipeline that takes few arguments."""

    def __call__(self, prompt: str, generator: Any, num_inference_steps: int = 1) -> None: ...


class Wide:
    """A pipeline that takes all of them."""

    def __call__(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        image: Any = None,
        strength: float = 0.5,
        width: int = 1,
        **_more: Any,
    ) -> None: ...


def file_of(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def test_a_pipeline_is_given_what_it_takes() -> None:
    """Arguments that a class does not have are left out, and an empty negative prompt is not given."""
    assert set(arguments_for(Narrow(), a_job("x"), 0, InputImages())) == {"prompt", "generator", "num_inference_steps"}
    assert set(arguments_for(Wide(), a_job("x"), 0, InputImages())) == {"prompt", "width"}
    with_picture = arguments_for(
        Wide(), a_job("x", negative_prompt="no", strength=0.7), 0, InputImages((Image.new("RGB", (8, 8)),))
    )
    assert with_picture["negative_prompt"] == "no"
    assert with_picture["strength"] == 0.7


def test_picture_i_is_made_with_seed_plus_i() -> None:
    """So that a picture of several can be made again by itself."""
    third = arguments_for(Narrow(), a_job("x", seed=40, n=3), 2, InputImages())["generator"]
    assert torch.equal(torch.randn(4, generator=third), torch.randn(4, generator=torch.Generator().manual_seed(42)))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 49, 100, 150])
def test_a_weak_strength_still_does_one_step(steps: int) -> None:
    """Pipelines fail on no steps at all; whole steps are counted by int(steps * strength)."""
    assert int(steps * effective_strength(a_job("x", steps=steps, strength=0.001))) == 1
    assert effective_strength(a_job("x", steps=steps, strength=1.0)) == 1.0


def test_an_input_picture_covers_the_size_and_is_cropped_in_the_middle() -> None:
    """A wide picture loses its sides, in equal parts."""
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    fitted = fit_image(file_of(wide), 50, 50)
    assert fitted.size == (50, 50)
    assert fitted.getpixel((25, 25)) == (0, 0, 255)
    assert fitted.getpixel((4, 25)) == (0, 0, 255)


@pytest.mark.parametrize(("deep", "grey"), [(0, 0), (255, 0), (32_896, 128), (65_535, 255)])
def test_a_grey_of_16_bits_keeps_its_shade(deep: int, grey: int) -> None:
    """Of a depth map, say, all but the darkest would be white."""
    data = file_of(Image.new("I;16", (8, 8), deep))
    assert fit_image(data, 8, 8).getpixel((4, 4)) == pytest.approx((grey,) * 3, abs=1)
    assert fit_mask(data, 8, 8).getpixel((4, 4)) == pytest.approx(grey, abs=1)


def test_an_input_picture_is_turned_upright_and_loses_its_transparency() -> None:
    """A camera's orientation is applied; what can be seen through is white."""
    sideways = Image.new("RGB", (80, 40), "red")
    sideways.paste("blue", (0, 0, 40, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter, clockwise
    upright = fit_image(file_of(sideways, exif=exif), 40, 80)
    assert upright.getpixel((20, 10)) == (0, 0, 255)
    assert fit_image(file_of(Image.new("RGBA", (8, 8), (0, 0, 0, 0))), 8, 8).getpixel((4, 4)) == (255, 255, 255)


@pytest.mark.parametrize("data", [b"", b"no picture", file_of(Image.new("RGB", (64, 64)))[:60]])
def test_what_cannot_be_decoded_is_an_error_of_the_image(data: bytes) -> None:
    """It names the field."""
    with pytest.raises(InferenceFailed) as caught:
        fit_image(data, 8, 8)
    assert caught.value.param == "image"


def test_a_mask_is_cut_as_its_picture_and_white_is_repainted() -> None:
    """Where a mask can be seen through, that is what is repainted, as OpenAI's clients send it."""
    wide = Image.new("L", (300, 100))
    wide.paste(255, (100, 0, 200, 100))
    mask = fit_mask(file_of(wide), 50, 50)
    assert (mask.mode, mask.size, mask.getpixel((25, 25))) == ("L", (50, 50), 255)
    assert fit_mask(file_of(wide), 150, 50).getpixel((10, 25)) == 0
    holed = Image.new("RGBA", (64, 64), (255, 255, 255, 255))
    holed.paste((0, 0, 0, 0), (0, 0, 32, 64))
    seen = fit_mask(file_of(holed), 64, 64)
    assert (seen.getpixel((10, 30)), seen.getpixel((50, 30))) == (255, 0)


def test_a_picture_to_edit_keeps_its_proportions_and_transparency_where_layers_need_it() -> None:
    """It is brought to the size that the signature has, and is not cut."""
    halves = Image.new("RGBA", (300, 100), (255, 0, 0, 255))
    halves.paste((0, 0, 0, 0), (150, 0, 300, 100))
    job = a_job("x", task=Task.EDIT, reference_sizes=((96, 32), (64, 64)), pictures=2)
    wide, square = prepare_inputs(job, InputFiles(images=(file_of(halves), file_of(halves)))).images
    assert (wide.size, square.size, wide.mode) == ((96, 32), (64, 64), "RGB")
    assert wide.getpixel((90, 16)) == (255, 255, 255)
    layered = a_job("x", task=Task.EDIT, reference_sizes=((96, 32),), layers=3)
    (clear,) = prepare_inputs(layered, InputFiles(images=(file_of(halves),))).images
    assert clear.getpixel((90, 16)) == (0, 0, 0, 0)


@pytest.mark.parametrize("param", ["mask", "last_image"])
def test_the_input_that_cannot_be_decoded_is_named(param: str) -> None:
    """There may be several."""
    job = a_job("x", task=Task.IMAGE_TO_VIDEO)
    with pytest.raises(InferenceFailed) as caught:
        prepare_inputs(job, InputFiles(images=(file_of(Image.new("RGB", (8, 8))),), **{param: b"broken"}))
    assert caught.value.param == param


@pytest.mark.parametrize("fault", [EOFError("no more"), struct.error("unpack"), KeyError("mode"), MemoryError()])
def test_whatever_a_reader_of_pictures_raises_ends_its_job(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_picture: Any) -> Any:
        raise fault

    monkeypatch.setattr(ImageOps, "exif_transpose", broken)
    with pytest.raises(InferenceFailed, match="cannot be decoded"):
        fit_image(file_of(Image.new("RGB", (8, 8))), 8, 8)


def called(pipeline: str, job: Job, inputs: InputImages | None = None) -> dict[str, Any]:
    """The arguments of a call of diffusers' class, which is not built for it; without those that all get."""
    made = object.__new__(getattr(diffusers, pipeline))
    common = {"prompt", "width", "height", "num_inference_steps", "generator", "output_type"}
    return {
        name: value
        for name, value in arguments_for(made, job, 0, inputs or InputImages()).items()
        if name not in common
    }


PICTURE, OTHER, MASK = Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), "red"), Image.new("L", (8, 8))
CLIP: dict[str, Any] = {"task": Task.TEXT_TO_VIDEO, "frames": 9, "fps": 24}
SCALE = {"guidance_scale": 4.0}


@pytest.mark.parametrize(
    ("pipeline", "fields", "inputs", "expected"),
    [
        ("FluxPipeline", {"negative_prompt": "no"}, None, SCALE | {"negative_prompt": "no"}),
        ("QwenImagePipeline", {}, None, {"true_cfg_scale": 4.0, "negative_prompt": " "}),
        ("QwenImagePipeline", {"guidance_scale": 1.0}, None, {"true_cfg_scale": 1.0}),
        ("QwenImagePipeline", {"negative_prompt": "no"}, None, {"true_cfg_scale": 4.0, "negative_prompt": "no"}),
        ("WanPipeline", CLIP, None, SCALE | {"num_frames": 9}),
        ("WanPipeline", CLIP | {"guidance_scale_2": 3.0}, None, SCALE | {"num_frames": 9, "guidance_scale_2": 3.0}),
        (
            "WanImageToVideoPipeline",
            CLIP | {"task": Task.IMAGE_TO_VIDEO},
            InputImages((PICTURE,), last_image=OTHER),
            SCALE | {"num_frames": 9, "image": PICTURE, "last_image": OTHER},
        ),
        ("LTX2Pipeline", CLIP, None, SCALE | {"num_frames": 9, "frame_rate": 24.0}),
        (
            "HeliosPyramidPipeline",
            CLIP | {"steps": 8},
            None,
            SCALE | {"num_frames": 9, "pyramid_num_inference_steps_list": [3, 3, 2]},
        ),
        (
            "StableDiffusionInpaintPipeline",
            {"task": Task.INPAINT, "strength": 1.0},
            InputImages((PICTURE,), MASK),
            SCALE | {"image": PICTURE, "mask_image": MASK, "strength": 1.0},
        ),
        (
            "FluxKontextPipeline",
            {"task": Task.EDIT},
            InputImages((PICTURE,)),
            SCALE | {"image": PICTURE, "_auto_resize": False, "max_area": 64 * 64},
        ),
        ("Flux2Pipeline", {"task": Task.EDIT}, InputImages((PICTURE, OTHER)), SCALE | {"image": [PICTURE, OTHER]}),
        ("GlmImagePipeline", {"task": Task.EDIT}, InputImages((PICTURE,)), SCALE | {"image": [PICTURE]}),
        (
            "QwenImageLayeredPipeline",
            {"task": Task.EDIT, "layers": 3, "guidance_scale": 1.0},
            InputImages((PICTURE,)),
            {"true_cfg_scale": 1.0, "image": PICTURE, "layers": 3, "resolution": 640},
        ),
    ],
)
def test_each_pipeline_is_called_by_its_own_names(
    pipeline: str, fields: dict[str, Any], inputs: InputImages | None, expected: dict[str, Any]
) -> None:
    """Guidance, pictures and time have other names in other families."""
    assert called(pipeline, a_job("x", **fields), inputs) == expected


def between_pictures(pipeline: str, denoiser: dict[str, Any], **config: Any) -> Any:
    """A pipeline of nothing but its configuration and its denoiser's."""
    made = object.__new__(getattr(diffusers, pipeline))
    made.register_to_config(**config)
    made.__dict__["transformer"] = SimpleNamespace(config=SimpleNamespace(**denoiser))
    return made


LATENTS = {"image_dim": None, "pos_embed_seq_len": None}


@pytest.mark.parametrize(
    ("made", "taken"),
    [
        (between_pictures("WanImageToVideoPipeline", LATENTS), None),
        (between_pictures("WanImageToVideoPipeline", LATENTS, expand_timesteps=True), False),
        (between_pictures("WanImageToVideoPipeline", {"image_dim": 16, "pos_embed_seq_len": None}), False),
        (between_pictures("WanImageToVideoPipeline", {"image_dim": 16, "pos_embed_seq_len": 10}), True),
        (between_pictures("LTX2ImageToVideoPipeline", {}), False),
    ],
    ids=["Wan 2.2 I2V", "Wan 2.2 TI2V", "Wan 2.1 I2V", "Wan 2.1 FLF2V", "LTX-2"],
)
def test_a_last_picture_is_taken_where_the_model_looks_at_it(made: Any, taken: bool | None) -> None:
    """Some would ignore it without a word, others fail in words that no client understands."""
    assert takes_last_image(made) is taken
    without = a_job("x", **(CLIP | {"task": Task.IMAGE_TO_VIDEO}))
    given = without.model_copy(update={"last_image": without.images[0]})
    for job, wrong in ((without, taken is True), (given, taken is False)):
        if not wrong:
            arguments_for(made, job, 0, InputImages((PICTURE,)))
            continue
        with pytest.raises(InferenceFailed) as error:
            arguments_for(made, job, 0, InputImages((PICTURE,)))
        assert error.value.param == "last_image"


class Chunks:
    """A pipeline that makes whole chunks of eight frames."""

    def __call__(self, prompt: str, num_frames: int = 8) -> Any:
        made = -(-num_frames // 8) * 8
        return SimpleNamespace(frames=torch.arange(made)[None, :, None, None, None].expand(1, made, 3, 2, 2) / 255)


def test_a_video_has_as_many_frames_as_were_asked_for() -> None:
    """Helios makes whole chunks."""
    arguments = arguments_for(Chunks(), a_job("x", **(CLIP | {"frames": 11})), 0, InputImages())
    (made,) = make_results(Chunks(), arguments)
    assert made.pixels[:, 0, 0, 0].tolist() == list(range(11))


@pytest.mark.parametrize(
    ("pipeline", "tasks"),
    [
        ("StableDiffusionPipeline", {Task.TEXT_TO_IMAGE}),
        ("StableDiffusionImg2ImgPipeline", {Task.IMAGE_TO_IMAGE}),
        ("FluxFillPipeline", {Task.INPAINT}),
        ("FluxKontextPipeline", {Task.TEXT_TO_IMAGE, Task.EDIT}),
        ("Flux2Pipeline", {Task.TEXT_TO_IMAGE, Task.EDIT}),
        ("GlmImagePipeline", {Task.TEXT_TO_IMAGE, Task.EDIT}),
        ("QwenImageEditPlusPipeline", {Task.EDIT}),
        ("QwenImageLayeredPipeline", {Task.EDIT}),
        ("WanPipeline", {Task.TEXT_TO_VIDEO}),
        ("WanImageToVideoPipeline", {Task.IMAGE_TO_VIDEO}),
        ("HeliosPipeline", {Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO}),
        ("LTX2ImageToVideoPipeline", {Task.IMAGE_TO_VIDEO}),
    ],
)
def test_a_class_tells_its_tasks_by_what_its_call_takes(pipeline: str, tasks: set[Task]) -> None:
    """A model's other tasks are for its siblings."""
    made = object.__new__(getattr(diffusers, pipeline))
    assert {task for task in Task if supports(task, made)} == tasks


def test_a_task_that_a_model_has_no_form_for_is_told() -> None:
    """When it is loaded: the models file promised too much."""
    with pytest.raises(ModelUnavailable, match="WanPipeline has no pipeline for edit"):
        pipeline_for(Task.EDIT, object.__new__(diffusers.WanPipeline))


def test_a_video_becomes_frames_of_bytes() -> None:
    """In their order; one with values that are no numbers is an error."""
    video = torch.zeros(3, 3, 2, 5)
    video[1, 0] = 1.0
    frames = to_frames(video)
    assert (frames.shape, frames.dtype) == ((3, 2, 5, 3), np.uint8)
    assert frames[:, 0, 0, 0].tolist() == [0, 255, 0]
    video[2, 1, 1, 1] = float("nan")
    with pytest.raises(NonFiniteLatents):
        to_frames(video)


def test_pixels_are_rounded_like_diffusers_does() -> None:
    """0 to 1 becomes 0 to 255, height x width x 3."""
    image = torch.zeros(3, 2, 5)
    image[0, 1, 4] = 1.0
    image[2, 0, 0] = 0.5
    pixels = to_pixels(image)
    assert pixels.shape == (2, 5, 3)
    assert pixels.dtype == np.uint8
    assert pixels[1, 4].tolist() == [255, 0, 0]
    assert pixels[0, 0].tolist() == [0, 0, 128]


def test_a_picture_with_values_that_are_no_numbers_is_an_error() -> None:
    """Black where a decoder overflowed would pass for a picture."""
    with pytest.raises(NonFiniteLatents):
        to_pixels(torch.full((3, 2, 2), float("nan")))


def test_a_scheduler_by_name_has_the_models_own_configuration() -> None:
    """Only the method changes, not the model's noise schedule."""
    own = DDIMScheduler(beta_start=0.002, prediction_type="v_prediction")
    named = make_scheduler("EulerDiscreteScheduler", own)
    assert isinstance(named, EulerDiscreteScheduler)
    assert named.config["beta_start"] == 0.002
    assert named.config["prediction_type"] == "v_prediction"


@pytest.mark.parametrize("name", ["DiffusionPipeline", "os", "Nothing", "__version__"])
def test_a_name_that_is_no_scheduler_is_refused(name: str) -> None:
    """Nothing else of diffusers can be had by this way."""
    with pytest.raises(ModelUnavailable):
        make_scheduler(name, DDIMScheduler())


def test_steps_are_counted_from_bars_and_from_loops() -> None:
    """Pipelines use a progress bar in both ways; several add up."""
    changes = []
    steps = StepCounter(lambda: changes.append(1))
    with steps(total=2) as bar:
        bar.update()
        bar.set_postfix(loss=1)
        bar.update()
    assert list(steps("abc")) == ["a", "b", "c"]
    assert (steps.step, steps.total, len(changes)) == (5, 5, 5)
