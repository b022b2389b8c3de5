"""`fusequeue mcp`: the service as four tools of the Model Context Protocol, over stdio or HTTP.

Needs the extra `mcp`; `cli.main` imports this module only for the command.
"""

import json
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeAlias

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from fusequeue import AsyncClient, ClientError, Job
from shared.runtime.clock import VERSION

MAX_WAIT_S = 50.0
"""Longest wait of one call: clients give up after a minute."""

MAX_CONTENT_BYTES = 4 * 1024 * 1024
"""Images of one response that are its content; the others are URLs."""

MAX_PROMPTS = 1_000
MAX_LISTED = 50
"""Jobs of a batch that its status names, and refused lines."""

BATCH = "mcp-"
INSTRUCTIONS = """Generates images, videos, sounds and meshes with diffusion models. `generate` returns the images, or
the id of a job that takes longer: read it with `status` and `result`. `batch` queues many prompts at once, in the
background."""

Content: TypeAlias = list[str | Image]
Fields = Annotated[
    dict[str, Any] | None,
    Field(
        description="Other fields of a job by name: width, height, steps, guidance_scale, negative_prompt, n (images), "
        "image (a URL to start from), strength, controls, frames and fps (of a video), output_format, best_of (more "
        "images begin than are kept), not_before (a time, or seconds from now), after (ids of jobs that are to end "
        "before), ..."
    ),
]
Model = Annotated[str | None, Field(description="Needed where the service has several models; an error lists them.")]
WaitS = Annotated[float, Field(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the result.")]


class Tools:
    """The tools of one service. Over HTTP each caller sends its own API key, over stdio the process has one."""

    def __init__(self, url: str | None, key: str | None) -> None:
        self._url = url
        self._key = key

    async def generate(
        self,
        context: Context,
        prompt: Annotated[
            str,
            Field(
                description="What the image or video shows, or what is to be heard. Models of meshes, and jobs with a "
                "control of the kind redux, need none."
            ),
        ] = "",
        model: Model = None,
        seed: Annotated[int | None, Field(ge=0, description="Repeats a result.")] = None,
        fields: Fields = None,
        wait_s: WaitS = 30.0,
    ) -> Content:
        """Generate images, a video, a sound or a mesh; returns it, or the job's id if it takes longer than `wait_s`."""
        chosen = {"priority": "interactive", **(fields or {})} | ({} if seed is None else {"seed": seed})
        async with self._service(context) as client:
            # As they are: the client would read a text among the images as the path of a file on this machine.
            job = await client.submit(await _model(client, model), prompt or None, extra_body=chosen)
            return await _result(client, await client.get(job.id, wait_s=wait_s), None)

    async def status(
        self, context: Context, id: Annotated[str, Field(description="Of a job or a batch.")]
    ) -> dict[str, Any]:
        """Read the state of a job, with its progress and queue position, or the number of jobs of a batch by state."""
        async with self._service(context) as client:
            if not id.startswith(BATCH):
                return _status(await client.get(id))
            jobs = [job async for job in client.jobs(batch_id=id, limit=MAX_PROMPTS)]
            if not jobs:
                raise ToolError(f"there is no batch {id}, or its jobs have been deleted")
            done = [job.id for job in jobs if job.status == "succeeded"]
            return {"id": id, "jobs": dict(Counter(job.status for job in jobs)), "succeeded": done[:MAX_LISTED]}

    async def result(
        self,
        context: Context,
        id: Annotated[str, Field(description="Of a job.")],
        index: Annotated[int | None, Field(ge=0, description="Only this image of the job.")] = None,
        wait_s: WaitS = 0.0,
    ) -> Content:
        """Read the images of a job that has succeeded; videos, sounds and meshes as URLs."""
        async with self._service(context) as client:
            return await _result(client, await client.get(id, wait_s=wait_s), index)

    async def batch(
        self,
        context: Context,
        prompts: Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, description="One job each.")],
        model: Model = None,
        fields: Fields = None,
    ) -> dict[str, Any]:
        """Queue a job for each prompt, to run when nothing more urgent does; returns the id of the batch."""
        batch_id = f"{BATCH}{uuid.uuid4().hex}"
        async with self._service(context) as client:
            name = await _model(client, model)
            common = {"priority": "bulk", **(fields or {}), "model": name, "batch_id": batch_id}
            results = [line async for line in client.submit_many({**common, "prompt": prompt} for prompt in prompts)]
        failures = [(line.line - 1, line.error.message) for line in results if line.error is not None]
        refused = [{"prompt": prompts[index], "error": message} for index, message in failures]
        if len(refused) == len(prompts):
            raise ToolError(f"no prompt was accepted; the first: {refused[0]['error']}")
        return {"id": batch_id, "queued": len(prompts) - len(refused), "refused": refused[:MAX_LISTED]}

    @asynccontextmanager
    async def _service(self, context: Context) -> AsyncIterator[AsyncClient]:
        """Yield a client with the caller's key; errors of the service become errors of the tool."""
        headers = context.headers
        key = self._key if headers is None else headers.get("authorization", "").rpartition(" ")[2]
        try:
            async with AsyncClient(self._url, api_key=key) as client:
                yield client
        except ClientError as error:
            raise ToolError(str(error)) from error


async def _model(client: AsyncClient, model: str | None) -> str:
    """Return the model, or the only one of the service."""
    if model is not None:
        return model
    names = [_name(entry) for entry in await client.models()]
    if len(names) != 1:
        raise ToolError(f"model: send one of {', '.join(names)}")
    return names[0]


def _name(model: Any) -> str:
    return str(model["id"] if isinstance(model, dict) else model.id)


def _status(job: Job) -> dict[str, Any]:
    names = {"id", "status", "phase", "model", "seed", "progress", "queue", "error"}
    return job.model_dump(mode="json", include=names, exclude_none=True)


async def _result(client: AsyncClient, job: Job, index: int | None) -> Content:
    """Return the images of a job as content, with a text about them; the text only while there are none."""
    if not job.ended:
        state = json.dumps(_status(job))
        return [f"The job is not done; read it with `status` or `result` in a while: {state}"]
    job.require_success()
    artifacts = [artifact for artifact in job.artifacts if index in (None, artifact.index)]
    if not artifacts:
        raise ToolError(f"index: job {job.id} has {len(job.artifacts)} images, not one with the index {index}")
    content: Content = []
    left = MAX_CONTENT_BYTES
    for artifact in artifacts:
        left -= artifact.bytes
        if left >= 0 and artifact.content_type.startswith("image/") and not artifact.was_sent:
            image = Image(data=await client.read(artifact.url), format=artifact.content_type.removeprefix("image/"))
            content.append(image)
    urls = [artifact.location if artifact.was_sent else artifact.url for artifact in artifacts]
    about = {"id": job.id, "model": job.model, "seeds": [artifact.seed for artifact in artifacts], "urls": urls}
    flagged = [artifact.index for artifact in artifacts if artifact.flagged]  # by the model's safety checker
    return [*content, json.dumps({**about, "flagged": flagged})]


def create_server(url: str | None, key: str | None) -> MCPServer[Any]:
    """Return the server of a service."""
    server: MCPServer[Any] = MCPServer("fusequeue", instructions=INSTRUCTIONS, version=VERSION, log_level="WARNING")
    tools = Tools(url, key)
    for tool in (tools.generate, tools.status, tools.result, tools.batch):
        server.add_tool(tool, structured_output=False)
    return server


def serve(url: str | None, key: str | None, http_port: int | None) -> None:
    """Serve over stdio or, with a port, over HTTP to this machine only; then each client sends its own key."""
    if http_port is None:
        create_server(url, key).run("stdio")
        return
    os.environ.pop("FUSEQUEUE_API_KEY", None)  # the client's default: callers would use the key of this process
    create_server(url, None).run("streamable-http", host="127.0.0.1", port=http_port, stateless_http=True)
