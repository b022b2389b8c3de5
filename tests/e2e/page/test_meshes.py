"""Meshes over HTTP, with the Python client, and in a browser: an image in, a GLB file and its thumbnail out."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect
from tiny.meshes import needs_hy3dgen, save_mesh_model

from fusequeue import Client

pytestmark = needs_hy3dgen

MODELS = """
[[model]]
id = "shape"
source = "model"
variant = "fp16"
tasks = ["image_to_mesh"]
extra = ["octree_resolution"]

[model.defaults]
steps = 3
"""
EXTRA = {"octree_resolution": 24}


@pytest.fixture(scope="module")
def sculpting(chromium: str, make_shared_stack: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service with one worker and a tiny model of meshes."""
    folder = tmp_path_factory.mktemp("shapes")
    save_mesh_model(folder / "model")
    (folder / "models.toml").write_text(MODELS)
    return make_shared_stack(models=str(folder / "models.toml")).start(workers=1)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "chair.png"
    image = Image.new("RGBA", (120, 90))
    image.paste((200, 40, 30, 255), (30, 10, 90, 80))
    image.save(file)
    return file


def test_an_image_in_a_request_becomes_a_glb_file_and_a_thumbnail(sculpting: Any, picture: Path) -> None:
    image = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    body = {"model": "shape", "image": image, "extra": EXTRA}
    response = sculpting.client.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})
    job = response.json()
    (artifact,) = job["artifacts"]
    assert (job["status"], artifact["kind"], artifact["content_type"]) == ("succeeded", "mesh", "model/gltf-binary")
    assert artifact["vertices"] > 100
    assert artifact["faces"] > 100
    found = sculpting.client.get(artifact["url"])
    assert (found.headers["Content-Type"], found.content[:4]) == ("model/gltf-binary", b"glTF")
    assert len(found.content) == artifact["bytes"]
    assert found.headers["Content-Disposition"].endswith(f'{job["id"]}-0.glb"')
    with Image.open(io.BytesIO(sculpting.client.get(artifact["thumbnail_url"]).content)) as thumbnail:
        assert (thumbnail.format, thumbnail.size) == ("JPEG", (512, 512))
        assert len(thumbnail.getcolors(512 * 512)) > 20


def test_other_protocols_refuse_the_model(sculpting: Any) -> None:
    body = {"model": "shape", "prompt": "a chair"}
    response = sculpting.client.post("/v1/images/generations", json=body)
    assert response.is_client_error
    assert "makes meshes, which this protocol does not return" in response.text


def test_the_python_client_saves_the_mesh(sculpting: Any, picture: Path, tmp_path: Path) -> None:
    with Client(sculpting.url) as client:
        result = client.run("shape", image=picture, extra=EXTRA, folder=tmp_path / "out")
    (file,) = (tmp_path / "out").iterdir()
    assert (file.suffix, file.read_bytes()[:4]) == (".glb", b"glTF")
    assert result.job.artifacts[0].faces


def test_the_page_makes_shows_and_saves_a_mesh(sculpting: Any, open_page: Any, picture: Path) -> None:
    job_id = sculpting.submit(
        model="shape",
        image=sculpting.client.post("/v1/inputs", files={"file": picture.read_bytes()}).json()["id"],
        extra=EXTRA,
    )
    sculpting.finish(job_id)
    page = open_page(sculpting.url, f"#/playground?from={job_id}")
    expect(page.get_by_role("textbox", name="Prompt")).to_have_count(0)
    expect(page.get_by_role("spinbutton", name="Width")).to_have_count(0)
    expect(page.locator("form figure img")).to_be_visible()
    expect(page.get_by_text("Add an image and press Generate.")).to_be_visible()
    page.get_by_role("button", name=re.compile("^Generate")).click()
    panel = page.locator(".run-panel")
    expect(panel.get_by_role("heading", name="Result")).to_be_visible()
    expect(panel.locator(".artifact")).to_contain_text("faces")
    page.wait_for_function("() => document.querySelector('.run-panel .artifact img')?.naturalWidth > 0")
    with page.expect_download() as download:
        panel.get_by_role("button", name="Save").click()
    assert Path(download.value.path()).read_bytes()[:4] == b"glTF"
    assert download.value.suggested_filename.endswith(".glb")
    page.goto(f"{sculpting.url}/#/jobs/{job_id}")
    page.get_by_role("button", name="Another seed").click()
    page.wait_for_url(lambda url: "/jobs/" in url and job_id not in url)
    expect(page.locator(".badge.is-succeeded")).to_be_visible()
    expect(page.get_by_text('{"octree_resolution":24}', exact=True).first).to_be_visible()
    facts = page.locator(".panel", has=page.get_by_role("heading", name="Request"))
    expect(facts.get_by_text("glb", exact=True)).to_be_visible()  # without a quality
    expect(facts.get_by_text("Mask blur")).to_have_count(0)
