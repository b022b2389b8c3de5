"""The OpenAPI document: names of operations, schemas of answers, and examples of bodies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import application, serving
from harness.tables import row

from shared.queue import Queue

SOUNDS = ("audio/wav", "audio/flac", "audio/mpeg", "audio/ogg", "audio/*")
IMAGES = ("image/png", "image/jpeg", "image/webp", "image/*")
BINARY = (*IMAGES, "video/mp4", "model/gltf-binary", "application/safetensors", "application/zip", *SOUNDS)
STABLE = {
    *("submit_job", "submit_jobs", "get_job", "list_jobs", "cancel_job", "cancel_jobs", "delete_job", "delete_jobs"),
    *("update_job", "update_jobs", "retry_job", "retry_jobs", "redrive_dead_letters", "purge_dead_letters"),
    *("get_artifact", "get_thumbnail", "get_job_events", "upload_input", "list_inputs", "get_input", "delete_input"),
    *("list_models", "get_model", "create_webhook", "list_webhooks", "list_webhook_deliveries", "upload_file"),
    *("create_batch", "get_batch", "generate_images", "edit_images", "create_video", "replicate_create_prediction"),
}


@pytest.fixture
def document(fake_queue: Queue, tmp_path: Path) -> dict[str, Any]:
    return application(fake_queue, tmp_path).openapi()


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {operation["operationId"]: operation for path in document["paths"].values() for operation in path.values()}


def test_operations_have_short_unique_names(document: dict[str, Any]) -> None:
    found = operations(document)
    assert len(found) == sum(len(path) for path in document["paths"].values())
    assert not [name for name in found if not re.fullmatch(r"[a-z]+(_[a-z]+){1,4}", name)]
    assert set(found) >= STABLE


def test_every_successful_answer_says_what_it_is(document: dict[str, Any]) -> None:
    for name, operation in operations(document).items():
        answers = {status: answer for status, answer in operation["responses"].items() if status.startswith("2")}
        assert answers, name
        for status, answer in answers.items():
            for media_type, content in answer.get("content", {}).items():
                schema = content.get("schema") or content.get("itemSchema")
                assert schema, f"{name} {status} {media_type}"
                assert (schema.get("format") == "binary") == (media_type in BINARY), f"{name} {media_type}"


def test_every_reference_has_its_schema(document: dict[str, Any]) -> None:
    names = set(re.findall(r'"#/([^"]*)"', json.dumps(document)))
    assert names <= {f"components/schemas/{name}" for name in document["components"]["schemas"]}


def test_schemas_have_a_name_each(document: dict[str, Any]) -> None:
    """Generators of clients name classes by it: of two of one name they leave one out, with all that refers to it."""
    titles = [schema["title"] for schema in document["components"]["schemas"].values() if "title" in schema]
    assert sorted(titles) == sorted(set(titles))


def test_objects_of_all_protocols_have_schemas(document: dict[str, Any]) -> None:
    wanted = {"FileObject", "BatchObject", "VideoObject", "PredictionObject", "InputObject", "JobList", "DeliveryList"}
    assert set(document["components"]["schemas"]) >= wanted


MODELS = """
[[model]]
id = "demo"
source = "x"
tasks = ["text_to_image", "image_to_image"]

[[model]]
id = "film"
source = "x"
tasks = ["text_to_video", "image_to_video"]
limits = { max_frames = 121 }
"""


EXAMPLES = [
    ("/v1/images/edits", "invalid_input_image"),  # the id of its image is made up
    ("/v1/videos", None),
    ("/compat/replicate/v1/predictions", None),
    ("/compat/replicate/v1/models/{owner}/{name}/predictions", None),
    ("/compat/fal/{owner}/{name}", None),
]


async def test_the_first_example_of_a_body_is_valid(
    fake_queue: Queue, tmp_path: Path, document: dict[str, Any]
) -> None:
    """`/docs` fills in the body of requests with it."""
    (tmp_path / "models.toml").write_text(MODELS)
    async with serving(fake_queue, tmp_path, models=tmp_path / "models.toml") as api:
        for path, refused in EXAMPLES:
            with row(path):
                content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                body = content.get("example") or next(iter(content["examples"].values()))["value"]
                response = await api.post(path.format(owner="fusequeue", name="demo"), json=body)
                assert response.json().get("code") == refused, response.text
                assert response.is_success == (refused is None)


def test_videos_are_documented_as_json_and_forms(document: dict[str, Any]) -> None:
    bodies = document["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    fields = {media_type: body["schema"]["properties"] for media_type, body in bodies.items()}
    assert set(fields) == {"application/json", "multipart/form-data", "application/x-www-form-urlencoded"}
    assert fields["multipart/form-data"]["input_reference"]["format"] == "binary"
    assert "input_reference" in fields["application/json"]
    assert "input_reference" not in fields["application/x-www-form-urlencoded"]


async def test_pages_of_allowed_origins_can_use_every_method_and_the_headers_of_sdks(
    fake_queue: Queue, tmp_path: Path
) -> None:
    wanted = "x-stainless-retry-count, OpenAI-Organization, Idempotency-Key, Prefer"
    async with serving(fake_queue, tmp_path, cors_origins=("https://studio.example",)) as api:
        for method in ("PATCH", "DELETE", "POST"):
            headers = {"Origin": "https://studio.example", "Access-Control-Request-Method": method}
            answer = await api.options(
                "/v1/webhooks/we_1", headers={**headers, "Access-Control-Request-Headers": wanted}
            )
            assert answer.status_code == 200, answer.text
            assert method in answer.headers["access-control-allow-methods"]
