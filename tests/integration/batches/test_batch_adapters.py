"""Lines of batches that name adapters by URL: a step fetches them, and a slow host fails only its line."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from harness.adapter_host import Answer, adapter_host
from integration.batches.batch_steps import error_lines, line, validated
from tiny.safetensors_file import demo_lora

from api.protocols.openai.batches import batch_runner
from api.protocols.openai.batches.batch_files import BatchContext
from api.protocols.openai.batches.batch_runner import BatchRunner


async def test_lines_name_adapters_by_url(context: BatchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "ADAPTERS_S", 2.0)
    settings = context.settings.model_copy(update={"adapter_hosts": ("127.0.0.1",)})
    async with adapter_host() as host:
        host.answers["/ink.safetensors"] = [Answer(demo_lora(1))]
        host.answers["/slow.safetensors"] = [Answer(held=asyncio.Event())]
        paths = ("/ink.safetensors", "/slow.safetensors", "/none", "/ink.safetensors")
        lines = [line(number, adapters=[{"url": host.url(path)}]) for number, path in enumerate(paths, 1)]
        batch = await validated(context, "default", lines)
        assert await BatchRunner(replace(context, settings=settings), batch).advance()
        batch = await context.queue.batches.get("default", batch.id)
        assert (batch.accepted, batch.failed, host.asked("/ink.safetensors")) == (2, 2, 1)
        slow, none = [row["error"] for row in await error_lines(context, batch)]
        assert (slow["code"], slow["param"]) == ("url_not_fetched", "adapters.0.url")
        assert slow["message"].startswith("adapters.0.url: not fetched within 2 s")
        assert (none["code"], none["param"]) == ("invalid_adapter", "adapters.0.url")
