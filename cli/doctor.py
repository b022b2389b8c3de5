"""`fusequeue doctor`: check settings, models, Redis, storage, API and device of a deployment."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import typer
from rich.markup import escape

from cli.client_options import CommandConsole, Exit, Json
from cli.findings import FAILED, OK, WARNING, Finding, Verdict, little_space
from cli.model_checks import model_findings
from cli.operators.keys import DATA, DataDir
from cli.up import environment
from fusequeue import InvalidArgument
from fusequeue.transport import open_client
from shared.config import settings
from shared.errors import FusequeueError
from shared.runtime.python_command import python_command

if TYPE_CHECKING:
    from shared.config.settings import Settings

TIMEOUT_S = 15.0
DEVICE_TIMEOUT_S = 300  # importing torch and diffusers from a cold disk is slow


_MARKS = {OK: "[green]ok[/]", WARNING: "[yellow]warning[/]", FAILED: "[red]failed[/]"}


def doctor(data_dir: DataDir = DATA, as_json: Json = False) -> None:
    """Check Redis, storage, models, API, device and memory with the current settings; exits with 1 if a check fails.

    Beside a `fusequeue up`, what the settings do not name are its Redis, API, storage and models file.
    """
    console = CommandConsole(as_json)
    environment.use_deployment(data_dir, os.environ)
    failed = False
    for finding in (*deployment_findings(), *_device()):
        failed = failed or finding.verdict is FAILED
        if as_json:
            console.record(asdict(finding), ())
            continue
        console.out.print(f"{_MARKS[finding.verdict]}  {escape(finding.name)}: {escape(finding.seen)}")
        if finding.remedy:
            console.out.print(f"    {finding.remedy}", markup=False)
    raise typer.Exit(Exit.FAILED if failed else Exit.OK)


def deployment_findings() -> Iterator[Finding]:
    """Run all checks except that of the device."""
    try:
        config = settings.load()
    except FusequeueError as error:
        yield Finding("settings", FAILED, error.message, "correct the variable; docs/operations/settings.md lists all")
        return
    settings.withhold_permissions(config)  # the check of the storage writes to its folder
    for message in settings.unknown_variables(os.environ):
        yield Finding("settings", WARNING, message, "correct its name, or unset it")
    yield from model_findings(config.models, config.batch_rules)
    yield from asyncio.run(_services(config))


async def _services(config: Settings) -> list[Finding]:
    results = await asyncio.gather(_redis(config), _storage(config), _api())
    return [finding for findings in results for finding in findings]


async def _redis(config: Settings) -> list[Finding]:
    from shared.queue import Queue  # imported only here: other commands do not need Redis

    try:
        queue = Queue.connect(config)
    except FusequeueError as error:
        return [Finding("redis", FAILED, error.message, "correct the variable")]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            traits, workers = await queue.examine(), await queue.workers.all()
            sources = await queue.policies.load()
    except (FusequeueError, TimeoutError) as error:
        remedy = "start Redis, or set FUSEQUEUE_REDIS_URL; `fusequeue up` starts one"
        return [Finding("redis", FAILED, _reason(error), remedy)]
    finally:
        await queue.close()
    findings = []
    for trait in traits:
        verdict = OK if not trait.remedy else FAILED if trait.fatal else WARNING
        findings.append(Finding(trait.name, verdict, trait.seen, trait.remedy))
    conflicts, roles = queue.policies.conflicts, ", ".join(sorted({source.role for source in sources}))
    findings += [Finding("policies", WARNING, f"{one.variable}: {one.seen}", one.remedy) for one in conflicts]
    if not conflicts:
        findings.append(Finding("policies", OK, f"one value of each for {roles}" if roles else "no process runs"))
    alive = Finding("workers", OK, f"{len(workers)} alive")
    return [*findings, alive if workers else Finding("workers", WARNING, "none alive", "start one: fusequeue worker")]


async def _storage(config: Settings) -> list[Finding]:
    from shared.storage import connect  # imports boto3, if there is a bucket

    name = f"bucket {config.s3_bucket}" if config.s3_bucket else f"folder {config.storage_dir}"
    variable = "FUSEQUEUE_S3_*" if config.s3_bucket else "FUSEQUEUE_STORAGE_DIR"
    if config.s3_bucket is None and _is_missing(config.storage_dir):
        remedy = f"the first process makes it; if the files are elsewhere, correct {variable}"
        return [Finding("storage", WARNING, f"{name} does not exist", remedy)]
    try:
        storage = connect(config)
    except FusequeueError as error:
        return [Finding("storage", FAILED, error.message, f"correct {variable}")]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await storage.check()
    except (FusequeueError, TimeoutError) as error:
        return [Finding("storage", FAILED, _reason(error), f"make {name} writable, or change {variable}")]
    finally:
        await storage.close()
    if config.s3_bucket is None and config.storage_dir.stat().st_mode & 0o007:
        seen = f"{name} is open to every user of this machine"
        return [Finding("storage", WARNING, seen, f"chmod o= {shlex.quote(str(config.storage_dir))}")]
    if config.s3_bucket is None and (little := little_space(config.storage_dir)):
        return [Finding("storage", WARNING, f"{name}: {little}", "free disk space, or shorten retention")]
    return [Finding("storage", OK, f"{name} is writable")]


def _is_missing(folder: Path) -> bool:
    """Return whether a folder does not exist, and can be made as far as its parents say."""
    return not folder.exists() and next(parent for parent in folder.absolute().parents if parent.exists()).is_dir()


async def _api() -> list[Finding]:
    url = os.environ.get("FUSEQUEUE_URL") or "http://127.0.0.1:8000"
    try:
        async with open_client(url, None, 5.0, None) as client:
            response = await client.get("/readyz")
    except (httpx.TransportError, InvalidArgument) as error:
        seen = f"{url}: {str(error) or type(error).__name__}"
        return [Finding("api", WARNING, seen, "start it: fusequeue api; or set FUSEQUEUE_URL to its address")]
    if response.is_success:
        return [Finding("api", OK, f"{url} is ready")]
    return [Finding("api", FAILED, f"{url} responds {response.status_code}: {response.text[:300]}", "read its log")]


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, FusequeueError) else f"no response within {TIMEOUT_S:.0f} s"


def _device() -> list[Finding]:
    """Check the device, whether models fit on it, and their packages, in a separate process, which imports torch."""
    module = "worker.engine.checks.memory_fit"
    if importlib.util.find_spec("torch") is None:
        remedy = "on a worker: pip install 'fusequeue-server[worker]'"
        return [Finding("device", WARNING, "torch is not installed", remedy)]
    try:
        done = subprocess.run(
            python_command(module), capture_output=True, text=True, timeout=DEVICE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [Finding("device", FAILED, f"no result after {DEVICE_TIMEOUT_S} s", f"run: python -P -m {module}")]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    findings = [Finding(line["name"], Verdict(line["verdict"]), line["seen"], line["remedy"]) for line in lines]
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2][:300]
        findings.append(Finding("device", FAILED, last_line, f"run: python -P -m {module}"))
    return findings
