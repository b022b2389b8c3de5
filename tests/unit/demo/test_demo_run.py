"""The demo's load, progress display, contact sheet and summary."""

import io
import sys
from datetime import UTC, datetime

import pytest
from PIL import Image
from rich.console import Console

from api.jobs.request import parse as parse_request
from api.jobs.resolve import resolve_for_model
from demo.contact_sheet import Cell, contact_sheet
from demo.drawings import parse
from demo.job_client import FinishedJob, ForwardCounts
from demo.planned_jobs import planned_jobs
from demo.progress_display import ProgressDisplay
from demo.run import fusequeue_up, save
from demo.summary import Summary, Throughput, nearly_equal, percentile
from fusequeue import Job
from shared.config import models_file
from shared.tasks import Task

MODELS = "models.toml"
# Is ready at once, and writes on SIGTERM whether its data folder, the last argument, exists.
UP = """
import pathlib, signal, sys
def end(*_):
    pathlib.Path({seen!r}).write_text(str(pathlib.Path(sys.argv[-1]).is_dir()))
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready http://localhost", flush=True)
signal.pause()
"""


def test_load_is_mixed():
    """At least 48 jobs in two sizes, some with input images, with various steps, guidance scales and priorities."""
    jobs = planned_jobs()
    assert len(jobs) >= 48
    for name, least in (("width", 2), ("steps", 5), ("guidance_scale", 3), ("priority", 3), ("n", 2), ("seed", 48)):
        assert len({job.body[name] for job in jobs}) >= least, name
    assert sum(job.input_image is not None for job in jobs) >= 4
    assert [job.body for job in planned_jobs()] == [job.body for job in jobs]


def test_demo_model_accepts_every_job(pytestconfig):
    """The request bodies are valid, and the checker can parse the prompts."""
    spec = models_file.load(pytestconfig.rootpath / MODELS).get("demo")
    for job in planned_jobs():
        task = Task.TEXT_TO_IMAGE if job.input_image is None else Task.IMAGE_TO_IMAGE
        body = dict(job.body) | ({} if job.input_image is None else {"image": "in_0"})
        assert resolve_for_model(parse_request(body), spec, "t", 0).task is task
        assert parse(job.prompt).caption() == job.prompt


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, 0), ([7], 95, 7), ([3, 1, 2], 50, 2), (list(range(1, 101)), 95, 95), (list(range(1, 5)), 95, 4)],
)
def test_percentile_is_a_given_value(values, percent, expected):
    """The nearest rank: no interpolation between few jobs."""
    assert percentile(values, percent) == expected


def summary(**changes) -> Summary:
    fields = {
        "submitted": 52,
        "succeeded": 52,
        "signatures": 2,
        "matching": 54,
        "forwards": ForwardCounts(150, 100 * 15).since(ForwardCounts(50, 100 * 8)),
        "queue_ms": (10, 20, 30),
        "fused": Throughput(52, 54, 9.0),
        "solo": Throughput(52, 54, 27.0),
        "equal": 54,
        "compared": 54,
    }
    return Summary(**{**fields, **changes})


def test_images_per_forward_is_the_mean_over_forwards():
    assert "images per forward: 7.0 (mean)" in summary().lines()


def test_summary_names_the_number_of_solo_jobs_if_not_all_ran():
    assert not any("the first" in line for line in summary().lines())
    assert any("the first 10 of the jobs" in line for line in summary(solo=Throughput(10, 10, 5.0)).lines())


def test_summary_of_solo_jobs_without_an_image_has_no_speed_up():
    """All of them failed; the demo then prints their errors."""
    lines = summary(solo=Throughput(1, 0, 27.0)).lines()
    assert "speed-up: unknown" in lines
    assert "speed-up: 3.0" in summary().lines()


def test_only_images_of_an_earlier_demo_are_removed(tmp_path):
    """The folder can hold the photos of the user."""
    planned = planned_jobs()[0]
    job = Job(
        id="job_1",
        status="succeeded",
        model="demo",
        prompt=planned.prompt,
        seed=1,
        n=1,
        width=64,
        height=64,
        steps=8,
        guidance_scale=2.0,
        created_at=datetime.now(UTC),
    )
    others = {"holiday.png", "01-0 holiday.png", f"{planned.prompt}.png", "notes.txt"}
    for name in (*others, f"07-1 {planned.prompt}.png"):
        (tmp_path / name).touch()
    save([planned], [FinishedJob(job, (Image.new("RGB", (64, 64)),))], tmp_path)
    own = {f"00-0 {planned.prompt}.png", "contact-sheet.png"}
    assert {path.name for path in tmp_path.iterdir()} == others | own


async def test_the_data_folder_is_removed_after_its_processes_have_ended(tmp_path, monkeypatch):
    """Redis writes into it until its end."""
    program, seen = tmp_path / "program", tmp_path / "seen"
    program.write_text(f"#!{sys.executable}\n" + UP.format(seen=str(seen)))
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with fusequeue_up(Console(file=io.StringIO())) as url:
        assert url == "http://localhost"
    assert seen.read_text() == "True"
    assert list(tmp_path.glob("fusequeue-demo-*")) == []


@pytest.mark.parametrize(("shade", "equal"), [(100, True), (102, True), (103, False), (97, False)])
def test_images_are_nearly_equal_within_two(shade, equal):
    """A difference of 2 is rounding. It must not wrap around in 8 bits in either direction."""
    assert nearly_equal(Image.new("RGB", (8, 8), (100, 0, 255)), Image.new("RGB", (8, 8), (shade, 0, 255))) is equal


def test_images_of_different_sizes_are_not_equal():
    assert not nearly_equal(Image.new("RGB", (8, 8)), Image.new("RGB", (8, 16)))


@pytest.mark.parametrize(
    ("status", "sizes", "succeeded"),
    [
        ("succeeded", [(96, 64)], True),
        ("succeeded", [], False),
        ("succeeded", [(64, 64)], False),
        ("failed", [(96, 64)], False),
    ],
)
def test_job_succeeds_only_with_all_its_images(status, sizes, succeeded):
    """A succeeded job without its image, or with one of another size, counts as failed."""
    job = Job(
        id="job_1",
        status=status,
        model="demo",
        prompt="a red circle",
        seed=1,
        n=1,
        width=96,
        height=64,
        steps=8,
        guidance_scale=2.0,
        created_at=datetime.now(UTC),
    )
    assert FinishedJob(job, tuple(Image.new("RGB", size) for size in sizes)).succeeded is succeeded


def test_contact_sheet_contains_every_image():
    """Each cell's image is on the sheet, in its colour."""
    shades = [(n, 200, 255 - n) for n in range(11)]
    cells = [Cell(Image.new("RGB", (96, 64), shade), "a red circle", "8 steps", correct=True) for shade in shades]
    sheet = contact_sheet(cells, "title")
    colours = {colour for _, colour in sheet.getcolors(maxcolors=100_000)}
    assert colours >= set(shades)


def test_progress_display_counts_finished_jobs():
    """Without a terminal it prints a plain line at the end."""
    out = io.StringIO()
    with ProgressDisplay(2, Console(file=out, force_terminal=False)) as display:
        display.update("a", "running", 3, 8)
        display.update("b", "queued", 0, 0)
        display.update("a", "succeeded", 0, 0)
        display.update("b", "running", 2, 8)
    assert out.getvalue().splitlines()[-1] == "1 of 2 jobs finished, 1 running, 10 denoising steps"
