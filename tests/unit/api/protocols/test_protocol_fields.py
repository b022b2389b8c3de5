"""Every field that a protocol accepts reaches the job request, or a row says why not."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from harness.request_fields import COLOURS, FACES, MODELS, PITCHES, ROWS, VIDEO

from api.jobs.request import JobRequest, parse
from api.protocols.fal import queue_requests as fal_queue
from api.protocols.huggingface.routes import parse_inference_request
from api.protocols.openai import server_fields
from api.protocols.openai.image_requests import ImageFields, parse_image_request
from api.protocols.openai.video_requests import VideoFields, parse_video_request
from api.protocols.replicate import prediction_inputs
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.errors import InvalidRequest

CATALOG = Catalog([ModelSpec.model_validate(table) for table in tomllib.loads(MODELS)["model"]])
IDS = {name: f"in_{number:032x}" for number, name in enumerate((*COLOURS, VIDEO, FACES, *PITCHES))}
Body = dict[str, Any]


def with_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: with_ids(one) for name, one in value.items()}
    if isinstance(value, list):
        return [with_ids(one) for one in value]
    return IDS.get(value, value) if isinstance(value, str) else value


def hugging_face(body: Body) -> JobRequest:
    values = {name: value for name, value in body.items() if name not in ("model", "prompt")}
    return parse_inference_request({"inputs": body["prompt"], "parameters": values}, body["model"], "", CATALOG)


def replicate(body: Body) -> JobRequest:
    values = {name: value for name, value in body.items() if name != "model"}
    return prediction_inputs.parse_input(values, CATALOG.get(body["model"]), {})[0]


def fal(body: Body) -> JobRequest:
    values = {name: value for name, value in body.items() if name != "model"}
    return fal_queue.parse_input(values, CATALOG.get(body["model"]), {})[0]


def openai_images(body: Body) -> JobRequest:
    return parse_image_request(body, CATALOG, "image_edit").request


def openai_videos(body: Body) -> JobRequest:
    return parse_video_request({"model": "film", **body}, CATALOG).request


OUTPUTS = {name for name in ROWS if name.startswith("output.")}
"""Refused by all other protocols, whose responses have the results."""

CALLBACKS = {"webhook", "webhook_events", "batch_id"}
VIDEOS = {"frames", "fps", "guidance_scale_2", "last_image", "video", "face_video"}
SOUNDS = {"lyrics", "duration_s", "audio", "repaint_start_s", "repaint_end_s"}
START_IMAGES = {
    "image",
    "images",
    "mask",
    "strength",
    "task",
    "layers",
    "keep_unmasked",
    "mask_blur",
    "mask_padding",
    "denoising_start",
}
PARSERS: dict[str, tuple[Callable[[Body], JobRequest], set[str]]] = {
    "openai images": (openai_images, OUTPUTS | VIDEOS | SOUNDS),
    "replicate": (replicate, OUTPUTS | CALLBACKS),
    "fal": (fal, OUTPUTS | CALLBACKS),
    "hugging face": (hugging_face, OUTPUTS | VIDEOS | START_IMAGES | {"n", "batch_id"}),
}


@pytest.mark.parametrize(("parser", "refused"), PARSERS.values(), ids=PARSERS)
def test_a_job_field_is_the_same_in_each_protocol_or_refused(
    parser: Callable[[Body], JobRequest], refused: set[str]
) -> None:
    """Refused are fields that it names differently, or whose effect its responses cannot show."""
    wrong, found = {}, set()
    for name, row in ROWS.items():
        body = with_ids({"model": "painter", "prompt": "x", "priority": "standard", **row.base, **row.sent})
        field = "steps" if name == "num_inference_steps" else name.partition(".")[0]
        try:
            value = getattr(parser(dict(body)), field)
        except InvalidRequest:
            found.add(name)
            continue
        if value != (expected := getattr(parse(body), field)):
            wrong[name] = (value, expected)
    assert wrong == {}
    assert found == refused


RESPONSE = "about the response: test_openai_calls.py"
IGNORED = "documented as accepted and ignored"
CHECKED = "checked only"
Rows = Mapping[str, tuple[Body, Mapping[str, Any] | str]]
INK = {"adapters": [("ink", 0.5)]}
IMAGES: Rows = {
    "size": ({"size": "128x256"}, {"width": 128, "height": 256}),
    "response_format": ({"response_format": "url"}, RESPONSE),
    "output_format": ({"output_format": "webp"}, {"output_format": "webp"}),
    "output_compression": ({"output_compression": 50}, {"output_quality": 50}),
    "stream": ({"stream": True}, RESPONSE),
    "partial_images": ({"stream": True, "partial_images": 2}, {"previews": 2}),
    "quality": ({"quality": "high"}, RESPONSE),
    "background": ({"background": "opaque"}, CHECKED),
    **{name: ({name: "x"}, IGNORED) for name in ("moderation", "style", "input_fidelity", "user")},
    **{
        name: ({name: 2}, {"n": 2})
        for name in ("num_outputs_per_prompt", "num_images_per_prompt", "num_videos_per_prompt")
    },
    "lora": ({"lora": {"name": "ink", "scale": 0.5}}, INK),
    "loras": ({"loras": [{"name": "ink", "scale": 0.5}]}, INK),
    **{name: ({name: {"steps": 9}}, {"steps": 9}) for name in server_fields.NESTED},
}
START: Body = {"task": "image_to_video", "image": IDS["red"]}
TABLES: dict[str, tuple[set[str], Rows]] = {
    "openai images": (
        {*ImageFields.model_fields, *server_fields.ALIASES, *server_fields.NESTED, "lora", "loras"}
        - {"image_reference", "reference_url"},  # of videos
        IMAGES,
    ),
    "openai videos": (
        {*VideoFields.model_fields, "input_reference", "image_reference", "reference_url"},
        {
            "size": ({"size": "128x256"}, {"width": 128, "height": 256}),
            "seconds": ({"seconds": 2}, {"frames": 48}),
            "num_frames": ({"num_frames": 33}, {"frames": 33}),
            "user": ({"user": "x"}, IGNORED),
            **{name: ({name: IDS["red"]}, START) for name in ("input_reference", "image_reference", "reference_url")},
        },
    ),
    "replicate": (
        {*prediction_inputs.JOB_FIELDS, *prediction_inputs.ReplicateFields.model_fields},
        {
            "num_outputs": ({"num_outputs": 2}, {"n": 2}),
            "num_inference_steps": ({"num_inference_steps": 9}, {"steps": 9}),
            "guidance": ({"guidance": 3.5}, {"guidance_scale": 3.5}),
            "prompt_strength": (
                {"prompt_strength": 0.5, "image": IDS["red"], "task": "image_to_image"},
                {"strength": 0.5},
            ),
            **{
                name: ({name: IDS["red"], "task": "image_to_image"}, {"image": IDS["red"]})
                for name in ("input_image", "init_image")
            },
            **{
                name: ({name: [IDS["red"], IDS["blue"]]}, {"images": [IDS["red"], IDS["blue"]]})
                for name in ("input_images", "image_input")
            },
            "num_frames": ({"model": "film", "num_frames": 33}, {"frames": 33}),
            "frames_per_second": ({"model": "film", "frames_per_second": 12}, {"fps": 12}),
            "aspect_ratio": ({"aspect_ratio": "4:1"}, {"width": 1024, "height": 256}),
            "megapixels": ({"megapixels": 1}, {"width": 1024, "height": 1024}),
            "size": ({"size": "128x256"}, {"width": 128, "height": 256}),
            "output_format": ({"output_format": "jpg"}, {"output_format": "jpeg"}),
            "output_quality": ({"output_quality": 50}, {"output_quality": 50}),
            "lora_weights": ({"lora_weights": "ink", "lora_scale": 0.5}, INK),
            "lora_scale": ({"lora_weights": "ink", "lora_scale": 0.5}, INK),
            "disable_safety_checker": ({"disable_safety_checker": False}, CHECKED),
            "refine": ({"model": "refined", "refine": "no_refiner"}, {"refiner_start": 1.0}),
            "high_noise_frac": (
                {"model": "refined", "refine": "expert_ensemble_refiner", "high_noise_frac": 0.6},
                {"refiner_start": 0.6},
            ),
            **{name: ({name: True}, IGNORED) for name in ("go_fast", "apply_watermark")},
            "refine_steps": ({"refine_steps": 1}, IGNORED),
        },
    ),
    "fal": (
        {*fal_queue.JOB_FIELDS, *fal_queue.FalFields.model_fields},
        {
            "num_images": ({"num_images": 2}, {"n": 2}),
            "num_inference_steps": ({"num_inference_steps": 9}, {"steps": 9}),
            "image_url": ({"image_url": IDS["red"], "task": "edit"}, {"image": IDS["red"]}),
            "image_urls": ({"image_urls": [IDS["red"], IDS["blue"]]}, {"images": [IDS["red"], IDS["blue"]]}),
            "mask_url": ({"image_url": IDS["red"], "mask_url": IDS["white"]}, {"mask": IDS["white"]}),
            "end_image_url": (
                {"model": "film", "image_url": IDS["red"], "end_image_url": IDS["blue"]},
                {"last_image": IDS["blue"]},
            ),
            "video_url": ({"model": "remix", "video_url": IDS[VIDEO]}, {"video": IDS[VIDEO]}),
            "face_video_url": (
                {"model": "dancer", "image_url": IDS["red"], "video_url": IDS[VIDEO], "face_video_url": IDS[FACES]},
                {"face_video": IDS[FACES]},
            ),
            "audio_url": ({"model": "band", "audio_url": IDS["loud"]}, {"audio": IDS["loud"]}),
            "duration": ({"model": "band", "duration": 7.5}, {"duration_s": 7.5}),
            "num_frames": ({"model": "film", "num_frames": 33}, {"frames": 33}),
            "frames_per_second": ({"model": "film", "frames_per_second": 12}, {"fps": 12}),
            "image_size": ({"image_size": "landscape_4_3"}, {"width": 1024, "height": 768}),
            "loras": ({"loras": [{"path": "ink", "scale": 0.5}]}, INK),
            "enable_safety_checker": ({"enable_safety_checker": True}, CHECKED),
            **{name: ({name: False}, CHECKED) for name in ("sync_mode", "expand_prompt", "enable_prompt_expansion")},
            **{name: ({name: "x"}, IGNORED) for name in ("acceleration", "safety_checker_version")},
        },
    ),
}


def plain(request: JobRequest) -> dict[str, Any]:
    values = request.model_dump(mode="json")
    return values | {"adapters": [(one.id, one.scale) for one in request.adapters]}


@pytest.mark.parametrize("protocol", TABLES)
def test_each_own_field_of_a_protocol_reaches_the_job_request(protocol: str) -> None:
    accepted, rows = TABLES[protocol]
    assert accepted == rows.keys()
    parser = openai_videos if protocol == "openai videos" else PARSERS[protocol][0]
    base = {"prompt": "x"} if protocol == "openai videos" else {"model": "painter", "prompt": "x"}
    before, wrong = plain(parser(dict(base))), {}
    for name, (sent, expected) in rows.items():
        if isinstance(expected, str):
            parser({**base, **sent})
            continue
        made = plain(parser({**base, **sent}))
        if protocol == "openai images":
            made["previews"] = parse_image_request({**base, **sent}, CATALOG, "image_edit").previews
        if any(made[field] != value or before.get(field) == value for field, value in expected.items()):
            wrong[name] = {field: made[field] for field in expected}
    assert wrong == {}


def test_adapters_of_hugging_face_reach_the_job_request() -> None:
    loras = [{"path": "ink", "scale": 0.5}, {"path": "owner/oil"}]
    request = hugging_face({"model": "painter", "prompt": "x", "loras": loras})
    assert [(one.id, one.hub, one.scale) for one in request.adapters] == [("ink", None, 0.5), (None, "owner/oil", None)]


def test_the_size_of_hugging_face_reaches_the_job_request() -> None:
    request = hugging_face({"model": "painter", "prompt": "x", "target_size": {"width": 128, "height": 256}})
    assert (request.width, request.height) == (128, 256)


@pytest.mark.parametrize(("parser", "field"), [(fal, "num_images"), (replicate, "num_outputs")])
def test_several_sounds_or_videos_are_refused_where_a_response_has_one(
    parser: Callable[[Body], JobRequest], field: str
) -> None:
    by_medium = {task.medium.value: spec.id for spec in CATALOG for task in spec.tasks}
    for medium in ("audio", "video"):
        body = {"model": by_medium[medium], "prompt": "x"}
        assert parser(body).n == 1
        with pytest.raises(InvalidRequest, match=f"has one {medium}") as refused:
            parser({**body, field: 2})
        assert (refused.value.param or "").removeprefix("input.") == field
