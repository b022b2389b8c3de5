"""Every field of a request with what it makes of the job, the response and the pipeline's call; for the tests of these.

A field without a row fails `test_each_field_has_a_row`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from pydantic import AliasChoices, BaseModel

from api.jobs.request import JobRequest
from shared.artifact_ref import ArtifactRef

MODELS = """
[[model]]
id = "painter"
source = "x"
tasks = ["text_to_image", "image_to_image", "inpaint", "edit"]
schedulers = ["ddim", "euler", "euler_a", "dpmpp_2m"]
[model.limits]
max_controls = 2
max_input_images = 2
[[model.control]]
id = "edges"
source = "x"
[[model.control]]
id = "depth"
source = "x"
[[model.adapter]]
id = "ink"
source = "x"
weight_name = "a.safetensors"
[[model.adapter]]
id = "wash"
source = "x"
weight_name = "a.safetensors"

[[model]]
id = "sketcher"
source = "x"

[[model]]
id = "refined"
source = "x"
[model.refiner]
source = "x"

[[model]]
id = "rated"
source = "x"
scorer = "acme/clip"

[[model]]
id = "layered"
source = "x"
tasks = ["edit"]
[model.defaults]
layers = 2
[model.limits]
max_layers = 4

[[model]]
id = "dancer"
source = "x"
tasks = ["animate"]
[model.limits]
max_frames = 3

[[model]]
id = "film"
source = "x"
tasks = ["text_to_video", "image_to_video"]
[model.defaults]
guidance_scale_2 = 2.0
[model.limits]
max_frames = 81
last_image = "allowed"

[[model]]
id = "remix"
source = "x"
tasks = ["text_to_video", "video_to_video"]
[model.limits]
max_frames = 3

[[model]]
id = "band"
source = "x"
tasks = ["text_to_audio", "audio_to_audio", "audio_inpaint"]
[model.limits]
max_duration_s = 60
"""
COLOURS = ("red", "blue", "white", "black")
VIDEO, FACES = "green", "purple"
"""Input files. Each stands for its id in a request, in a job and a response, and for itself in a call. So does
`PITCHES`, of sounds, by their highest sample."""
PITCHES = {"quiet": 0.25, "loud": 0.5}


@dataclass(frozen=True)
class Row:
    """A field in a request with `base`, and what it makes of the job, the response and the pipeline's call; a text says
    why it makes nothing of it."""

    sent: Mapping[str, Any]
    job: Mapping[str, Any] | str
    response: Mapping[str, Any] | str
    call: Mapping[str, Any] | str
    base: Mapping[str, Any] = field(default_factory=dict)


def same(call: Mapping[str, Any] | str, base: Mapping[str, Any] | None = None, /, **sent: Any) -> Row:
    """Return the row of a field that has its name and value in the job and the response."""
    return Row(sent, sent, sent, call, base or {})


ENDED_JOB = "job_01ja3v5c8zq3m7x2r4t6w8y0ab"
EDGES = {"id": "edges", "image": "blue"}
INPAINT = {"image": "red", "mask": "white", "task": "inpaint"}
FILM = {"model": "film"}
DANCER = {"model": "dancer", "image": "red", "video": "green", "width": 64, "height": 64}
BAND = {"model": "band"}
SONG = BAND | {"audio": "quiet", "task": "audio_inpaint", "repaint_start_s": 0.25, "repaint_end_s": 0.5}
SECRET = "a webhook's URL can hold a secret; not shown"
ENCODING = "for the encoder of the result, after the pipeline"
QUEUE = "for the queue"
MODULES = "changes the pipeline's modules, not its call: tests/integration/engine/lora/test_adapters.py"
RESULT = "after the pipeline, or before it on its images: tests/unit/engine/pipelines/test_inpainting.py"
SCHEDULER = "set on the pipeline: tests/integration/engine/test_schedulers.py"
PARTS = "in the calls of the model's two pipelines: tests/integration/engine/test_refined_jobs.py"
STEPS = "decides which forwards are skipped, not the call: tests/integration/engine/test_step_caching.py"
SCORES = "decides which calls are ended: tests/integration/engine/test_candidates.py"
FETCHED = "the job has the id of what was fetched: tests/integration/api/test_adapter_urls.py"
FACTORS = "of models whose files say some: tests/unit/api/inputs/test_video_upscaling.py"
PUT, PUT_2 = "https://bucket.example/a?signature=1", "https://bucket.example/b?signature=1"
SCHEDULE = {"every": 3, "first": 4, "last": 3, "order": "linear", "of": "output"}


def of_adapters(base: Mapping[str, Any], sent: Mapping[str, Any], made: Mapping[str, Any]) -> Row:
    return Row({"adapters": [sent]}, {"adapters": [made]}, {"adapters": [made]}, MODULES, {"adapters": [base]})


def of_schedule(name: str, value: Any) -> Row:
    made = {"step_cache": SCHEDULE | {name: value}}
    return Row({"step_cache": {"every": 3, name: value}}, made, made, STEPS, {"step_cache": {"every": 3}})


def of_candidates(**sent: Any) -> Row:
    best_of = {"candidates": 4, "keep": 1, "at": [0.25, 0.5], **sent}
    made = {"best_of": best_of, "n": best_of["keep"]}
    base = {"model": "rated", "best_of": {"candidates": 4}}
    return Row({"best_of": {"candidates": 4, **sent}}, made, made, SCORES, base)


def of_scheduler(name: str, value: Any, call: Mapping[str, Any] | str = SCHEDULER, **named: Any) -> dict[str, Row]:
    """Rows of an option, in both forms that requests have; `named` is the class."""
    made = {"scheduler": None, **named, "scheduler_options": {name: value}}
    of_call = call if isinstance(call, str) else {"num_inference_steps": len(value)} | call
    sent = {"name": named.get("scheduler"), name: value}
    return {
        f"scheduler.{name}": Row({"scheduler": sent}, made, made, of_call),
        f"scheduler_options.{name}": Row(named | {"scheduler_options": {name: value}}, made, made, of_call),
    }


def of_controls(name: str, value: Any, call: Mapping[str, Any] | str) -> Row:
    made = {"kind": "controlnet", "scale": 1.0, "start": 0.0, "end": 1.0, "id": "edges", name: value}
    return Row(
        {"controls": [EDGES | {name: value}]}, {"controls": [made]}, {"controls": [made]}, call, {"controls": [EDGES]}
    )


def of_output(sent: Mapping[str, Any], made: Mapping[str, Any], shown: Mapping[str, Any]) -> Row:
    return Row({"output": sent}, {"output": made}, {"output": shown}, ENCODING)


ROWS: dict[str, Row] = {
    "model": same("chooses the pipeline", model="sketcher"),
    "prompt": same({"prompt": "y"}, prompt="y"),
    "extra": same("for the inputs of pipelines that have no field", extra={}),
    "negative_prompt": same({"negative_prompt": "no"}, negative_prompt="no"),
    "width": same({"width": 256}, width=256),
    "height": same({"height": 256}, height=256),
    "n": same("the pipeline is called for each image", n=2),
    "best_of.candidates": of_candidates(candidates=6),
    "best_of.keep": of_candidates(keep=2),
    "best_of.at": of_candidates(at=[0.5, 1.0]),
    "seed": same({"generator": 9}, seed=9),
    "steps": same({"num_inference_steps": 9}, steps=9),
    "num_inference_steps": Row({"num_inference_steps": 9}, {"steps": 9}, {"steps": 9}, {"num_inference_steps": 9}),
    "guidance_scale": same({"guidance_scale": 3.5}, guidance_scale=3.5),
    "guidance_scale_2": same({"guidance_scale_2": 3.5}, FILM, guidance_scale_2=3.5),
    "scheduler.name": Row(
        {"scheduler": {"name": "euler_a", "spacing": "trailing"}},
        {"scheduler": "EulerAncestralDiscreteScheduler"},
        {"scheduler": "EulerAncestralDiscreteScheduler"},
        SCHEDULER,
    ),
    **of_scheduler("karras", True, scheduler="EulerDiscreteScheduler"),
    **of_scheduler("exponential", True, scheduler="EulerDiscreteScheduler"),
    **of_scheduler("beta", True, scheduler="EulerDiscreteScheduler"),
    **of_scheduler("sde", True, scheduler="DPMSolverMultistepScheduler"),
    **of_scheduler("shift", 3.0),
    **of_scheduler("spacing", "trailing"),
    **of_scheduler("timesteps", [900.0, 500.0], {"timesteps": [900, 500]}),
    **of_scheduler("sigmas", [9.0, 0.5], {"sigmas": [9.0, 0.5]}),
    "prompt_2": same({"prompt_2": "z"}, prompt_2="z"),
    "clip_skip": same({"clip_skip": 2}, clip_skip=2),
    "max_sequence_length": same({"max_sequence_length": 64}, max_sequence_length=64),
    "true_cfg_scale": same({"true_cfg_scale": 4.0}, true_cfg_scale=4.0),
    "guidance_rescale": same({"guidance_rescale": 0.7}, guidance_rescale=0.7),
    "lyrics": same({"lyrics": "la"}, BAND, lyrics="la"),
    "denoising_end": same({"denoising_end": 0.8}, denoising_end=0.8),
    "denoising_start": same({"denoising_start": 0.8}, INPAINT, denoising_start=0.8),
    "refiner_start": same(PARTS, {"model": "refined"}, refiner_start=0.6),
    "step_cache": Row({"step_cache": "strong"}, {"step_cache": SCHEDULE}, {"step_cache": SCHEDULE}, STEPS),
    "step_cache.every": of_schedule("every", 4),
    "step_cache.first": of_schedule("first", 5),
    "step_cache.last": of_schedule("last", 5),
    "step_cache.order": of_schedule("order", "reuse"),
    "step_cache.of": of_schedule("of", "residual"),
    "adapters.id": of_adapters({"id": "ink"}, {"id": "wash"}, {"id": "wash", "scale": 1.0}),
    "adapters.scale": of_adapters({"id": "ink"}, {"id": "ink", "scale": 0.5}, {"id": "ink", "scale": 0.5}),
    **dict.fromkeys(("adapters.url", "adapters.hub", "adapters.file", "adapters.revision"), Row({}, *(FETCHED,) * 3)),
    "task": same("chooses the pipeline's class", {"image": "red", "task": "image_to_image"}, task="edit"),
    "image": Row(
        {"image": "blue"}, {"images": ["blue"]}, {"image": "blue", "images": ["blue"]}, {"image": "blue"}, INPAINT
    ),
    "images": same({"image": ["red", "blue"]}, {"images": ["red"], "task": "edit"}, images=["red", "blue"]),
    "mask": same({"mask_image": "black"}, INPAINT, mask="black"),
    "keep_unmasked": same(RESULT, INPAINT, keep_unmasked=False),
    "mask_blur": same(RESULT, INPAINT, mask_blur=4),
    "mask_padding": same(RESULT, INPAINT, mask_padding=8),
    "video": same({"video": ["green"] * 3}, {"model": "remix", "width": 64, "height": 64}, video="green"),
    "face_video": same({"face_video": ["purple"] * 3}, DANCER | {"face_video": "green"}, face_video="purple"),
    "last_image": same({"last_image": "blue"}, FILM | {"image": "red"}, last_image="blue"),
    "controls.id": of_controls("id", "depth", "chooses the control net"),
    "controls.image": Row(
        {"controls": [EDGES | {"image": "red"}]},
        {"control_images": ["red"]},
        {"controls": [{"image": "red"}]},
        {"control_image": "red"},
        {"controls": [EDGES]},
    ),
    "controls.scale": of_controls("scale", 0.5, {"controlnet_conditioning_scale": 0.5}),
    "controls.start": of_controls("start", 0.1, {"control_guidance_start": 0.1}),
    "controls.end": of_controls("end", 0.7, {"control_guidance_end": 0.7}),
    "strength": same({"strength": 0.5}, INPAINT, strength=0.5),
    "frames": same({"num_frames": 33}, FILM, frames=33),
    "fps": same({"frame_rate": 12.0}, FILM, fps=12),
    "duration_s": same({"audio_duration": 7.5}, BAND, duration_s=7.5),
    "audio": same({"src_audio": "loud"}, BAND | {"audio": "quiet"}, audio="loud"),
    "repaint_start_s": same({"repainting_start": 0.125}, SONG, repaint_start_s=0.125),
    "repaint_end_s": same({"repainting_end": 0.75}, SONG, repaint_end_s=0.75),
    "upscale_factor": Row({}, *(FACTORS,) * 3),
    "layers": same({"layers": 3}, {"model": "layered", "image": "red"}, layers=3),
    "reproducible": same(
        "decides about the rows of its forwards: tests/integration/engine/test_reproducible.py", reproducible=True
    ),
    "output_format": same(ENCODING, output_format="webp"),
    "output_quality": same(ENCODING, output_quality=50),
    "embed_parameters": same(ENCODING, embed_parameters=True),
    "output.put_url": of_output({"put_url": PUT}, {"put_urls": [PUT]}, {"put_urls": ["https://bucket.example/a"]}),
    "output.put_urls": of_output(
        {"put_urls": [PUT_2]}, {"put_urls": [PUT_2]}, {"put_urls": ["https://bucket.example/b"]}
    ),
    "output.bucket": of_output({"bucket": "renders"}, {"bucket": "renders"}, {"bucket": "renders"}),
    "output.prefix": of_output(
        {"bucket": "renders", "prefix": "default/a"}, {"prefix": "default/a"}, {"prefix": "default/a"}
    ),
    "priority": same(QUEUE, priority="bulk"),
    "deadline_s": Row({"deadline_s": 60}, {"time_limit_ms": 60_000}, {"deadline_at": str}, QUEUE),
    "not_before": Row(
        {"not_before": "2026-01-31T22:00:00Z"},
        {"not_before_ms": 1_769_896_800_000},
        {"not_before": "2026-01-31T22:00:00.000Z"},
        QUEUE,
    ),
    "after": same(QUEUE, after=[ENDED_JOB]),
    "on_parent_failure": same(QUEUE, on_parent_failure="run"),
    "on_deadline": same(QUEUE, {"deadline_s": 60}, on_deadline="run"),
    "metadata": same("for the client", metadata={"order": "7"}),
    "batch_id": same("for the client", batch_id="nightly"),
    "group": same("for the client", group="nightly.7"),
    "webhook": Row({"webhook": "https://a.example"}, {"webhook": {"url": "https://a.example"}}, SECRET, QUEUE),
    "webhook_events": Row(
        {"webhook_events": ["job.running"]},
        {"webhook": {"states": ["running"]}},
        SECRET,
        QUEUE,
        {"webhook": "https://a.example"},
    ),
}


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the objects in a type, but those that name an image as a text does."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation is not ArtifactRef:
        yield annotation
    for argument in get_args(annotation):
        yield from models_of(argument)


def names_of(annotation: Any) -> bool:
    """Return whether a value can be a name."""
    return get_origin(annotation) is Literal or any(map(names_of, get_args(annotation)))


def fields() -> Iterator[str]:
    """Yield the fields of a request, with those of the objects in it and with their other names."""
    for name, about in JobRequest.model_fields.items():
        inner = [f"{name}.{one}" for model in models_of(about.annotation) for one in model.model_fields]
        yield from inner
        if not inner or names_of(about.annotation):
            yield name
        if isinstance(about.validation_alias, AliasChoices):
            yield from (str(choice) for choice in about.validation_alias.choices)
