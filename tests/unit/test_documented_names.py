"""Settings, commands, options and error codes that the docs name are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from api.errors import STATUSES
from api.jobs.request import JobRequest
from cli.main import app
from shared.config.settings import Settings
from shared.errors import JobError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CLIENTS_SETTINGS = {"FUSEQUEUE_API_KEY", "FUSEQUEUE_URL"}
SETTINGS = CLIENTS_SETTINGS | {f"FUSEQUEUE_{name.upper()}" for name in Settings.model_fields}
EXAMPLES = {"FUSEQUEUE_EXAMPLE_LIMIT", "fusequeue scale"}
"""What recipes add as an example."""


def test_settings_that_docs_name_are_there() -> None:
    for page in PAGES:
        named = set(re.findall(r"FUSEQUEUE_[A-Z0-9_]*[A-Z0-9]", page.read_text("utf-8")))
        assert named - SETTINGS - EXAMPLES == set(), page


def test_every_field_of_a_job_is_documented() -> None:
    text = "".join(page.read_text("utf-8") for page in (ROOT / "docs/clients").glob("*.md"))
    assert [name for name in JobRequest.model_fields if not re.search(rf"[`\"]{name}[`\":]", text)] == []


def command_lines() -> list[tuple[str, str]]:
    """Return what the docs say after `fusequeue`, in blocks of shell commands and in sentences, with its page."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        blocks = "\n".join(re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE))
        quoted = re.findall(r"`([^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        lines = [*blocks.replace("\\\n", " ").splitlines(), *(" ".join(code.split()) for code in quoted)]
        starts = (re.search(r"^(?:[A-Z_]+=\S+ )*(?:.*-- )?fusequeue (?=[a-z])(.*)", line) for line in lines)
        found += [(str(page.relative_to(ROOT)), start[1]) for start in starts if start]
    return [(page, line) for page, line in found if f"fusequeue {line}" not in EXAMPLES]


def test_commands_and_options_that_docs_name_are_there() -> None:
    lines = command_lines()
    assert len(lines) > 100
    for page, line in lines:
        words = shlex.split(line.removesuffix(")"), comments=True)
        command: Any = get_command(app)
        while words and hasattr(command, "get_command") and not words[0].startswith("-"):
            command = command.get_command(None, words.pop(0))
            assert command, (page, line)
        options = {"--help"}.union(*((*option.opts, *option.secondary_opts) for option in command.params))
        named = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert named <= options, (page, line)


def documented_codes() -> tuple[dict[str, int], set[str]]:
    """Return the codes of requests with their status, and those of jobs."""
    requests, jobs = (ROOT / "docs/clients/errors.md").read_text("utf-8").split("\n## Of jobs\n")
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", requests, re.MULTILINE)
    of_requests = {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    of_jobs = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?) \|", jobs, re.MULTILINE)))
    return of_requests, set(of_jobs)


def test_every_error_code_is_documented_with_its_status() -> None:
    of_requests, of_jobs = documented_codes()
    assert of_requests == {code: STATUSES[code][0] for code in of_requests}
    assert STATUSES.keys() <= of_requests.keys() | of_jobs


def subclasses(error: type[JobError]) -> set[type[JobError]]:
    return {error}.union(*(subclasses(child) for child in error.__subclasses__()))


@pytest.mark.parametrize("error", sorted(subclasses(JobError), key=lambda error: error.__name__))
def test_every_error_of_a_job_is_documented(error: type[JobError]) -> None:
    assert error.code in documented_codes()[1]
