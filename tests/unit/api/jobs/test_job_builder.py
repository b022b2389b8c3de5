"""Jobs with images: what follows from when and how these are stored."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, png

from shared.storage.folder import FolderStorage


async def test_a_job_is_listed_by_the_time_at_which_its_images_were_stored(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = FolderStorage.put
    meanwhile: list[str] = []

    async def put_after_another_submit(storage: FolderStorage, *args: Any, **options: Any) -> Any:
        if not meanwhile:
            meanwhile.append((await api.post("/v1/jobs", json=BODY)).json()["id"])
        return await put(storage, *args, **options)

    monkeypatch.setattr(FolderStorage, "put", put_after_another_submit)
    image = "data:image/png;base64," + base64.b64encode(png()).decode()
    made = (await api.post("/v1/jobs", json={**BODY, "image": image})).json()
    listed = (await api.get("/v1/jobs")).json()
    assert [job["id"] for job in listed["data"]] == [made["id"], *meanwhile]
