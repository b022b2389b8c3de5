"""What the docs name and link to is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "bench", "cli", "demo", "fusequeue", "library", "shared", "worker")


def tracked() -> list[PurePosixPath]:
    """Return the files of the project, in a checkout or in a copy without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [PurePosixPath(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    return [PurePosixPath(path.relative_to(ROOT).as_posix()) for path in ROOT.rglob("*") if path.is_file()]


FILES = tracked()
PAGES = [path for path in FILES if path.suffix == ".md" and path.parts[0] not in ("tests",)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_links_of_a_page_lead_somewhere(page: PurePosixPath) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page.parent / name).resolve() if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_files_that_a_page_names_are_there(page: PurePosixPath) -> None:
    folders = "|".join((*PACKAGES, "compose", "docs", "tests"))
    named = re.findall(rf"`((?:{folders})/[\w./-]+\.[a-z]+)`", (ROOT / page).read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_lines_of_docs_fit_in_an_editor() -> None:
    """Rows of tables, code, and pages that a command writes aside."""
    long = []
    for page in (page for page in PAGES if not re.search(r"docs/(compatibility|clients-tested)|^bench/", str(page))):
        text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        lines = (line for line in text.splitlines() if not line.lstrip().startswith(("|", "<", "#", "![")))
        long += [
            (str(page), line[:60])
            for line in lines
            if len(line) > 120 and " " in re.sub(r"`[^`]*`|\]\([^)]*\)", "", line).strip()
        ]
    assert long == []


def test_the_architecture_walk_names_ten_files_and_functions_that_are_there() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    steps = re.findall(r"\*\*\d+\. \[`([^`]+)`\].*?Read ((?:`[^`]+`(?:, )?)+)\.", text, re.DOTALL)
    assert len(steps) == 10
    for name, functions in steps:
        code = (ROOT / name).read_text("utf-8")
        for function in re.findall(r"`([^`]+)`", functions):
            assert re.search(rf"(def|class) {function.rpartition('.')[2]}\b", code), (name, function)
