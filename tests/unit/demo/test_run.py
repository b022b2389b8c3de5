"""The demo's load, its board, its contact sheet and the arithmetic of its summary."""

import io
from datetime import UTC, datetime

import pytest
from PIL import Image
from rich.console import Console

from demo.board import Board
from demo.jobs import planned
from demo.pictures import parse
from demo.service import Ended, Forwards
from demo.sheet import Cell, contact_sheet
from demo.summary import Rate, Summary, percentile, same
from fusequeue import Job
from shared.config import models_file
from shared.job import Task
from shared.job_builder import check_limits
from shared.request import parse as parse_request

MODELS = "models.toml"


def test_the_load_is_mixed():
    """At least 48 jobs in two sizes, with images to start from, and steps, guidance and priorities that differ."""
    jobs = planned()
    assert len(jobs) >= 48
    for name, least in (("width", 2), ("steps", 5), ("guidance_scale", 3), ("priority", 3), ("n", 2), ("seed", 48)):
        assert len({job.body[name] for job in jobs}) >= least, name
    assert sum(job.start is not None for job in jobs) >= 4
    assert [job.body for job in planned()] == [job.body for job in jobs]


def test_every_job_is_one_that_the_demo_model_takes(pytestconfig):
    """The demo cannot fail on its own request bodies, and the checker can read its prompts."""
    spec = models_file.load(pytestconfig.rootpath / MODELS).get("demo")
    for job in planned():
        task = Task.TEXT_TO_IMAGE if job.start is None else Task.IMAGE_TO_IMAGE
        body = dict(job.body) | ({} if job.start is None else {"image": "in_0"})
        assert check_limits(parse_request(body), spec) is task
        assert parse(job.prompt).caption() == job.prompt


@pytest.mark.parametrize(
    ("values", "percent", "found"),
    [([], 50, 0), ([7], 95, 7), ([3, 1, 2], 50, 2), (list(range(1, 101)), 95, 95), (list(range(1, 5)), 95, 4)],
)
def test_percentiles_are_values_that_were_seen(values, percent, found):
    """The nearest rank, so that a few jobs give no invented numbers."""
    assert percentile(values, percent) == found


def summary(**more) -> Summary:
    found = {
        "submitted": 52,
        "succeeded": 52,
        "signatures": 2,
        "fitting": 54,
        "forwards": Forwards(150, 100 * 15).since(Forwards(50, 100 * 8)),
        "waits_ms": (10, 20, 30),
        "fused": Rate(52, 54, 9.0),
        "alone": Rate(52, 54, 27.0),
        "same": 54,
        "compared": 54,
    }
    return Summary(**{**found, **more})


def test_the_mean_is_over_forwards():
    """Pictures per forward are all the pictures of all forwards by the number of forwards."""
    assert "pictures per forward: 7.0 (mean)" in summary().lines()


def test_a_comparison_with_a_part_of_the_jobs_says_so():
    """Whoever reads the numbers knows what was run."""
    assert not any("the first" in line for line in summary().lines())
    assert any("the first 10 of the jobs" in line for line in summary(alone=Rate(10, 10, 5.0)).lines())


@pytest.mark.parametrize(("shade", "equal"), [(100, True), (102, True), (103, False), (97, False)])
def test_pictures_are_equal_within_two(shade, equal):
    """A difference of 2 is rounding; 3 is another picture. Neither way may it wrap around in 8 bits."""
    assert same(Image.new("RGB", (8, 8), (100, 0, 255)), Image.new("RGB", (8, 8), (shade, 0, 255))) is equal


def test_pictures_of_other_sizes_are_not_equal():
    """They are not even compared."""
    assert not same(Image.new("RGB", (8, 8)), Image.new("RGB", (8, 16)))


@pytest.mark.parametrize(
    ("status", "sizes", "good"),
    [
        ("succeeded", [(96, 64)], True),
        ("succeeded", [], False),
        ("succeeded", [(64, 64)], False),
        ("failed", [(96, 64)], False),
    ],
)
def test_a_job_succeeds_with_all_its_pictures(status, sizes, good):
    """A job that says it succeeded but lacks its picture, or has one of another size, has not."""
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
    assert Ended(job, tuple(Image.new("RGB", size) for size in sizes)).succeeded is good


def test_the_sheet_holds_every_picture():
    """Nothing is cut off: each cell's picture is on the sheet, in its colour."""
    shades = [(n, 200, 255 - n) for n in range(11)]
    cells = [Cell(Image.new("RGB", (96, 64), shade), "a red circle", "8 steps", fits=True) for shade in shades]
    sheet = contact_sheet(cells, "title")
    colours = {colour for _, colour in sheet.getcolors(maxcolors=100_000)}
    assert colours >= set(shades)


def test_the_board_counts_ended_jobs():
    """Off a terminal it prints a plain line at the end."""
    out = io.StringIO()
    with Board(2, Console(file=out, force_terminal=False)) as board:
        board.note("a", "running", 3, 8)
        board.note("b", "queued", 0, 0)
        board.note("a", "succeeded", 0, 0)
        board.note("b", "running", 2, 8)
    assert out.getvalue().splitlines()[-1] == "1 of 2 jobs ended, 1 running, 10 denoising steps done"
