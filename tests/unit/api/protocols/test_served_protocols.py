"""Each protocol can be left out; what the others serve stays as it is."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from harness.http_server import BODY, ROOT

from api.app import create_app
from api.protocols.fal.protocol import FAL
from api.protocols.huggingface.protocol import HUGGING_FACE
from api.protocols.openai.protocol import OPENAI
from api.protocols.replicate.protocol import REPLICATE
from api.protocols.served import PROTOCOLS
from api.protocols.served_protocol import ServedProtocol
from shared.queue import Queue

PATHS = {
    OPENAI: ("/v1/images/generations", 400),
    REPLICATE: ("/compat/replicate/v1/predictions", 422),
    HUGGING_FACE: ("/compat/huggingface/demo", 422),
    FAL: ("/compat/fal/fusequeue/demo", 422),
}


@pytest.mark.parametrize("left_out", PROTOCOLS, ids=lambda protocol: PATHS[protocol][0])
async def test_a_protocol_can_be_left_out(left_out: ServedProtocol, fake_queue: Queue, tmp_path: Path) -> None:
    overrides = {"models": ROOT / "models.toml", "storage_dir": tmp_path / "storage"}
    settings = fake_queue.client.settings.model_copy(update=overrides)
    kept = tuple(protocol for protocol in PROTOCOLS if protocol is not left_out)
    app = create_app(settings, queue=fake_queue, protocols=kept)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as api,
    ):
        for protocol, (path, refused) in PATHS.items():
            response = await api.post(path, json={"surprise": 1})
            assert response.status_code == (404 if protocol is left_out else refused), path
        assert (await api.post("/v1/jobs", json=BODY)).status_code == 202
        paths = (await api.get("/openapi.json")).json()["paths"]
        assert not any(path.startswith(left_out.error_form.paths) for path in paths)
