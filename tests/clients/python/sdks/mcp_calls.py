"""The official SDK of the Model Context Protocol as a client of `fusequeue mcp`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shlex
import socket
import subprocess
import time
from typing import Any

import checks
import httpx2
import mcp
from checks import KEY, MODEL, PROMPT, URL, VIDEO_MODEL, call, check_image, same
from mcp.client.streamable_http import streamable_http_client

COMMAND = [*shlex.split(os.environ["FUSEQUEUE_COMMAND"]), "mcp"]
FOLDER = os.environ["FUSEQUEUE_FOLDER"]
ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": FOLDER, "FUSEQUEUE_URL": URL}


def text(result: Any) -> str:
    return str(result.content[-1].text)


async def use(client: Any) -> None:
    """Call all tools of a server."""
    same([tool.name for tool in (await client.list_tools()).tools], ["generate", "status", "result", "batch"])
    made = await client.call_tool("generate", {"prompt": PROMPT, "model": MODEL, "seed": 7})
    assert not made.is_error, text(made)
    check_image(base64.b64decode(made.content[0].data))
    job_id = json.loads(text(made))["id"]
    same(json.loads(text(await client.call_tool("status", {"id": job_id})))["status"], "succeeded")
    again = await client.call_tool("result", {"id": job_id, "index": 0})
    same(again.content[0].data, made.content[0].data)
    film = await client.call_tool("generate", {"prompt": "a wave", "model": VIDEO_MODEL})
    assert json.loads(text(film))["urls"][0].startswith(URL), text(film)
    prompts = {"prompts": [PROMPT, "a green star"], "model": MODEL}
    batch = json.loads(text(await client.call_tool("batch", prompts)))
    same(batch["queued"], 2)
    counts: dict[str, int] = {}
    async with asyncio.timeout(60):
        while counts != {"succeeded": 2}:
            counts = json.loads(text(await client.call_tool("status", {"id": batch["id"]})))["jobs"]
            await asyncio.sleep(0.1)
    wrong = await client.call_tool("generate", {"prompt": PROMPT, "model": MODEL, "fields": {"stepz": 3}})
    assert wrong.is_error
    assert "stepz" in text(wrong), text(wrong)


@call("over stdio: list_tools, generate, status, result, batch, an error")
def over_stdio() -> None:
    env = {**ENV, "FUSEQUEUE_API_KEY": KEY}
    server = mcp.StdioServerParameters(command=COMMAND[0], args=COMMAND[1:], env=env, cwd=FOLDER)

    async def run() -> None:
        async with mcp.Client(server) as client:
            await use(client)

    asyncio.run(run())


@call("over HTTP: the same")
def over_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([*COMMAND, "--http", "--port", str(port)], cwd=FOLDER, env=ENV)
    url = f"http://127.0.0.1:{port}/mcp"

    async def run() -> None:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http,
            mcp.Client(streamable_http_client(url, http_client=http)) as client,
        ):
            await use(client)

    try:
        wait_for(port)
        asyncio.run(run())
    finally:
        process.terminate()
        process.wait(30)


def wait_for(port: int) -> None:
    """Wait until something listens on the port."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


checks.main()
