"""The commands that call a service, against an API process."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from harness.api_process import Server
from harness.http_server import ROOT, WORKER, claimed, deliver, next_claim, png
from harness.ports import free_port
from typer.testing import CliRunner

from cli.main import app
from cli.operators.operations import write_csv
from fusequeue import Client, UsageRow
from shared.job import State
from shared.job_fields import Priority
from shared.job_record import Outcome, Progress
from shared.queue import Queue

Run = Callable[..., Awaitable[Result]]
ORDER = ("queued", "running", "succeeded")
PROMPT = "a red circle on a blue ground, left"


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start(max_attempts="1")


@pytest.fixture
async def queue(server: Server) -> AsyncIterator[Queue]:
    queue = Queue.connect(server.settings)
    yield queue
    await queue.close()


def commands_of(server: Server) -> Run:
    """Return what runs a command, on a thread, because the test's loop acts as the worker."""
    runner = CliRunner(env={"FUSEQUEUE_URL": server.url, "COLUMNS": "200"})

    async def fusequeue(*arguments: str) -> Result:
        return await asyncio.to_thread(runner.invoke, app, arguments)

    return fusequeue


@pytest.fixture(autouse=True)
def in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(server: Server) -> Run:
    """Run a command for a server of this test only."""
    return commands_of(server)


@pytest.fixture
def run_shared(module_server: Server) -> Run:
    """Run a command for a server that has jobs of other tests."""
    return commands_of(module_server)


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


async def submitted(queue: Queue) -> str:
    """Wait for the job that a command submits and return its id."""
    async with asyncio.timeout(30):
        while True:
            records, _ = await queue.jobs.page("default")
            if records:
                return records[0].job.id
            await asyncio.sleep(0.05)


async def test_submit_saves_the_result(run: Run, queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "start.png").write_bytes(png())
    arguments = ("submit", PROMPT, "--image", "start.png", "-s", "seed=7", "-s", "strength=0.5", "-o", "out", "--json")
    running = asyncio.create_task(run(*arguments))
    data = await deliver(queue, tmp_path, await claimed(queue, await submitted(queue)))
    *events, job = lines(await running)
    # The stream starts with the state at its opening.
    assert [one["status"] for one in events] == sorted((one["status"] for one in events), key=ORDER.index)
    assert (job["status"], job["seed"], job["strength"]) == ("succeeded", 7, 0.5)
    assert [(tmp_path / file).read_bytes() for file in job["files"]] == [data]
    assert job["artifacts"][0]["url"].partition("?")[0] in (await run("status", job["id"])).stdout


async def test_a_job_is_listed_paused_watched_and_canceled(run: Run) -> None:
    (job,) = lines(await run("submit", PROMPT, "--no-wait", "--json"))
    assert [one["id"] for one in lines(await run("jobs", "--json", "--status", "queued"))] == [job["id"]]
    shown = (await run("status", job["id"])).stdout
    assert ("no_worker" in shown, "position" in shown) == (True, True)
    listed = await run("jobs")
    assert PROMPT in listed.stdout
    late = await run("submit", "later", "--timeout", "0")
    assert (late.exit_code, "continues" in late.stderr) == (6, True)
    assert f"{job['id']}  paused" in (await run("pause", job["id"])).stdout
    assert [one["paused_at"] for one in lines(await run("resume", job["id"], "--json"))] == [None]
    assert [one["status"] for one in lines(await run("cancel", job["id"], "--json"))] == ["canceled"]
    watched = await run("watch", job["id"])
    assert watched.exit_code == 1
    assert "canceled" in watched.stdout
    assert json.loads((await run("watch", job["id"], "--json")).stdout)["status"] == "canceled"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("submit", "x", "-s", "steps=900"), 2, "steps must be 1 to 100, not 900"),
        (("submit", "x", "-s", "steps"), 2, "NAME=VALUE"),
        (("submit", "x", "--image", "none.png"), 2, "none.png"),
        (("submit", "x", "--model", "none"), 4, "available: demo"),
        (("watch", "job_1"), 4, "there is no job job_1"),
        (("dead", "redrive", "job_1"), 4, "there is no dead letter job_1"),
        (("jobs", "--url", "http://127.0.0.1:9"), 3, "fusequeue up"),
    ],
)
async def test_an_error_is_one_line_and_an_exit_status(
    run_shared: Run, arguments: tuple[str, ...], status: int, message: str
) -> None:
    """Scripts read the status, people the line; there is no traceback."""
    result = await run_shared(*arguments)
    assert result.exit_code == status, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


async def test_options_are_the_fields_of_the_request(run_shared: Run) -> None:
    """Options and -s can be mixed."""
    options = ("--seed", "7", "--steps", "12", "--size", "96x64", "-n", "2", "--negative", "a square")
    more = ("--guidance", "3.5", "--output-quality", "50")
    sets = ("-s", "priority=bulk", "-s", 'metadata={"order": "7"}')
    (job,) = lines(await run_shared("submit", PROMPT, *options, *more, *sets, "--no-wait", "--json"))
    expected = {"seed": 7, "steps": 12, "width": 96, "height": 64, "n": 2, "negative_prompt": "a square"}
    expected |= {"guidance_scale": 3.5, "output_quality": 50, "priority": "bulk", "metadata": {"order": "7"}}
    assert {name: job[name] for name in expected} == expected


async def test_every_fault_of_a_request_is_a_line_that_names_its_field_once(run_shared: Run) -> None:
    options = ("--steps", "900", "--guidance", "1000", "-n", "99", "--size", "1x1", "-s", "seed=-5", "-s", "nonsense=1")
    result = await run_shared("submit", PROMPT, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    found = result.stderr.splitlines()
    assert all(line.startswith("fusequeue: ") for line in found)
    for field in ("steps", "guidance_scale", "n", "width", "height", "seed", "nonsense"):
        (line,) = [line for line in found if re.search(rf"^fusequeue: .*(?<!\w){field}(?!\w)", line)]
        assert len(re.findall(rf"(?<!\w){field}(?!\w)", line)) == 1, line


async def test_every_job_is_canceled_also_after_one_that_cannot_be(run: Run) -> None:
    (job,) = lines(await run("submit", PROMPT, "--no-wait", "--json"))
    result = await run("cancel", "job_1", job["id"], "..")
    assert (result.exit_code, result.stdout) == (4, f"{job['id']}  canceled\n")
    unknown, invalid = result.stderr.splitlines()
    assert "there is no job job_1" in unknown
    assert "'..'" in invalid


async def test_queued_jobs_are_updated_by_id_and_by_filter(run: Run, queue: Queue) -> None:
    ids = [lines(await run("submit", PROMPT, "--no-wait", "--json"))[0]["id"] for _ in range(3)]
    (job,) = lines(await run("update", ids[0], "--priority", "interactive", "--deadline", "600", "--json"))
    assert (job["priority"], job["deadline_at"] is not None) == ("interactive", True)
    (job,) = lines(await run("update", ids[0], "--no-deadline", "--json"))
    assert job["deadline_at"] is None
    dry = await run("update", "--status", "queued", "--priority", "bulk", "--dry-run")
    assert dry.stdout == "would be updated  3 jobs\n"
    (changes,) = lines(await run("update", "--model", "demo", "--priority", "bulk", "--json"))
    assert (changes["ids"], changes["dry_run"]) == (ids, False)
    assert {claim.job.priority for claim in await queue.claims.claim(WORKER, ["demo"], 8)} == {Priority.BULK}
    refused = await run("update", ids[0], "--priority", "standard")
    assert (refused.exit_code, "only queued jobs can be changed" in refused.stderr) == (2, True)


async def test_jobs_are_canceled_retried_and_deleted_by_filter(run: Run) -> None:
    first, second, other = [
        lines(await run("submit", PROMPT, "-s", f"batch_id={name}", "--no-wait", "--json"))[0]["id"] for name in "aab"
    ]
    for dry in (["--dry-run"], []):
        (changes,) = lines(await run("cancel", "--batch", "a", *dry, "--json"))
        assert changes["ids"] == [second, first]
    assert {job["id"]: job["status"] for job in lines(await run("jobs", "--json"))} == {
        **dict.fromkeys((first, second), "canceled"),
        other: "queued",
    }
    (job,) = lines(await run("retry", first, "--json"))
    assert (job["status"], job["batch_id"]) == ("queued", "a")
    (changes,) = lines(await run("retry", "--status", "canceled", "--json"))
    assert changes["new_ids"] == {first: job["id"], second: changes["new_ids"][second]}
    assert (await run("delete", "--status", "canceled")).stdout == "deleted  2 jobs\n"
    assert (await run("delete", "--batch", "b")).stdout == "deleted    0 jobs\nunchanged  1\n"
    assert (await run("cancel", other, job["id"])).exit_code == 0
    assert (await run("delete", other)).stdout == f"{other}  deleted\n"
    left = {one["id"] for one in lines(await run("jobs", "--json"))}
    assert left == {job["id"], changes["new_ids"][second]}


async def test_jobs_are_listed_by_the_filters_of_changes(run: Run) -> None:
    for order in ("7", "8"):
        await run("submit", PROMPT, "-s", f'metadata={{"order": "{order}"}}', "--no-wait")
    listed = lines(await run("jobs", "--metadata", "order=7", "--created-after", "2026-01-01", "--json"))
    assert [job["metadata"] for job in listed] == [{"order": "7"}]
    assert lines(await run("jobs", "--created-before", "2026-01-01", "--json")) == []


async def test_the_children_of_a_job_are_listed_and_canceled(run: Run) -> None:
    (parent,) = lines(await run("submit", PROMPT, "--no-wait", "--json"))
    (child,) = lines(await run("submit", PROMPT, "--after", parent["id"], "--no-wait", "--json"))
    assert [job["id"] for job in lines(await run("jobs", "--parent", parent["id"], "--json"))] == [child["id"]]
    (changes,) = lines(await run("cancel", "--parent", parent["id"], "--json"))
    assert changes["ids"] == [child["id"]]


@pytest.mark.parametrize(
    "arguments",
    [
        *((command, *rest) for command in ("cancel", "retry", "delete") for rest in ((), ("job_1", "--model", "demo"))),
        ("cancel", "--metadata", "order"),
        ("update", "job_1"),
        ("dead", "redrive"),
        ("dead", "purge", "job_1", "--dry-run"),
    ],
    ids=" ".join,
)
async def test_ids_or_filters_are_required(run_shared: Run, arguments: tuple[str, ...]) -> None:
    assert (await run_shared(*arguments)).exit_code == 2


async def test_a_result_that_cannot_be_saved_is_named(run: Run, queue: Queue, tmp_path: Path) -> None:
    """The job has succeeded, and its images can still be fetched; its folder was there to be made when it began."""
    running = asyncio.create_task(run("submit", PROMPT, "-o", "out/images"))
    job_id = await submitted(queue)
    (tmp_path / "out").write_text("not a folder")
    await deliver(queue, tmp_path, await claimed(queue, job_id))
    result = await running
    assert result.exit_code == 2
    named, error = result.stderr.splitlines()
    assert named.startswith(f"fusequeue: job {job_id} succeeded; its images are not saved; `fusequeue watch {job_id} ")
    assert error == "fusequeue: out/images: Not a directory"


async def test_a_flagged_image_is_named(run: Run, queue: Queue, tmp_path: Path) -> None:
    running = asyncio.create_task(run("submit", PROMPT))
    await deliver(queue, tmp_path, await claimed(queue, await submitted(queue)), flagged=True)
    assert re.search("^flagged +0, by the model's safety checker$", (await running).stdout, re.MULTILINE)


@pytest.mark.parametrize("retried", [False, True])
async def test_refused_lines_of_a_backfill_are_failures_of_those_lines(run: Run, tmp_path: Path, retried: bool) -> None:
    """Also in a later attempt, in which lines are submitted one by one."""
    (tmp_path / "prompts.jsonl").write_text('{"seed": 1}\n{"prompt": 5}\n{"prompt": "a", "nonsense": "\\ud800"}\n')
    command = ("backfill", "prompts.jsonl", "--out", "out", "--json")
    result = await run(*command)
    if retried:
        result = await run(*command, "--retry-failed")
    assert (result.exit_code, json.loads(result.stdout)["failed"]) == (1, 3), result.stderr
    manifest = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    for row, field in zip(manifest, ("prompt", "prompt", "nonsense"), strict=True):
        assert field in row["error"]
    errors = [line for line in result.stderr.splitlines() if line.startswith("fusequeue: prompts.jsonl:")]
    assert errors == [f"fusequeue: prompts.jsonl:{row['line']}: {row['error']}" for row in manifest]


async def test_options_of_a_backfill_are_fields_of_the_lines_without_them(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "steps": 902}\n{"steps": 2}\n')
    assert (await run("backfill", "prompts.jsonl", "--out", "out", "--steps", "901")).exit_code == 1
    manifest = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    for row, cause in zip(manifest, ("901", "902", "prompt"), strict=True):
        assert cause in row["error"]


async def test_an_invalid_group_of_a_backfill_is_refused_before_its_lines(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    refused = await run("backfill", "prompts.txt", "--out", "out", "--group", "a b")
    assert (refused.exit_code, "group: " in refused.stderr) == (2, True), refused.stderr
    assert "nothing was submitted" in refused.stderr
    assert "groups show" not in refused.stderr, "there is no such group"


async def test_models_queues_and_workers_are_listed(run: Run) -> None:
    assert [model["id"] for model in lines(await run("models", "--json"))] == ["demo"]
    await run("submit", PROMPT, "--no-wait")
    (line,) = lines(await run("queues", "--json"))
    assert (line["model"], line["jobs"]["standard"]) == ("demo", 1)
    assert "none" in (await run("workers")).stdout


async def test_the_doctor_checks_everything(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is checked in a child process."""
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", server.settings.redis_url)
    monkeypatch.setenv("FUSEQUEUE_MODELS", str(ROOT / "models.toml"))
    verdicts = {finding["name"]: finding["verdict"] for finding in lines(await run("doctor", "--json"))}
    assert (verdicts["api"], verdicts["models file"], verdicts["workers"]) == ("ok", "ok", "warning")
    assert "device" in verdicts
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", "redis://127.0.0.1:9/0")
    result = await run("doctor")
    assert result.exit_code == 1
    assert "fusequeue up" in result.stdout


async def test_cost_curves_are_listed(run: Run, queue: Queue) -> None:
    await queue.workers.learn_cost("cpu", "demo", "64x64", 4, 0.25)
    (curve,) = lines(await run("curves", "--model", "demo", "--json"))
    assert (curve["shape"], curve["points"]) == ("64x64", [{"rows": 4, "seconds": 0.25}])
    assert "4: 0.25" in (await run("curves")).stdout


async def test_work_is_paused_and_resumed(run: Run, queue: Queue) -> None:
    (paused,) = lines(await run("pause", "--model", "demo", "--reason", "a new driver", "--json"))
    assert (paused["kind"], paused["name"]) == ("model", "demo")
    assert "a new driver" in (await run("pauses")).stdout
    await run("submit", PROMPT, "--no-wait")
    job_id = await submitted(queue)
    assert "paused" in (await run("status", job_id)).stdout
    assert await queue.claims.claim(WORKER, ["demo"], 64) == []
    assert (await run("resume", "--model", "demo")).exit_code == 0
    assert [one.job.id for one in await queue.claims.claim(WORKER, ["demo"], 64)] == [job_id]
    actions = lines(await run("actions", "--json"))
    assert [(one["action"], one["target"]) for one in actions] == [("resume", "model demo"), ("pause", "model demo")]
    for arguments in (("pause",), ("pause", "--all", "--tenant", "acme"), ("resume", "--model", "demo", "--all")):
        assert (await run(*arguments)).exit_code == 2, arguments
    assert (await run("resume", "--all")).exit_code == 4


async def lose(queue: Queue, job_id: str) -> None:
    """Claim a queued job for a worker that is lost then."""
    claim = await claimed(queue, job_id)
    assert await queue.claims.lose(WORKER, {job_id: claim.epoch}, "killed") == 1


async def test_dead_letters_are_read_redriven_and_purged(run: Run, queue: Queue) -> None:
    (job,) = lines(await run("submit", PROMPT, "--no-wait", "--json"))
    for _ in range(2):
        await lose(queue, job["id"])
    (letter,) = lines(await run("dead", "--json"))
    assert (letter["id"], letter["reason"]) == (job["id"], "worker_lost")
    assert PROMPT in (await run("dead", "show", job["id"])).stdout
    for reason, count in (("worker_lost", 1), ("no_record", 0)):
        (changes,) = lines(await run("dead", "redrive", "--reason", reason, "--dry-run", "--json"))
        assert len(changes["ids"]) == count
        assert len(lines(await run("dead", "list", "--reason", reason, "--json"))) == count
    assert lines(await run("dead", "redrive", job["id"], "--json")) == [{"id": job["id"], "redriven": True}]
    assert [one["status"] for one in lines(await run("jobs", "--json"))] == ["queued"]
    while not lines(await run("dead", "--json")):
        await lose(queue, job["id"])
    assert (await run("dead", "purge", "--model", "demo")).stdout == "deleted  1 dead letter\n"
    assert lines(await run("jobs", "--json")) == []


async def test_usage_is_printed_as_csv(run: Run, queue: Queue) -> None:
    """RFC 4180, with names of columns; sums of what is not divided."""
    await run("submit", PROMPT, "--no-wait")
    (one,) = await queue.claims.claim(WORKER, ["demo"], 64)
    outcome = Outcome(state=State.FAILED, device_seconds=1.5, progress=Progress(step=4, total=8))
    assert await queue.claims.settle(WORKER, one.job.id, one.epoch, outcome)
    today = (await queue.usage.today()).isoformat()
    result = await run("usage", "--csv", "--from", today, "--to", today)
    assert result.exit_code == 0, (result.stderr, result.exception)
    head, line, end = result.stdout_bytes.decode().split("\r\n")
    assert dict(zip(head.split(","), line.split(","), strict=True)) == {
        **dict.fromkeys(head.split(","), "0"),
        **{"day": today, "tenant": "default", "model": "demo", "device_seconds": "1.5", "steps": "4", "failed": "1"},
    }
    assert end == ""
    (row,) = lines(await run("usage", "--by", "model", "--all-tenants", "--json"))
    assert (row["day"], row["model"], row["device_seconds"]) == (None, "demo", 1.5)
    assert "default" in (await run("usage")).stdout
    assert (await run("usage", "--csv", "--json")).exit_code == 2
    assert (await run("usage", "--from", "yesterday")).exit_code == 2


def test_no_name_becomes_a_formula_of_a_spreadsheet(capsys: pytest.CaptureFixture[str]) -> None:
    """Tenants and models of this service begin with a letter or digit; another service may allow more."""
    rows = [UsageRow(tenant=name, model='a,"b"', device_seconds=1) for name in ("=1+1", "+1", "-1", "@x", "acme")]
    write_csv(rows)
    _, *found = csv.reader(io.StringIO(capsys.readouterr().out, newline=""))
    assert [row[1] for row in found] == ["'=1+1", "'+1", "'-1", "'@x", "acme"]
    assert {row[2] for row in found} == {'a,"b"'}


async def test_groups_are_shown_changed_and_downloaded(run: Run, queue: Queue, tmp_path: Path) -> None:
    """A repeated download saves only what the folder lacks."""

    async def submit() -> str:
        (job,) = lines(await run("submit", PROMPT, "--group", "nightly", "--no-wait", "--json"))
        return str(job["id"])

    async def changed(command: str) -> list[str]:
        return list(lines(await run("groups", command, "nightly", "--json"))[0]["ids"])

    assert (await run("groups")).stdout == "none\n"
    done = []
    for _ in range(2):
        done.append(await submit())
        await deliver(queue, tmp_path, await claimed(queue, done[-1]))
    waiting = [await submit(), await submit()]
    assert sorted(await changed("pause")) == waiting
    (shown,) = lines(await run("groups", "show", "nightly", "--json"))
    assert {name: count for name, count in shown["jobs"].items() if count} == {"paused": 2, "succeeded": 2}
    assert "2 of 4" in (await run("groups")).stdout
    assert [group["name"] for group in lines(await run("groups", "list", "--json"))] == ["nightly"]
    assert (await run("groups", "retry", "nightly")).stdout == "retried  0 jobs\n", "none has failed"
    assert await changed("resume") == waiting
    one = await next_claim(queue)
    assert await queue.claims.settle(WORKER, one.job.id, one.epoch, Outcome(state=State.FAILED))
    assert await changed("retry") == [one.job.id]
    for saved, kept in ((2, 0), (0, 2)):
        (found,) = lines(await run("groups", "download", "nightly", "--out", "images", "--json"))
        assert (found["saved"], found["kept"]) == (saved, kept)
    names = sorted(file.name for file in Path("images").iterdir())
    assert names == [f"{job_id}-a-red-circle-on-a-blue-ground-left-0.png" for job_id in done]
    assert len(await changed("cancel")) == 2
    assert len(await changed("delete")) == 5
    for command in ("show", "pause", "download"):
        assert (await run("groups", command, "nightly")).exit_code == 4


async def test_a_command_without_a_key_says_where_one_is_named(start: Callable[..., Server]) -> None:
    """Not in which header. The port of one that listens is free again."""
    run, port = commands_of(start(auth="keys")), free_port()
    for arguments in (("jobs",), ("webhooks", "listen", "--port", str(port))):
        refused = await run(*arguments)
        assert refused.exit_code == 5
        assert refused.stderr.startswith("fusequeue: no API key: name one by --api-key or FUSEQUEUE_API_KEY")
    socket.create_server(("127.0.0.1", port)).close()


async def test_batches_are_listed_and_shown(run: Run, server: Server) -> None:
    assert (await run("batches")).stdout == "none\n"
    with Client(server.url) as client:
        first, second = (client.batches.create([{"model": "demo", "prompt": PROMPT}]) for _ in range(2))
    assert [one["id"] for one in lines(await run("batches", "--json"))] == [second.id, first.id]
    assert [one["id"] for one in lines(await run("batches", "--json", "--limit", "1"))] == [second.id]
    assert [one["id"] for one in lines(await run("batches", first.id, "--json"))] == [first.id]
    shown = (await run("batches", first.id)).stdout
    assert (first.id in shown, second.id in shown, "validating" in shown) == (True, False, True)
    assert (await run("batches", "batch_none")).exit_code == 4
