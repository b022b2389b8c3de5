"""Arguments of a pipeline call, and pixels of its output."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from harness.engine import a_job
from PIL import Image

from shared.config.controls import Control
from shared.config.request_limits import Defaults
from shared.errors import InferenceFailed, NonFiniteLatents, UnusableInput
from shared.job import InputRef, Job
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import arguments_for, effective_strength
from worker.engine.pipelines.call_results import make_results, to_frames, to_pixels
from worker.engine.pipelines.ignored_fields import ignored_fields
from worker.engine.pipelines.input_images import InputImages


class Narrow:
    """A pipeline with few parameters."""

    scheduler: Any = None

    def __call__(self, prompt: str, generator: Any, num_inference_steps: int = 1) -> None: ...


class Wide:
    """A pipeline with many parameters."""

    def __call__(
        self,
        prompt: str,
        negative_prompt: str | None = None,
        image: Any = None,
        strength: float = 0.5,
        width: int = 1,
        **_more: Any,
    ) -> None: ...


def test_a_pipeline_gets_only_arguments_that_it_accepts() -> None:
    """An empty negative prompt is omitted too."""
    assert set(arguments_for(Narrow(), a_job("x"), 0, InputImages())) == {"prompt", "generator", "num_inference_steps"}
    assert set(arguments_for(Wide(), a_job("x"), 0, InputImages())) == {"prompt", "width"}
    with_image = arguments_for(
        Wide(), a_job("x", negative_prompt="no", strength=0.7), 0, InputImages((Image.new("RGB", (8, 8)),))
    )
    assert with_image["negative_prompt"] == "no"
    assert with_image["strength"] == 0.7


def test_image_i_has_the_seed_plus_i() -> None:
    """One image of several can be generated again by itself."""
    third = arguments_for(Narrow(), a_job("x", seed=40, n=3), 2, InputImages())["generator"]
    assert torch.equal(torch.randn(4, generator=third), torch.randn(4, generator=torch.Generator().manual_seed(42)))


@pytest.mark.parametrize(("terminal", "steps", "refused"), [(0.02, 1, True), (0.02, 2, False), (None, 1, False)])
def test_one_step_of_a_stretched_schedule_is_refused(terminal: float | None, steps: int, refused: bool) -> None:
    """As of Qwen-Image: diffusers divides by 0, and the image has no numbers."""
    pipeline = Narrow()
    pipeline.scheduler = scheduler = FlowMatchEulerDiscreteScheduler(shift_terminal=terminal)
    with np.errstate(invalid="ignore"):
        scheduler.set_timesteps(sigmas=[1.0] if steps == 1 else [1.0, 0.5])
    assert bool(scheduler.sigmas.isnan().any()) is refused
    expectation = pytest.raises(InferenceFailed, match=r"steps: .* at least 2") if refused else nullcontext()
    with expectation:
        arguments_for(pipeline, a_job("x", steps=steps), 0, InputImages())


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 49, 100, 150])
def test_a_small_strength_runs_one_step(steps: int) -> None:
    """Pipelines run int(steps * strength) steps, and fail with none."""
    assert int(steps * effective_strength(a_job("x", steps=steps, strength=0.001))) == 1
    assert effective_strength(a_job("x", steps=steps, strength=1.0)) == 1.0


def called(pipeline: str, job: Job, inputs: InputImages | None = None) -> dict[str, Any]:
    """Return the arguments for diffusers' class, which is not constructed, without those common to all classes."""
    instance = object.__new__(getattr(diffusers, pipeline))
    common = {"prompt", "width", "height", "num_inference_steps", "generator", "output_type"}
    return {
        name: value
        for name, value in arguments_for(instance, job, 0, inputs or InputImages()).items()
        if name not in common
    }


IMAGE, OTHER, MASK = Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), "red"), Image.new("L", (8, 8))
CLIP: dict[str, Any] = {"task": Task.TEXT_TO_VIDEO, "frames": 9, "fps": 24}
SCALE = {"guidance_scale": 4.0}


@pytest.mark.parametrize(
    ("pipeline", "fields", "ignored"),
    [
        ("StableDiffusionPipeline", {"negative_prompt": "no"}, []),
        ("QwenImagePipeline", {"negative_prompt": "no"}, []),
        ("FluxPipeline", {}, []),
        ("FluxPipeline", {"negative_prompt": "no"}, ["negative_prompt"]),  # it takes one for a true_cfg_scale only
        ("HunyuanVideoPipeline", {"negative_prompt": "no"} | CLIP, ["negative_prompt"]),
        ("ChromaInpaintPipeline", {"task": Task.INPAINT, "negative_prompt": "no", "strength": 0.5}, []),
        ("Flux2Pipeline", {"negative_prompt": "no"}, ["negative_prompt"]),
        ("FluxImg2ImgPipeline", {"strength": 0.5}, []),
        ("KandinskyInpaintPipeline", {"task": Task.INPAINT, "strength": 0.5}, ["strength"]),
        ("KandinskyInpaintPipeline", {"task": Task.INPAINT, "strength": 1.0}, []),
        ("KandinskyInpaintPipeline", {"task": Task.INPAINT, "strength": 0.7}, ["strength"]),
        ("FluxPipeline", {"negative_prompt": "of the model"}, []),
        ("StableVideoDiffusionPipeline", {"task": Task.IMAGE_TO_VIDEO, "frames": 5, "fps": 7}, ["prompt"]),
        ("StableVideoDiffusionPipeline", {"task": Task.IMAGE_TO_VIDEO, "prompt": "", "frames": 5, "fps": 7}, []),
        ("Flux2Pipeline", {"task": Task.IMAGE_TO_IMAGE, "strength": 0.6}, ["strength"]),
        ("Flux2Pipeline", {"task": Task.IMAGE_TO_IMAGE, "strength": 0.7}, []),
    ],
)
def test_a_field_that_a_pipeline_does_not_use_has_a_warning(
    pipeline: str, fields: dict[str, Any], ignored: list[str]
) -> None:
    """Unless it has the model's default, which jobs have that were sent without the field."""
    defaults = Defaults(negative_prompt="of the model", strength=0.7)
    instance = object.__new__(getattr(diffusers, pipeline))
    assert [warning.param for warning in ignored_fields(instance, a_job("x", **fields), defaults)] == ignored


def test_a_rate_that_does_not_fit_the_sound_of_a_video_fails_the_job() -> None:
    """That the model has one rate is not known of one on the hub until a worker has loaded it."""
    pipeline = type("MiniMaxH3ModularPipeline", (Narrow,), {})()
    job = a_job("x", task=Task.TEXT_TO_VIDEO, frames=5, fps=12)
    with pytest.raises(InferenceFailed, match="fps: videos of model 'tiny' have 24, not 12") as error:
        arguments_for(pipeline, job, 0, InputImages())
    assert error.value.param == "fps"
    assert arguments_for(pipeline, job.model_copy(update={"fps": 24}), 0, InputImages())


@pytest.mark.parametrize("pipeline", ["SanaControlNetPipeline", "HunyuanDiTControlNetPipeline"])
def test_a_control_of_some_steps_is_refused_by_pipelines_that_apply_it_to_all(pipeline: str) -> None:
    job = a_job("x", controls=(Control(id="edges"), Control(id="depth", end=0.5)))
    with pytest.raises(UnusableInput, match="remove start and end") as error:
        called(pipeline, job, InputImages(controls=(IMAGE, IMAGE)))
    assert error.value.param == "controls.1.end"


@pytest.mark.parametrize(
    ("pipeline", "fields", "reason"),
    [
        ("FluxPipeline", {"negative_prompt": "no"}, "uses one only with a true_cfg_scale above 1"),
        ("FluxPipeline", {"true_cfg_scale": 3.0}, "uses one only with a negative_prompt"),
        ("Flux2Pipeline", {"negative_prompt": "no"}, "takes none for text_to_image"),
    ],
)
def test_a_warning_says_with_what_a_field_counts(pipeline: str, fields: dict[str, Any], reason: str) -> None:
    instance = object.__new__(getattr(diffusers, pipeline))
    (warning,) = ignored_fields(instance, a_job("x", **fields), Defaults())
    assert warning.message == f"{warning.param}: ignored; model 'tiny' {reason}"


@pytest.mark.parametrize(
    ("pipeline", "fields", "inputs", "expected"),
    [
        ("FluxPipeline", {"negative_prompt": "no"}, None, SCALE | {"negative_prompt": "no"}),
        ("QwenImagePipeline", {}, None, {"true_cfg_scale": 4.0, "negative_prompt": " "}),
        ("QwenImagePipeline", {"guidance_scale": 1.0}, None, {"true_cfg_scale": 1.0}),
        ("QwenImagePipeline", {"negative_prompt": ""}, None, {"true_cfg_scale": 4.0, "negative_prompt": ""}),
        ("QwenImagePipeline", {"negative_prompt": "no"}, None, {"true_cfg_scale": 4.0, "negative_prompt": "no"}),
        ("WanPipeline", CLIP, None, SCALE | {"num_frames": 9}),
        ("WanPipeline", CLIP | {"guidance_scale_2": 3.0}, None, SCALE | {"num_frames": 9, "guidance_scale_2": 3.0}),
        (
            "WanImageToVideoPipeline",
            CLIP | {"task": Task.IMAGE_TO_VIDEO},
            InputImages((IMAGE,), last_image=OTHER),
            SCALE | {"num_frames": 9, "image": IMAGE, "last_image": OTHER},
        ),
        ("LTX2Pipeline", CLIP, None, SCALE | {"num_frames": 9, "frame_rate": 24.0}),
        ("SanaVideoPipeline", CLIP, None, SCALE | {"frames": 9}),
        ("LattePipeline", CLIP, None, SCALE | {"video_length": 9}),
        (
            "HeliosPyramidPipeline",
            CLIP | {"steps": 8},
            None,
            SCALE | {"num_frames": 9, "pyramid_num_inference_steps_list": [3, 3, 2]},
        ),
        (
            "StableDiffusionInpaintPipeline",
            {"task": Task.INPAINT, "strength": 1.0},
            InputImages((IMAGE,), MASK),
            SCALE | {"image": IMAGE, "mask_image": MASK, "strength": 1.0},
        ),
        (
            "FluxKontextPipeline",
            {"task": Task.EDIT},
            InputImages((IMAGE,)),
            SCALE | {"image": IMAGE, "_auto_resize": False, "max_area": 64 * 64},
        ),
        ("Flux2Pipeline", {"task": Task.EDIT}, InputImages((IMAGE, OTHER)), SCALE | {"image": [IMAGE, OTHER]}),
        ("GlmImagePipeline", {"task": Task.EDIT}, InputImages((IMAGE,)), SCALE | {"image": [IMAGE]}),
        (
            "QwenImageLayeredPipeline",
            {"task": Task.EDIT, "layers": 3, "guidance_scale": 1.0},
            InputImages((IMAGE,)),
            {"true_cfg_scale": 1.0, "image": IMAGE, "layers": 3, "resolution": 640},
        ),
    ],
)
def test_each_pipeline_gets_its_own_argument_names(
    pipeline: str, fields: dict[str, Any], inputs: InputImages | None, expected: dict[str, Any]
) -> None:
    """Guidance, images and frames have different names in the families."""
    assert called(pipeline, a_job("x", **fields), inputs) == expected


@pytest.mark.parametrize(("faces", "frames", "param"), [(0, 5, "face_video"), (5, 1, "frames")])
def test_an_image_is_animated_by_at_least_two_poses_and_as_many_faces(faces: int, frames: int, param: str) -> None:
    job = a_job("one", task=Task.ANIMATE, frames=frames, fps=8)
    with pytest.raises(UnusableInput) as refused:
        called("WanAnimatePipeline", job, InputImages((IMAGE,), video=(IMAGE,) * frames, face_video=(OTHER,) * faces))
    assert refused.value.param == param


def test_poses_are_cropped_to_the_size_of_the_job_and_faces_are_not() -> None:
    job = a_job("one", task=Task.ANIMATE, frames=5, fps=8, width=32, height=16)
    wide = Image.new("RGB", (64, 16))
    made = called("WanAnimatePipeline", job, InputImages((IMAGE,), video=(wide,) * 5, face_video=(wide,) * 5))
    assert [frame.size for frame in made["pose_video"]] == [(32, 16)] * 5
    assert [frame.size for frame in made["face_video"]] == [(64, 16)] * 5
    assert made["segment_frame_length"] == 5


@pytest.mark.parametrize("factor", [0, -1, 3, 10**9])
def test_a_factor_that_leaves_nothing_of_a_video_to_follow_is_refused(factor: int) -> None:
    pipeline = object.__new__(diffusers.LTX2InContextPipeline)
    vars(pipeline)["vae_spatial_compression_ratio"] = 32
    job = a_job("one", task=Task.VIDEO_TO_VIDEO, frames=9, fps=8, width=96, height=64)
    inputs = InputImages(video=(IMAGE,) * 9)
    fits = arguments_for(pipeline, job.model_copy(update={"extra": {"reference_downscale_factor": 2}}), 0, inputs)
    assert fits["reference_downscale_factor"] == 2
    with pytest.raises(UnusableInput, match="it must be 1 to 2") as caught:
        arguments_for(pipeline, job.model_copy(update={"extra": {"reference_downscale_factor": factor}}), 0, inputs)
    assert caught.value.param == "extra.reference_downscale_factor"


def extending(frames: int, video: int) -> Job:
    ref = InputRef(id="in_1", key="k", content_type="video/mp4", bytes=1, width=8, height=8, frames=video, fps=24.0)
    return a_job("one", task=Task.EXTEND_VIDEO, frames=frames, fps=24, width=8, height=8, video=ref)


def test_frames_that_vace_is_to_make_are_grey_and_masked() -> None:
    made = called("WanVACEPipeline", extending(5, 2), InputImages(video=(OTHER,) * 2))
    assert [frame.getpixel((3, 3)) for frame in made["video"]] == [(255, 0, 0)] * 2 + [(128, 128, 128)] * 3
    assert [frame.getpixel((3, 3)) for frame in made["mask"]] == [0] * 2 + [255] * 3


@pytest.mark.parametrize(("video", "message"), [(9, ""), (12, "goes on from frame 9 of 12")])
def test_a_video_goes_on_from_the_last_whole_group_of_frames(video: int, message: str) -> None:
    pipeline = object.__new__(diffusers.LTX2ConditionPipeline)
    vars(pipeline)["vae_temporal_compression_ratio"] = 8
    job = extending(17, video)
    warnings = ignored_fields(pipeline, job, Defaults(steps=job.steps))
    assert message in (warnings[0].message if message else "")
    assert len(warnings) == bool(message)


def test_faces_that_a_pipeline_does_not_use_have_a_warning() -> None:
    job = a_job("one", task=Task.ANIMATE, frames=5, fps=8)
    pipeline = object.__new__(diffusers.WanVideoToVideoPipeline)
    assert [warning.param for warning in ignored_fields(pipeline, job, Defaults(steps=job.steps))] == ["face_video"]


def test_a_changed_video_is_as_long_as_the_frames_of_it_that_were_sent() -> None:
    """CogVideoX decodes the two latents of 5 frames to 8."""

    class Longer:
        def __call__(self, prompt: str, video: list[Any]) -> Any:
            return SimpleNamespace(frames=torch.zeros(1, 8, 3, 8, 8))

    job = a_job("x", task=Task.VIDEO_TO_VIDEO, frames=5, fps=8)
    arguments = arguments_for(Longer(), job, 0, InputImages(video=(IMAGE,) * 5))
    (output,) = make_results(Longer(), arguments)
    assert len(output.pixels) == 5


class Chunks:
    """A pipeline that returns whole chunks of eight frames."""

    def __call__(self, prompt: str, num_frames: int = 8) -> Any:
        frames = -(-num_frames // 8) * 8
        return SimpleNamespace(frames=torch.arange(frames)[None, :, None, None, None].expand(1, frames, 3, 2, 2) / 255)


def test_a_video_has_the_requested_number_of_frames() -> None:
    """Helios returns whole chunks."""
    arguments = arguments_for(Chunks(), a_job("x", **(CLIP | {"frames": 11})), 0, InputImages())
    (output,) = make_results(Chunks(), arguments)
    assert output.pixels[:, 0, 0, 0].tolist() == list(range(11))


LEVELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
TENSOR = torch.from_numpy(LEVELS).permute(2, 0, 1) / 255
ARRAY = LEVELS.astype(np.float32) / 255
PIL = Image.fromarray(LEVELS)


@pytest.mark.parametrize(
    ("result", "count"),
    [
        pytest.param({"images": TENSOR[None]}, 1, id="a tensor"),
        pytest.param({"images": [TENSOR]}, 1, id="a list of tensors"),
        pytest.param({"images": ARRAY[None]}, 1, id="an array"),
        pytest.param({"images": [PIL]}, 1, id="a PIL image"),
        pytest.param({"image": TENSOR[None]}, 1, id="a field of its own, as of Kandinsky 5"),
        pytest.param({"images": [torch.stack([TENSOR, TENSOR])]}, 2, id="layers as tensors"),
        pytest.param({"images": [[PIL, PIL]]}, 2, id="layers as PIL images"),
    ],
)
def test_an_image_is_read_in_whatever_form_a_pipeline_returns_it(result: dict[str, Any], count: int) -> None:
    outputs = make_results(lambda: SimpleNamespace(**result), {})
    assert [output.pixels.tolist() for output in outputs] == [LEVELS.tolist()] * count


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(torch.stack([TENSOR, TENSOR])[None], id="a tensor"),
        pytest.param(np.stack([ARRAY, ARRAY])[None], id="an array"),
        pytest.param([[PIL, PIL]], id="PIL images"),
    ],
)
def test_a_video_is_read_in_whatever_form_a_pipeline_returns_it(frames: Any) -> None:
    (output,) = make_results(lambda: SimpleNamespace(frames=frames), {})
    assert output.pixels.tolist() == [LEVELS.tolist()] * 2


@pytest.mark.parametrize(
    "result",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"images": []}, id="no image"),
        pytest.param({"images": torch.zeros(2, 3, 4, 4)}, id="two images"),
        pytest.param({"images": torch.zeros(1, 4)}, id="embeddings"),
        pytest.param({"images": ["text"]}, id="a text"),
    ],
)
def test_an_output_that_is_not_exactly_one_image_is_an_error(result: dict[str, Any]) -> None:
    """It names the pipeline's class."""
    with pytest.raises(InferenceFailed, match="function"):
        make_results(lambda: SimpleNamespace(**result), {})


@pytest.mark.parametrize("field", ["nsfw_content_detected", "nsfw_detected", "watermark_detected"])
def test_an_image_is_flagged_by_any_finding_of_a_safety_checker(field: str) -> None:
    """DeepFloyd IF's checker also finds watermarks of others."""
    for found in ([True], [False], None):
        (output,) = make_results(lambda found=found: SimpleNamespace(images=TENSOR[None], **{field: found}), {})
        assert output.flagged is bool(found and found[0])


def test_a_video_is_converted_to_frames_of_bytes() -> None:
    """In order; a frame with values that are not numbers is an error."""
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


def test_values_outside_of_0_to_1_do_not_wrap() -> None:
    """They become black and white."""
    image = torch.tensor([-9.0, -0.01, 0.0, 1.0, 1.004, 300.0]).view(1, 2, 3)
    assert to_pixels(image).flatten().tolist() == [0, 0, 0, 255, 255, 255]


def test_an_image_with_values_that_are_not_numbers_is_an_error() -> None:
    """The black image of a decoder overflow would look like a result."""
    with pytest.raises(NonFiniteLatents):
        to_pixels(torch.full((3, 2, 2), float("nan")))
