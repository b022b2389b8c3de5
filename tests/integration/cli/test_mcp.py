"""`fusequeue mcp` with the client of the official SDK, over stdio and HTTP; the tests act as the worker."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.api_process import Server
from harness.http_server import ROOT, WORKER, claimed, deliver, finish
from harness.ports import free_port
from harness.waiting import wait_until

from shared.auth import Scope
from shared.queue import Queue

mcp = pytest.importorskip("mcp", reason="mcp is not installed; it is in the extras `mcp` and `dev`")
PROMPT = "a red circle on a blue ground, left"
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC")


@pytest.fixture
def service(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
async def queue(service: Server) -> AsyncIterator[Queue]:
    queue = Queue.connect(service.settings)
    yield queue
    await queue.close()


def over_stdio(service: Server, **environment: str) -> Any:
    """Return the parameters of a client that starts the command."""
    env = {**os.environ, "FUSEQUEUE_URL": service.url, **environment}
    return mcp.StdioServerParameters(command=sys.executable, args=["-m", "cli.main", "mcp"], env=env, cwd=ROOT)


def text(result: Any) -> str:
    return str(result.content[-1].text)


async def worked(call: Any, queue: Queue, folder: Path) -> tuple[Any, bytes]:
    """Return the result of a tool whose job the test runs, and its image."""
    calling = asyncio.ensure_future(call)
    async with asyncio.timeout(60):
        while not (claims := await queue.claims.claim(WORKER, ["demo"], 1)):
            await asyncio.sleep(0.01)
    data = await deliver(queue, folder, claims[0])
    return await calling, data


async def test_no_tool_reads_a_file_of_the_machine(service: Server, tmp_path: Path) -> None:
    """A prompt can make a model call a tool with any argument."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(PNG)
    async with mcp.Client(over_stdio(service)) as client:
        for fields in ({"image": str(secret)}, {"images": [str(secret)]}, {"image": str(secret), "mask": str(secret)}):
            result = await client.call_tool("generate", {"prompt": PROMPT, "fields": fields, "wait_s": 0})
            assert result.is_error
            assert next(iter(fields)) in text(result)
    async with httpx.AsyncClient(base_url=service.url) as http:
        assert (await http.get("/v1/inputs")).json()["data"] == []


async def test_generate_returns_the_image_and_batch_queues_many(service: Server, queue: Queue, tmp_path: Path) -> None:
    async with mcp.Client(over_stdio(service)) as client:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == ["generate", "status", "result", "batch"]
        assert all(tool.description for tool in tools)

        arguments = {"prompt": PROMPT, "seed": 7, "fields": {"steps": 5}}
        result, data = await worked(client.call_tool("generate", arguments), queue, tmp_path)
        image, about = result.content[0], json.loads(text(result))
        assert (image.type, image.mime_type, base64.b64decode(image.data)) == ("image", "image/png", data)
        assert (about["model"], about["seeds"], about["flagged"]) == ("demo", [7], [])
        record = await queue.jobs.get(about["id"])
        assert record is not None
        assert (record.job.steps, record.job.priority) == (5, "interactive")

        slow = await client.call_tool("generate", {"prompt": PROMPT, "wait_s": 0})
        assert text(slow).startswith("The job is not done")
        job_id = json.loads(text(slow).partition(": ")[2])["id"]
        status = json.loads(text(await client.call_tool("status", {"id": job_id})))
        assert (status["status"], status["queue"]["position"]) == ("queued", 0)
        data = await deliver(queue, tmp_path, await claimed(queue, job_id), flagged=True)
        again = await client.call_tool("result", {"id": job_id, "index": 0})
        assert base64.b64decode(again.content[0].data) == data
        assert json.loads(text(again))["flagged"] == [0]

        prompts = {"prompts": [PROMPT, "a green star", ""], "fields": {"steps": 3}}
        batch = json.loads(text(await client.call_tool("batch", prompts)))
        assert (batch["queued"], [line["prompt"] for line in batch["refused"]]) == (2, [""])
        counts = json.loads(text(await client.call_tool("status", {"id": batch["id"]})))
        assert counts["jobs"] == {"queued": 2}
        assert {job.job.priority for job in (await queue.jobs.page("default", batch_id=batch["id"]))[0]} == {"bulk"}


async def test_errors_of_the_service_are_errors_of_the_tool(service: Server, queue: Queue, tmp_path: Path) -> None:
    calls = [
        ("generate", {"prompt": PROMPT, "fields": {"steps": 1000}}, "steps must be 1 to 100, not 1000"),
        ("generate", {"prompt": PROMPT, "model": "sdxl"}, "unknown model: 'sdxl'; available: demo"),
        ("generate", {"prompt": PROMPT, "wait_s": 500}, "wait_s"),
        ("status", {"id": "job_" + 26 * "0"}, "there is no job"),
        ("status", {"id": "mcp-none"}, "there is no batch mcp-none"),
        ("batch", {"prompts": [PROMPT], "fields": {"stepz": 1}}, "stepz: there is no such field"),
    ]
    async with mcp.Client(over_stdio(service)) as client:
        for tool, arguments, message in calls:
            result = await client.call_tool(tool, arguments)
            assert result.is_error, (tool, arguments)
            assert message in text(result)
        slow = await client.call_tool("generate", {"prompt": PROMPT, "wait_s": 0})
        job_id = json.loads(text(slow).partition(": ")[2])["id"]
        await finish(queue, tmp_path, job_id)
        missing = await client.call_tool("result", {"id": job_id, "index": 3})
        assert (missing.is_error, "has 1 images" in text(missing)) == (True, True)


async def test_a_mesh_needs_no_prompt_and_an_image_needs_one(start: Callable[..., Server], tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    models.write_text(
        '[[model]]\nid = "shape"\nsource = "x"\ntasks = ["image_to_mesh"]\n[[model]]\nid = "words"\nsource = "x"\n'
    )
    image = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    async with mcp.Client(over_stdio(start(models=str(models)))) as client:
        mesh = await client.call_tool("generate", {"model": "shape", "fields": {"image": image}, "wait_s": 0})
        assert (mesh.is_error, "The job is not done" in text(mesh)) == (False, True), text(mesh)
        words = await client.call_tool("generate", {"model": "words", "wait_s": 0})
        assert (words.is_error, "prompt: Field required" in text(words)) == (True, True), text(words)


async def test_over_http_each_caller_uses_its_own_key(service: Server, queue: Queue) -> None:
    """Not that of the process, which every user of the machine could use then."""
    scopes = frozenset((Scope.JOBS_READ, Scope.JOBS_WRITE))
    mine, _ = await queue.api_keys.create("acme", scopes)
    other, _ = await queue.api_keys.create("other", scopes)
    port = free_port()
    env = {**os.environ, "FUSEQUEUE_URL": service.url, "FUSEQUEUE_API_KEY": mine}
    command = [sys.executable, "-m", "cli.main", "mcp", "--http", "--port", str(port)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env)
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        await asyncio.to_thread(wait_until, lambda: responds(url), "the server responds")
        async with mcp.Client(url) as client:
            refused = await client.call_tool("generate", {"prompt": PROMPT, "wait_s": 0})
            assert (refused.is_error, "no API key" in text(refused)) == (True, True)
        ids = {}
        for token in (mine, other):
            async with with_key(url, token) as client:
                ids[token] = json.loads(
                    text(await client.call_tool("generate", {"prompt": PROMPT, "wait_s": 0})).partition(": ")[2]
                )["id"]
                assert not (await client.call_tool("status", {"id": ids[token]})).is_error
        async with with_key(url, other) as client:
            hidden = await client.call_tool("status", {"id": ids[mine]})
            assert (hidden.is_error, "there is no job" in text(hidden)) == (True, True)
        async with httpx.AsyncClient() as http:
            rebound = await http.post(url, json={}, headers={"Host": "attacker.example"})
            assert rebound.status_code in (403, 421)
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


def responds(url: str) -> bool:
    try:
        return httpx.post(url, json={}, timeout=10).status_code > 0
    except httpx.TransportError:
        return False


@contextlib.asynccontextmanager
async def with_key(url: str, token: str) -> AsyncIterator[Any]:
    """Yield a client that sends a key."""
    http2 = pytest.importorskip("httpx2")  # of the SDK
    transport = pytest.importorskip("mcp.client.streamable_http")
    async with (
        http2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60) as http,
        mcp.Client(transport.streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


def test_without_the_package_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['mcp'] = None; from cli.main import app; app(['mcp'])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "fusequeue: mcp is not installed: pip install 'fusequeue-server[mcp]'\n"
