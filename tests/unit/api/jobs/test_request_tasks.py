"""The task of a request, its images, frames and layers in the job, and what no batch can hold."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from api.jobs.job_builder import make_submission, with_inputs
from api.jobs.request import JobRequest, parse
from api.jobs.request_images import Inputs, check_input_sizes
from api.jobs.resolve import resolve, resolve_for_model
from shared.config.batch_rules import BatchRule, BatchRules
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits, References
from shared.config.settings import Settings
from shared.config.step_schedules import StepCaching, StepSchedule
from shared.errors import InputRejected, InvalidRequest
from shared.job import InputRef, Job, encode
from shared.signature import signature
from shared.tasks import OutputFormat, Task

T2I, I2I, PAINT, EDIT, T2V, I2V, V2V, MOVE, MESH = (
    Task.TEXT_TO_IMAGE,
    Task.IMAGE_TO_IMAGE,
    Task.INPAINT,
    Task.EDIT,
    Task.TEXT_TO_VIDEO,
    Task.IMAGE_TO_VIDEO,
    Task.VIDEO_TO_VIDEO,
    Task.ANIMATE,
    Task.IMAGE_TO_MESH,
)
VIDEO: dict[str, Any] = {
    "defaults": Defaults(frames=17, fps=16, guidance_scale_2=3.0),
    "limits": Limits(max_frames=81, frames_multiple=4, last_image="allowed", max_duration_s=60),
}
SPECS = (
    ModelSpec(id="painter", source="x", tasks=(T2I, I2I, PAINT)),
    ModelSpec(id="words", source="x", tasks=(T2I,)),
    ModelSpec(id="editor", source="x", tasks=(EDIT,), limits=Limits(max_input_images=3)),
    ModelSpec(id="everything", source="x", tasks=tuple(task for task in Task if not task.makes_mesh), **VIDEO),
    ModelSpec(id="sculptor", source="x", tasks=(MESH,), limits=Limits(max_input_images=4)),
    ModelSpec(id="film", source="x", tasks=(T2V, I2V), **VIDEO),
    ModelSpec(id="remix", source="x", tasks=(T2V, V2V), **VIDEO),
    ModelSpec(id="longer", source="x", tasks=(T2V, Task.EXTEND_VIDEO), **VIDEO),
    ModelSpec(id="a-little-longer", source="x", tasks=(T2V, Task.EXTEND_VIDEO), limits=Limits(max_frames=33)),
    ModelSpec(id="enlarger", source="x", tasks=(Task.UPSCALE_VIDEO,), **VIDEO),
    ModelSpec(id="mimic", source="x", tasks=(MOVE,), **VIDEO),
    ModelSpec(id="open-end", source="x", tasks=(T2V, I2V), limits=Limits(max_frames=81)),
    ModelSpec(id="both-ends", source="x", tasks=(I2V,), limits=Limits(max_frames=81, last_image="needed")),
    ModelSpec(
        id="cached",
        source="x",
        step_cache=StepCaching(default="medium", allowed=("medium",), medium=StepSchedule(every=5)),
    ),
    ModelSpec(id="layered", source="x", tasks=(EDIT,), defaults=Defaults(layers=4), limits=Limits(max_layers=8)),
)
CATALOG = Catalog(SPECS)


def ref(width: int = 512, height: int = 512) -> InputRef:
    return InputRef(id="in_1", key="k", content_type="image/png", bytes=1, width=width, height=height)


def a_video(**fields: Any) -> InputRef:
    values = {"content_type": "video/mp4", "width": 640, "height": 360, "frames": 40, "fps": 29.97}
    return ref().model_copy(update=values | fields)


def job_of(body: dict[str, Any], *sizes: tuple[int, int], mask: tuple[int, int] | None = None) -> Job:
    """Resolve a request whose images have these sizes."""
    request = parse({**({} if body["model"] == "sculptor" else {"prompt": "x"}), **body})
    several = request.images or ((request.image,) if request.image else ())
    images = tuple(ref(*size) for size in (sizes or ((512, 512),) * len(several)))
    inputs = Inputs(
        images=images,
        mask=None if request.mask is None else ref(*(mask or (512, 512))),
        last_image=None if request.last_image is None else ref(),
        video=None if request.video is None else a_video(),
    )
    spec = CATALOG.get(request.model)
    return with_inputs(resolve_for_model(request, spec, "t", 0), request, spec, inputs)


@pytest.mark.parametrize(
    ("model", "body", "task"),
    [
        ("painter", {}, T2I),
        ("painter", {"image": "i"}, I2I),
        ("painter", {"images": ["i"]}, I2I),
        ("painter", {"image": "i", "strength": 0.4}, I2I),
        ("painter", {"image": "i", "mask": "m"}, PAINT),
        ("painter", {"image": "i", "mask": "m", "strength": 0.4}, PAINT),
        ("editor", {"image": "i"}, EDIT),
        ("editor", {"images": ["i", "j", "k"]}, EDIT),
        ("film", {}, T2V),
        ("film", {"image": "i"}, I2V),
        ("film", {"image": "i", "last_image": "l"}, I2V),
        ("open-end", {}, T2V),
        ("both-ends", {"image": "i", "last_image": "l"}, I2V),
        ("everything", {"task": "edit", "image": "i"}, EDIT),
        ("everything", {"task": "image_to_video", "image": "i"}, I2V),
        ("everything", {"image": "i", "strength": 0.5}, I2I),
        ("everything", {"image": "i", "mask": "m"}, PAINT),
        ("everything", {"frames": 5}, T2V),
        ("everything", {"image": "i", "frames": 5}, I2V),
        ("everything", {"image": "i", "last_image": "j"}, I2V),
        ("everything", {"task": "text_to_image"}, T2I),
        ("sculptor", {"image": "i"}, MESH),
        ("sculptor", {"images": ["i", "j", "k", "l"]}, MESH),
        ("remix", {"video": "v"}, V2V),
        ("remix", {"video": "v", "strength": 0.5, "frames": 5}, V2V),
        ("remix", {}, T2V),
        ("mimic", {"video": "v", "image": "i"}, MOVE),
        ("everything", {"video": "v", "strength": 0.5}, V2V),
        ("everything", {"video": "v", "task": "extend_video"}, Task.EXTEND_VIDEO),
        ("longer", {"video": "v"}, Task.EXTEND_VIDEO),
        ("everything", {"video": "v", "image": "i"}, MOVE),
        ("enlarger", {"video": "v", "prompt": ""}, Task.UPSCALE_VIDEO),
    ],
)
def test_the_task_follows_from_the_fields_and_the_model(model: str, body: dict[str, Any], task: Task) -> None:
    """A client need not name the only possible task."""
    assert job_of({"model": model, **body}).task is task


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        ("words", {"image": "i"}, "image"),
        ("words", {"images": ["i"]}, "images"),
        ("words", {"image": "i", "mask": "m"}, "mask"),
        ("words", {"image": "i", "strength": 0.5}, "strength"),
        ("words", {"task": "edit", "image": "i"}, "task"),
        ("words", {"frames": 5}, "frames"),
        ("words", {"fps": 5}, "fps"),
        ("words", {"layers": 2}, "layers"),
        ("words", {"strength": 0.5}, "strength"),
        ("words", {"guidance_scale_2": 2}, "guidance_scale_2"),
        ("words", {"output_format": "mp4"}, "output_format"),
        ("painter", {"mask": "m"}, "image"),
        ("painter", {"last_image": "l"}, "last_image"),
        ("painter", {"image": "i", "images": ["j"]}, "images"),
        ("painter", {"images": ["i", "j"]}, "images"),
        ("painter", {"task": "text_to_image", "image": "i"}, "image"),
        ("painter", {"task": "image_to_image"}, "image"),
        ("painter", {"task": "inpaint", "image": "i"}, "mask"),
        ("painter", {"task": "image_to_image", "image": "i", "mask": "m"}, "mask"),
        ("editor", {}, "image"),
        ("editor", {"image": "i", "strength": 0.5}, "strength"),
        ("editor", {"images": ["i", "j", "k", "l"]}, "images"),
        ("editor", {"images": []}, "images"),
        ("film", {"images": ["i", "j"]}, "images"),
        ("open-end", {"image": "i", "last_image": "l"}, "last_image"),
        ("both-ends", {"image": "i"}, "last_image"),
        ("film", {"frames": 16}, "frames"),
        ("film", {"frames": 85}, "frames"),
        ("film", {"frames": 0}, "frames"),
        ("film", {"frames": 5.0}, "frames"),
        ("film", {"fps": 0}, "fps"),
        ("film", {"fps": 1000}, "fps"),
        ("film", {"layers": 2}, "layers"),
        ("film", {"output_format": "png"}, "output_format"),
        ("film", {"guidance_scale_2": 31}, "guidance_scale_2"),
        ("layered", {"image": "i", "layers": 9}, "layers"),
        ("sculptor", {}, "image"),
        ("sculptor", {"images": ["i", "j", "k", "l", "m"]}, "images"),
        *(
            ("sculptor", {"image": "i", name: value}, name)
            for name, value in (
                ("prompt", "a chair"),
                ("negative_prompt", "legs"),
                ("width", 512),
                ("height", 512),
                ("frames", 1),
                ("fps", 24),
                ("layers", 1),
                ("strength", 0.5),
                ("mask", "m"),
                ("last_image", "l"),
                ("scheduler", "euler"),
                ("scheduler_options", {"shift": 2}),
                ("output_format", "png"),
                ("denoising_end", 0.5),
                ("steps", 151),
                ("n", 9),
            )
        ),
        ("sculptor", {"image": "i", "extra": {"octree_resolution": 64}}, "extra.octree_resolution"),
        ("words", {"output_format": "glb"}, "output_format"),
        ("everything", {"image": "i"}, "task"),
        ("everything", {}, "task"),
        ("everything", {"video": "v"}, "task"),
        ("longer", {"task": "extend_video"}, "video"),
        ("longer", {"video": "v", "strength": 0.5}, "strength"),
        ("everything", {"task": "paint"}, "task"),
        ("film", {"video": "v"}, "video"),
        ("words", {"video": "v", "image": "i"}, "video"),
        ("remix", {"video": "v", "image": "i"}, "video"),
        ("remix", {"task": "video_to_video"}, "video"),
        ("remix", {"task": "text_to_video", "video": "v"}, "video"),
        ("remix", {"task": "video_to_video", "video": "v", "image": "i"}, "image"),
        ("remix", {"strength": 0.5}, "strength"),
        ("remix", {"video": "v", "last_image": "l"}, "last_image"),
        ("enlarger", {}, "video"),
        ("enlarger", {"image": "i"}, "video"),
        ("enlarger", {"image": "i", "task": "upscale"}, "task"),
        ("enlarger", {"video": "v", "image": "i"}, "video"),
        ("enlarger", {"video": "v", "strength": 0.5}, "strength"),
        ("enlarger", {"video": "v", "frames": 45}, "frames"),
        ("enlarger", {"video": "v", "output_format": "png"}, "output_format"),
        ("mimic", {"video": "v"}, "video"),
        ("mimic", {"image": "i"}, "video"),
        ("mimic", {"image": "i", "video": "v", "strength": 0.5}, "strength"),
        ("editor", {"image": "i", "video": "v"}, "video"),
        ("film", {"audio": "a", "video": "v"}, "audio"),
        ("remix", {"repaint_end_s": 2.0, "audio": "a", "video": "v"}, "repaint_end_s"),
        ("remix", {"video": "v", "frames": 45}, "frames"),
        ("longer", {"video": "v", "frames": 37}, "frames"),
        ("a-little-longer", {"video": "v"}, "video"),
        ("a-little-longer", {"video": "v", "frames": 33}, "video"),
        ("remix", {"video": "v", "frames": 16}, "frames"),
    ],
)
def test_a_conflicting_field_is_refused_by_name(model: str, body: dict[str, Any], param: str) -> None:
    """The error names the field to change."""
    with pytest.raises(InvalidRequest) as caught:
        job_of({"model": model, **body})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "frames", "fps"), [({}, 81, 30), ({"frames": 45}, 45, 30), ({"fps": 10}, 17, 10), ({"fps": 12}, 17, 12)]
)
def test_a_video_that_is_extended_has_more_frames_than_were_sent(fields: dict[str, Any], frames: int, fps: int) -> None:
    """It has 40 frames at its own rate, and 14 and 16 at the others."""
    job = job_of({"model": "longer", "video": "v", **fields})
    assert (job.frames, job.fps, job.width, job.height) == (frames, fps, 640, 360)


@pytest.mark.parametrize("prompt", [{}, {"prompt": ""}])
def test_a_mesh_needs_no_prompt_and_its_thumbnail_has_the_models_size(prompt: dict[str, str]) -> None:
    job = job_of({"model": "sculptor", "image": "i", **prompt}, (300, 200))
    assert (job.prompt, job.output_format, job.width, job.height) == ("", OutputFormat.GLB, 512, 512)


@pytest.mark.parametrize(("prompt", "fault"), [({}, "prompt: Field required"), ({"prompt": ""}, "prompt: it is empty")])
def test_other_models_need_a_prompt(prompt: dict[str, str], fault: str) -> None:
    """It has no default, though the schema cannot say for which models."""
    with pytest.raises(InvalidRequest) as caught:
        resolve_for_model(parse({"model": "words", **prompt}), CATALOG.get("words"), "t", 0)
    assert (caught.value.param, caught.value.message) == ("prompt", fault)


@pytest.mark.parametrize(
    "fields",
    [
        {"tasks": (MESH, T2I)},
        {"checkpoint": "/a.safetensors"},
        {"vae": "/a.safetensors"},
        {"offload": "group"},
        {"devices": 2},
        {"schedulers": ("euler",)},
        {"defaults": Defaults(scheduler="euler")},
        {"prompt_syntax": "weights"},
    ],
)
def test_what_a_model_of_meshes_cannot_have_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a model of meshes (takes none|does image_to_mesh only)"):
        ModelSpec(**{"id": "m", "source": "x", "tasks": (MESH,), **fields})


@pytest.mark.parametrize(
    ("sent", "video", "frames", "fps"),
    [
        ({}, {}, 37, 30),
        ({}, {"frames": 500}, 81, 30),
        ({}, {"frames": 3}, 1, 30),
        ({"frames": 5}, {}, 5, 30),
        ({"fps": 15}, {}, 17, 15),  # 20 frames of every second one
        ({"fps": 60}, {}, 77, 60),
        ({}, {"fps": 0.2}, 81, 1),
        ({}, {"fps": 240.0}, 17, 120),
    ],
)
def test_length_and_rate_follow_from_the_video(
    sent: dict[str, Any], video: dict[str, Any], frames: int, fps: int
) -> None:
    """Cut to what the model makes: a multiple plus one."""
    request, spec = parse({"prompt": "x", "model": "remix", "video": "v", **sent}), CATALOG.get("remix")
    job = with_inputs(resolve_for_model(request, spec, "t", 0), request, spec, Inputs(video=a_video(**video)))
    assert (job.frames, job.fps) == (frames, fps)
    assert (job.width, job.height) == (640, 360)
    assert signature(job) == signature(job.model_copy(update={"video": None, "task": T2V, "strength": None}))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_input_frames": 39}, "video: it has 40 frames; model 'remix' takes at most 39"),
        ({"max_input_video_pixels": 640 * 359}, "230400 pixels in a frame; model 'remix' takes at most 229760"),
        ({"max_input_video_bytes": 1}, "2 bytes; model 'remix' takes at most 1"),
    ],
)
def test_the_model_bounds_the_video(limits: dict[str, Any], words: str) -> None:
    spec = CATALOG.get("remix").model_copy(update={"limits": Limits(max_frames=81, frames_multiple=4, **limits)})
    request = parse({"prompt": "x", "model": "remix", "video": "v"})
    with pytest.raises(InvalidRequest, match=words) as refused:
        with_inputs(resolve_for_model(request, spec, "t", 0), request, spec, Inputs(video=a_video(bytes=2)))
    assert refused.value.param == "video"


def test_frames_that_a_video_hides_count_as_well() -> None:
    """They are decoded too."""
    limits = Limits(max_frames=81, frames_multiple=4, max_input_frames=100)
    spec = CATALOG.get("remix").model_copy(update={"limits": limits})
    request = parse({"prompt": "x", "model": "remix", "video": "v"})
    with pytest.raises(InvalidRequest, match="it has 101 frames, 61 of them hidden by its edit list; model 'remix'"):
        with_inputs(resolve_for_model(request, spec, "t", 0), request, spec, Inputs(video=a_video(hidden_frames=61)))


def test_a_video_gets_the_length_and_rate_of_its_model() -> None:
    """It is an MP4 by default; images have no length and rate."""
    silent = job_of({"model": "film"})
    assert (silent.frames, silent.fps, silent.output_format) == (17, 16, OutputFormat.MP4)
    assert silent.guidance_scale_2 == 3.0
    asked = job_of({"model": "film", "frames": 81, "fps": 24, "output_format": "mp4", "guidance_scale_2": 1.5})
    assert (asked.frames, asked.fps, asked.guidance_scale_2) == (81, 24, 1.5)
    most = ModelSpec(id="m", source="x", tasks=(T2V,), limits=Limits(max_frames=100, frames_multiple=8))
    request = parse({"model": "m", "prompt": "x"})
    assert resolve_for_model(request, most, "t", 0).frames == 97
    image = job_of({"model": "painter"})
    assert (image.frames, image.fps, image.output_format) == (1, None, OutputFormat.PNG)


LONG = ModelSpec(
    id="long", source="x", tasks=(T2V, V2V), limits=Limits(min_frames=35, max_frames=120, frames_multiple=17)
)


def test_a_video_is_not_shorter_than_its_model_makes() -> None:
    """As asked for, or as the frames of a video that it changes."""
    with pytest.raises(InvalidRequest, match="frames must be 35 to 120, a multiple of 17 plus 1, not 18") as short:
        resolve_for_model(parse({"prompt": "x", "model": "long", "frames": 18}), LONG, "t", 0)
    request = parse({"prompt": "x", "model": "long", "video": "v"})
    job = resolve_for_model(request, LONG, "t", 0)
    with pytest.raises(InvalidRequest, match="it has 30 frames at 30 fps; model 'long' makes at least 35") as source:
        with_inputs(job, request, LONG, Inputs(video=a_video(frames=30)))
    assert (short.value.param, source.value.param) == ("frames", "video")
    assert with_inputs(job, request, LONG, Inputs(video=a_video())).frames == 35


def test_a_model_with_one_rate_refuses_others() -> None:
    spec = LONG.model_copy(update={"limits": Limits(max_frames=120, fps=24)})
    for fps in ({}, {"fps": 24}):
        assert resolve_for_model(parse({"prompt": "x", "model": "long", **fps}), spec, "t", 0).fps == 24
    with pytest.raises(InvalidRequest, match="fps: videos of model 'long' have 24, not 12") as error:
        resolve_for_model(parse({"prompt": "x", "model": "long", "fps": 12}), spec, "t", 0)
    assert error.value.param == "fps"


def test_the_default_strength_under_a_mask_is_1() -> None:
    """Without a mask, the image is kept in part."""
    assert job_of({"model": "painter", "image": "i", "mask": "m"}).strength == 1.0
    assert job_of({"model": "painter", "image": "i"}).strength == 0.6
    assert job_of({"model": "editor", "image": "i"}).strength is None


@pytest.mark.parametrize(
    ("mask", "fits"),
    [((512, 256), True), ((256, 128), True), ((171, 85), True), ((256, 256), False), ((512, 272), False)],
)
def test_a_mask_has_the_proportions_of_its_image(mask: tuple[int, int], fits: bool) -> None:
    """Both are cropped to the job's size in the same way; scaling a mask can lose a pixel."""
    body = {"model": "painter", "image": "i", "mask": "m"}
    if fits:
        assert job_of(body, (512, 256), mask=mask).mask is not None
        return
    with pytest.raises(InvalidRequest) as caught:
        job_of(body, (512, 256), mask=mask)
    assert caught.value.param == "mask"


def test_an_edited_image_keeps_its_proportions_by_default() -> None:
    """With about the default number of pixels of the model."""
    wide = job_of({"model": "editor", "image": "i"}, (1920, 1080))
    assert (wide.width, wide.height) == (680, 384)
    assert (job_of({"model": "editor", "image": "i"}, (100, 5000)).width) == 512, "too long for the model's limits"
    chosen = job_of({"model": "editor", "image": "i", "width": 512}, (1920, 1080))
    assert (chosen.width, chosen.height) == (512, 512)


def test_layers_default_to_those_of_the_model() -> None:
    """Models without layers have 0."""
    assert job_of({"model": "layered", "image": "i"}).layers == 4
    assert job_of({"model": "layered", "image": "i", "layers": 6}).layers == 6
    assert job_of({"model": "editor", "image": "i"}).layers == 0


@pytest.mark.parametrize(
    ("size", "rule", "expected"),
    [
        ((1024, 1024), {}, (1024, 1024)),
        ((4096, 4096), {}, (1024, 1024)),
        ((1920, 1080), {}, (1376, 768)),
        ((3840, 2160), {}, (1376, 768)),
        ((300, 200), {}, (288, 192)),
        ((300, 200), {"enlarge": True}, (1248, 832)),
        ((300, 200), {"multiple_of": 8}, (304, 200)),
        ((1, 1), {}, (32, 32)),
        ((40_000, 1), {"enlarge": True}, (32768, 32)),
    ],
)
def test_images_to_edit_are_scaled_to_few_sizes(
    size: tuple[int, int], rule: dict[str, Any], expected: tuple[int, int]
) -> None:
    """The size of a photograph does not separate jobs, and no image exceeds the area."""
    made = References(**rule).size_for(*size)
    assert made == expected
    assert made[0] * made[1] <= 1.1 * 1024 * 1024


@pytest.mark.parametrize("body", [{"image": "i"}, {"image": "i", "mask": "m"}], ids=["image", "mask"])
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((512, 768), (512, 768)),
        ((515, 771), (512, 768)),
        ((1024, 1024), (1024, 1024)),
        ((4000, 3000), (1176, 880)),  # four times the default's pixels
        ((64, 64), (256, 256)),  # a quarter
        ((2000, 125), (2000, 120)),
        ((4096, 128), (2048, 64)),
        ((4096, 64), (512, 512)),  # the default: no allowed size has these proportions
    ],
)
def test_an_image_that_is_changed_keeps_its_size(
    body: dict[str, str], size: tuple[int, int], expected: tuple[int, int]
) -> None:
    """Within the model's limits, unless the request has a size."""
    job = job_of({"model": "painter", **body}, size, mask=size)
    assert (job.width, job.height) == expected
    one_side = job_of({"model": "painter", **body, "width": 256}, size, mask=size)
    assert (one_side.width, one_side.height) == (256, 512)


def test_jobs_with_equal_reference_sizes_share_a_signature() -> None:
    """Reference images become tokens of the forward; sizes of images that are only noised do not matter."""
    body = {"model": "editor", "image": "i", "width": 512, "height": 512}
    large, larger, square = (
        job_of({**body, "prompt": str(size)}, size) for size in ((1920, 1080), (3840, 2160), (1024, 1024))
    )
    assert signature(large) == signature(larger) != signature(square)
    two = job_of({"model": "editor", "images": ["i", "j"], "width": 512, "height": 512}, (1920, 1080), (1024, 1024))
    assert signature(two) not in (signature(large), signature(square))
    sizes, body = ((1920, 1080), (64, 64)), {"model": "painter", "image": "i", "width": 512, "height": 512}
    assert len({signature(job_of(body, size)) for size in sizes}) == 1


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"defaults": {"frames": 16}, "limits": {"max_frames": 81, "frames_multiple": 4}}, "defaults.frames 16"),
        ({"defaults": {"frames": 2}}, "defaults.frames 2"),
        ({"defaults": {"frames": 5}, "limits": {"min_frames": 9, "max_frames": 81}}, "from limits.min_frames 9 to"),
        ({"limits": {"min_frames": 82, "max_frames": 81}}, "min_frames is above max_frames"),
        ({"limits": {"min_frames": 8, "max_frames": 81, "frames_multiple": 4}}, "min_frames is not a multiple"),
        ({"tasks": ["text_to_video"]}, "limits.max_frames"),
        ({"limits": {"max_layers": 4}}, "defaults.layers 0"),
        ({"defaults": {"layers": 2}}, "defaults.layers 2"),
        ({"references": {"pixels": 10}}, "pixels"),
    ],
)
def test_a_model_with_defaults_outside_its_limits_is_refused(table: dict[str, Any], words: str) -> None:
    """The models file is checked when it is read."""
    with pytest.raises(ValidationError, match=words):
        ModelSpec.model_validate({"id": "m", "source": "x", **table})


SMALL_BATCH = BatchRule(model_contains="demo", resolution="512x512", max_batch_size=2)
LIMITED = Catalog((ModelSpec(id="demo", source="d", max_batch=8),), BatchRules(schema_version=1, rules=(SMALL_BATCH,)))


def sized_request(n: int, width: int, height: int) -> JobRequest:
    return JobRequest(model="demo", prompt="a red circle", n=n, width=width, height=height)


def test_more_images_than_a_batch_rule_allows_are_refused() -> None:
    """Accepted, the job could never be claimed."""
    services: Any = SimpleNamespace(catalog=LIMITED, settings=Settings())
    resolve(sized_request(2, width=512, height=512), services, "default")
    resolve(sized_request(4, width=512, height=768), services, "default")
    with pytest.raises(InvalidRequest, match="n is at most 2 for model 'demo' at 512x512") as refused:
        resolve(sized_request(4, width=512, height=512), services, "default")
    assert refused.value.param == "n"


def test_a_size_that_follows_from_the_images_is_checked_too(make_job: Callable[..., Job]) -> None:
    job = make_job(n=4, width=512, height=512)
    with pytest.raises(InvalidRequest, match="n is at most 2"):
        make_submission(job, LIMITED)
    assert make_submission(job.model_copy(update={"height": 768}), LIMITED).max_batch == 8


@pytest.mark.parametrize(
    ("inputs", "allowed"),
    [
        (Inputs(), True),
        (Inputs(images=(ref(1000, 1000),) * 2), True),
        (Inputs(images=(ref(1000, 1000),), mask=ref(1000, 1000)), True),
        (Inputs(images=(ref(1000, 1000),) * 2, mask=ref(1, 1)), False),
        (Inputs(images=(ref(1000, 1000),) * 2, last_image=ref(1, 1)), False),
        (Inputs(images=(ref(500, 500),) * 9), False),
        (Inputs(images=(ref().model_copy(update={"bytes": 1000}),) * 4), True),
        (Inputs(images=(ref().model_copy(update={"bytes": 1000}),) * 4, mask=ref()), False),
    ],
)
def test_the_images_of_a_job_have_a_limit_in_total(inputs: Inputs, allowed: bool) -> None:
    """A worker decodes them: 39 megapixels in 2 to 5 s on two busy cores."""
    expected = contextlib.nullcontext() if allowed else pytest.raises(InputRejected, match=r"at most \d+ are")
    with expected:
        check_input_sizes(inputs, 1_000, 1_000_000)


@pytest.mark.parametrize(
    ("model", "step_cache", "schedule"),
    [
        ("words", None, None),
        ("words", "off", None),
        ("words", "medium", StepSchedule(every=2)),
        ("words", {"every": 4, "order": "reuse"}, StepSchedule(every=4, order="reuse")),
        ("cached", None, StepSchedule(every=5)),
        ("cached", "off", None),
    ],
)
def test_a_level_of_step_caching_becomes_the_schedule_of_its_model(
    model: str, step_cache: Any, schedule: StepSchedule | None
) -> None:
    """Jobs with any of them share forwards, and jobs without one can be read by older workers."""
    job = job_of({"model": model, "step_cache": step_cache})
    assert job.step_cache == schedule
    assert ("step_cache" in encode(job)) == (schedule is not None)
    assert Job.model_validate_json(encode(job)) == job
    assert signature(job) == signature(job.model_copy(update={"step_cache": StepSchedule(every=7)}))


@pytest.mark.parametrize(
    ("model", "step_cache", "message"),
    [
        ("words", "fast", 'step_cache: it must be off, light, medium, strong or a schedule such as {"every": 3}'),
        ("words", 3, 'step_cache: it must be off, light, medium, strong or a schedule such as {"every": 3}'),
        ("words", {"every": 1}, "step_cache: every: Input should be greater than or equal to 2"),
        ("words", {"first": 4}, "step_cache: every: Field required"),
        ("words", {"every": 3, "evry": 4}, "step_cache: evry: there is no such field"),
        ("cached", "strong", "step_cache: model 'cached' allows: off, medium"),
        ("cached", {"every": 3}, "step_cache: model 'cached' allows: off, medium"),
    ],
)
def test_a_wrong_step_cache_is_named(model: str, step_cache: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job_of({"model": model, "step_cache": step_cache})
    assert (caught.value.param, caught.value.message) == ("step_cache", message)


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        (
            {"_class_name": "FlowMatchEulerDiscreteScheduler"},
            ("UniPCMultistepScheduler", "FlowMatchHeunDiscreteScheduler"),
        ),
        ({"_class_name": "PNDMScheduler"}, ("UniPCMultistepScheduler", "DDIMScheduler")),
        (None, ("UniPCMultistepScheduler", "DDIMScheduler", "FlowMatchHeunDiscreteScheduler")),
    ],
)
def test_schedulers_that_do_not_fit_what_the_model_predicts_are_refused(
    tmp_path: Path, config: dict[str, str] | None, allowed: tuple[str, ...]
) -> None:
    """Accepted, a job fails, or succeeds with an image of noise. A folder that says nothing allows all of them."""
    if config is not None:
        (tmp_path / "scheduler").mkdir()
        (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    names = ("UniPCMultistepScheduler", "DDIMScheduler", "FlowMatchHeunDiscreteScheduler")
    spec = ModelSpec(id="m", source=str(tmp_path), schedulers=names)
    assert tuple(spec.usable_schedulers) == allowed
    for name in names:
        request = parse({"model": "m", "prompt": "x", "scheduler": name})
        if name in allowed:
            assert resolve_for_model(request, spec, "t", 0).scheduler == name
        else:
            with pytest.raises(InvalidRequest, match="it must be one of"):
                resolve_for_model(request, spec, "t", 0)
