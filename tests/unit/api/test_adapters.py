"""Adapters over HTTP: the list of a model, jobs with adapters, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.http_server import ROOT, serving

from shared.queue import Queue

ADAPTERS = """
[[model.adapter]]
id = "ink"
source = "org/ink"
weight_name = "ink.safetensors"
scale = 0.8
"""
BODY = {"model": "demo", "prompt": "a red circle"}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The demo's models file with one more adapter."""
    file = tmp_path / "models.toml"
    file.write_text((ROOT / "models.toml").read_text() + ADAPTERS)
    return file


async def test_a_job_gets_an_adapter_of_its_model(fake_queue: Queue, tmp_path: Path, models: Path) -> None:
    async with serving(fake_queue, tmp_path, models=models) as api:
        (model,) = (await api.get("/v1/models")).json()["data"]
        assert model["adapters"] == [{"id": "ink", "scale": 0.8, "max_scale": 2.0}]
        accepted = await api.post("/v1/jobs", json={**BODY, "adapters": [{"id": "ink"}]})
        assert accepted.status_code == 202
        assert accepted.json()["adapters"] == [{"id": "ink", "scale": 0.8}]
        read = await api.get(f"/v1/jobs/{accepted.json()['id']}")
        assert read.json()["adapters"] == accepted.json()["adapters"]


async def test_an_unlisted_adapter_is_refused(fake_queue: Queue, tmp_path: Path, models: Path) -> None:
    async with serving(fake_queue, tmp_path, models=models) as api:
        response = await api.post("/v1/jobs", json={**BODY, "adapters": [{"id": "ink"}, {"id": "/etc/passwd"}]})
        assert response.status_code == 422
        assert response.json()["error"]["param"] == "adapters.1.id"
        assert "available: ink" in response.json()["error"]["message"]
