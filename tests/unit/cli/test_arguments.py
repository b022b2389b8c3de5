"""Arguments that no request is made of: a line that names the option, and exit status 2."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.client_options import CommandConsole
from cli.main import app
from cli.messages import one_line
from cli.up import folder_lock
from shared.runtime.clock import VERSION

BYTES = "caf\udce9"  # how Python reads an argument that is not UTF-8
LONG = "x" * 100_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in a folder with some odd files; a request would fail, as nothing listens at the URL."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEQUEUE_URL", "http://127.0.0.1:9")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "nan.jsonl").write_text('{"prompt": "a", "guidance_scale": NaN}\n')
    (tmp_path / "large.jsonl").write_text('{"prompt": "a", "guidance_scale": 1e999}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (tmp_path / "keys.jsonl").write_text('{"key": "a"}\n{"prompt": "b", "after": ["c"]}\n')
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "backfill.sqlite").write_bytes(b"no database" * 100)
    (tmp_path / "locked").mkdir()
    (tmp_path / "prompts.txt").write_text("a\n")
    (tmp_path / "models.toml").write_text('[[model]]\nid = "demo"\nsource = "a/b"\n')
    with folder_lock.lock(tmp_path / "locked" / "backfill.lock", "--out"):
        yield tmp_path


def fusequeue(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("webhooks", "listen", "--forward", "hook"),
            "'--forward': 'hook' is not a URL, such as http://127.0.0.1:3000",
        ),
        (("webhooks", "listen", "--public-url", "ftp://a.example"), "'--public-url': 'ftp://a.example' is not a URL"),
        (("submit", BYTES), "'prompt': 'caf\\udce9' is not UTF-8"),
        (("submit", "x", "--model", BYTES), "'--model': 'caf\\udce9' is not UTF-8"),
        (("submit", "x", "--negative", BYTES), "'--negative'"),
        (("submit", "x", "-s", f"prompt={BYTES}"), "'--set'"),
        (("submit", "x", "-s", "steps"), "'--set': 'steps' is not NAME=VALUE"),
        (("submit", "x", "-s", "=x", "-s", "steps", "-s", "a=1"), "'=x' is not NAME=VALUE; 'steps' is not NAME=VALUE"),
        (("submit", "x", "-s", "steps=3", "--steps", "4"), "'--set': steps: an argument or another option sets it too"),
        (("submit", "x", "-s", "seed=1", "-s", "seed=2"), "'--set': seed has two values; give it one"),
        (("submit", "x", "-s", "guidance_scale=3", "--guidance", "3"), "'--set': guidance_scale: an argument or"),
        (("submit", "x", "-s", "height=64", "--size", "64x64"), "'--set': height: an argument or another"),
        (("submit", "x", "-s", "prompt=y"), "'--set': prompt: an argument or another"),
        (("submit", "x", "-s", "model=a", "--model", "demo"), "'--set': model: an argument or another"),
        (("submit", "x", "-s", "image=a", "--image", "file"), "'--set': image: an argument or another"),
        (("submit", "x", "-s", "mask=a", "--mask", "file"), "'--set': mask: an argument or another"),
        (("submit", "x", "-s", "output={}", "--output-bucket", "b"), "'--set': output: an argument or another"),
        (("cancel", "--metadata", "a=1", "--metadata", "a=2"), "'--metadata': a has two values; give it one"),
        (("submit", "x", "--seed", "many"), "'--seed'"),
        (("submit", "x", "--steps", "1.5"), "'--steps'"),
        (("submit", "x", "-n", ""), "'-n'"),
        (("submit", "x", "--size", "64"), "'--size': '64' is not WIDTHxHEIGHT"),
        (("submit", "x", "--size", "64x64\n"), "'--size': '64x64\\n' is not"),
        (("submit", "x", "--size", "6４x64"), "'--size'"),
        (("submit", "x", "--guidance", "nan"), "'--guidance'"),
        (("submit", "x", "--guidance", "1e999"), "'--guidance': inf is not a finite number"),
        (("submit", "x", "--timeout", "inf"), "'--timeout': inf is not a finite number"),
        (("submit", "x", "--timeout", "-1"), "'--timeout'"),
        (("submit", "x", "--image", "folder.txt"), "'--image'"),
        (("submit", "x", "--mask", "none.png"), "'--mask'"),
        (("submit", "x", "--out", "file"), "'--out'"),
        (("submit", "x", "--output-url", BYTES), "'--output-url': 'caf\\udce9' is not UTF-8"),
        (("submit", "x", "--output-url", "https://a/b", "--output-bucket", "c"), "'--output-url': send either it or"),
        (("status", LONG), "has more than 1000 characters"),
        (("watch", LONG), "has more than 1000 characters"),
        (("status", ".."), "invalid id: '..'"),
        (("cancel", ""), "invalid id: ''"),
        (("dead", "purge", BYTES), "'caf\\udce9' is not UTF-8"),
        (("jobs", "--status", LONG), "'--status'"),
        (("jobs", "--limit", "0"), "'--limit'"),
        (("backfill", "folder.txt", "--out", "out"), "'prompts'"),
        (("backfill", "latin.txt", "--out", "out"), "'prompts': latin.txt: not UTF-8"),
        (("backfill", "nan.jsonl", "--out", "out"), "nan.jsonl:1: NaN is not a finite number"),
        (("backfill", "large.jsonl", "--out", "out"), "large.jsonl:1: 1e999 is not a finite number"),
        (("backfill", "deep.jsonl", "--out", "out"), "deep.jsonl:1: "),
        (("backfill", "keys.jsonl", "--out", "out"), "'prompts': keys.jsonl:2: after.0: no line before this one has"),
        (("backfill", "prompts.txt", "--out", "out", "-s", "batch_id=b"), "'--set': batch_id: a backfill sets it"),
        (("backfill", "prompts.txt", "--out", "out", "-s", "n=2", "-n", "2"), "'--set': n: an argument or another"),
        (("backfill", "prompts.txt", "--out", "out", "-s", "model=a", "--model", "b"), "model: an argument or"),
        (("backfill", "prompts.txt", "-o", "locked"), "locked is in use by process "),
        (("backfill", "prompts.txt", "--out", "used"), "'--out': used/backfill.sqlite: file is not a database"),
        (("backfill", "prompts.txt", "--out", "file/out"), "file/out: Not a directory"),
        (("generate", "x", "--model", "none", "--after", "job_1"), "No such option: --after"),
        (("generate", "x", "--model", "none", "--out", "file/out"), "file/out: Not a directory"),
        (("generate", "x", "--model", "none", "--out", "/proc/out"), "/proc/out: No such file"),
        (("submit", "x", "-o", "file/out"), "file/out: Not a directory"),
        (("submit", "x", "-o", "/proc"), "/proc"),
        (("groups", "download", "nightly", "-o", "file/out"), "file/out: Not a directory"),
        (("pause", "model=demo"), "model=demo is no id; filters are options, such as --model demo"),
        (("cancel", "created_after=1"), "created_after=1 is no id; filters are options, such as --created-after 1"),
        (("dead", "purge", "reason=oom"), "reason=oom is no id; filters are options, such as --reason oom"),
        (("pool", "--cool-down-s", "nan"), "'--cool-down-s'"),
        (("pool", "--poll-interval-s", "nan"), "'--poll-interval-s'"),
        (("up", "--models", "models.toml", "--host", "a" * 70, "--workers", "0"), "change --host"),
        (("up", "--models", "models.toml", "--host", "999.1.1.1\n"), "cannot listen on 999.1.1.1"),
        (("up", "--models", "models.toml", "--data-dir", "file"), "--data-dir must name a writable folder"),
        (("pool", "--url", "nonsense"), "invalid URL of the service: 'nonsense'"),
        (("mcp", "--url", "nonsense"), "invalid URL of the service: 'nonsense'"),
        (("groups", "pause", BYTES), "'NAME': 'caf\\udce9' is not UTF-8"),
        (("groups", "download", "nightly", "-o", "file"), "'-o'"),
        (("jobs", "--url", "ftp://x"), "invalid URL of the service: 'ftp://x'"),
        (("jobs", "--url", "http://\x1b[31m"), "invalid URL of the service"),
        (("jobs", "--api-key", "é"), "invalid API key"),
        (("nonsense",), "No such command 'nonsense'"),
        (("groups", "nonsense"), "No such command 'nonsense'"),
        (("groups", "list", "nonsense"), "No such command 'nonsense'"),
        (("webhooks", "list"), "No such command 'list'"),
        (("groups", "--json", "show", "nightly"), "--json is for the list: an option of `show` goes after it"),
    ],
)
def test_a_fault_is_one_line_that_names_the_option(arguments: tuple[str, ...], expected: str) -> None:
    result = fusequeue(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("Usage:", "Try ", "  "))]
    (line,) = filter(None, lines)
    assert expected in line
    assert line.isprintable()
    assert len(line) < 2100
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize("prompts", ["nan.jsonl", "keys.jsonl"])
def test_an_invalid_prompt_file_leaves_no_new_folder(prompts: str) -> None:
    Path("mine").mkdir()
    for out in ("new", "mine"):
        assert fusequeue("backfill", prompts, "--out", out).exit_code == 2
    assert [Path(out).exists() for out in ("new", "mine")] == [False, True]


def test_a_full_disk_is_an_error_that_names_the_folder() -> None:
    Path("full").mkdir()
    Path("full/manifest.part").symlink_to("/dev/full")
    result = fusequeue("backfill", "prompts.txt", "-o", "full")
    assert "full: No space left on device; mend it, and run the same command to resume\n" in result.stderr
    assert (result.exit_code, os.path.lexists("full/manifest.part")) == (2, False)


def test_a_field_without_an_option_beside_it_replaces_a_default() -> None:
    result = fusequeue("submit", "x", "-s", "model=other", "--size", "64x64", "-s", "steps=3")
    assert result.exit_code == 3, result.stderr  # sent: nothing listens


def test_the_version_is_an_option_too() -> None:
    for argument in ("--version", "version"):
        assert (fusequeue(argument).exit_code, fusequeue(argument).stdout) == (0, f"{VERSION}\n")


def test_help_names_options_in_full_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = fusequeue("submit", "--help").stdout
    for option in ("--negative", "--guidance", "--timeout", "--seed", "--steps", "--size", "-n", "--set"):
        assert option in shown


def test_help_names_the_kinds_of_values_in_plain_words() -> None:
    shown = fusequeue("submit", "--help").stdout
    for words in ("prompt <text>", "--image <file>", "--seed <number>", "--guidance <number>", "--out <folder>"):
        assert words in shown
    assert not re.search(r"<(?:str|int|float|list|dir)\b", shown)


def test_help_of_a_group_says_in_full_what_its_commands_do() -> None:
    shown = " ".join(fusequeue("groups", "--help").stdout.split())
    assert "Show a group: its jobs by state, its rate, the time left and its device time." in shown
    assert "--limit <number>" in shown


def test_output_has_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON escapes it, and can be read back; text has a space in its place."""
    hostile = {"prompt": "a\x1b[31m\n\x9b\u202e\ud800é :cat: [b]"}
    CommandConsole(as_json=True).record(hostile, ())
    shown = capsys.readouterr().out
    assert shown.removesuffix("\n").isprintable()
    assert "é" in shown
    assert json.loads(shown) == hostile
    assert one_line(hostile["prompt"]) == "a [31m    é :cat: [b]"
