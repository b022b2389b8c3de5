"""One name per concept: classes, files and folders across packages, and the links of the docs."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "bench", "cli", "demo", "fusequeue", "shared", "worker")
MAX_ENTRIES = 16

SAME_CLASS = {
    "the client reads what the service writes": {
        "Artifact",
        "Batch",
        "BatchError",
        "BatchingStats",
        "CostCurve",
        "CostPoint",
        "DeadLetter",
        "Defaults",
        "DeliveryAttempt",
        "Failure",
        "Job",
        "Limits",
        "ModelOnWorker",
        "ModelOrder",
        "Pause",
        "Progress",
        "QueueDepth",
        "QueuePosition",
        "RequestCounts",
        "Scale",
        "TenantLimits",
        "TenantUse",
        "UnavailableModel",
        "UploadedAdapter",
        "UsageRow",
        "WebhookDelivery",
        "WebhookEndpoint",
        "WorkerInfo",
    },
    "the client raises what the service responds with": {"NotFound", "WaitTimeout"},
    "the client sends what the service selects by": {"JobFilters", "LetterFilters"},
}
SAME_FILE = {
    "every package has one": {"__init__.py", "__main__.py", "errors.py"},
    "the command of its folder": {"command.py"},
    "API keys and tenants: over HTTP, and what a key is": {"auth.py"},
    "one resource: its routes, its protocol, its keys in Redis, its chore": {
        "adapters.py",
        "batches.py",
        "cost_curves.py",
        "dead_letters.py",
        "events.py",
        "files.py",
        "images.py",
        "jobs.py",
        "model_orders.py",
        "models.py",
        "operations.py",
        "pauses.py",
        "predictions.py",
        "usage.py",
        "videos.py",
        "webhooks.py",
    },
    "changes of all that match: the client's, and the commands": {"matching.py"},
    "the upkeep of the queue: its scripts, and the chore that runs them": {"maintenance.py"},
    "a benchmark has the name of what it measures": {"pool.py"},
}
RETIRED_PHRASES = re.compile(r"\b(those who|who waits|what is due|(stands?|waits?|waiting|puts?) in line)\b")


def tracked() -> list[PurePosixPath]:
    """Return the files of the project, in a checkout or in a copy without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [PurePosixPath(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    return [PurePosixPath(path.relative_to(ROOT).as_posix()) for path in ROOT.rglob("*") if path.is_file()]


FILES = tracked()
MODULES = [path for path in FILES if path.suffix == ".py" and path.parts[0] in PACKAGES]
PAGES = [path for path in FILES if path.suffix == ".md" and path.parts[0] not in ("tests",)]


def test_two_packages_share_a_class_name_only_for_the_same_thing() -> None:
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        for node in ast.parse((ROOT / module).read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].add(module.parts[0])
    shared = {name: sorted(packages) for name, packages in owners.items() if len(packages) > 1}
    excused = set().union(*SAME_CLASS.values())
    assert {name: packages for name, packages in shared.items() if name not in excused} == {}
    assert excused - shared.keys() == set(), "no longer shared: remove from SAME_CLASS"


def test_a_file_name_occurs_twice_only_for_the_same_concept() -> None:
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        folders[module.name].append(str(module.parent))
    repeated = {name: where for name, where in folders.items() if len(where) > 1}
    excused = set().union(*SAME_FILE.values())
    assert {name: where for name, where in repeated.items() if name not in excused} == {}
    assert excused - repeated.keys() == set(), "no longer repeated: remove from SAME_FILE"


def test_no_folder_has_more_entries_than_a_reader_takes_in() -> None:
    entries: defaultdict[PurePosixPath, set[str]] = defaultdict(set)
    for path in FILES:
        for parent in path.parents:
            entries[parent].add(path.relative_to(parent).parts[0])
    visible = {parent: {name for name in names if not name.startswith(".")} for parent, names in entries.items()}
    assert {str(parent): len(names) for parent, names in visible.items() if len(names) > MAX_ENTRIES} == {}


def test_no_text_uses_a_retired_phrase() -> None:
    texts = [path for path in FILES if path.suffix in {".py", ".lua", ".md", ".toml", ".yaml"}]
    found = {
        f"{path}: {match.group()}"
        for path in texts
        if path.name not in ("test_layout.py", "CHANGELOG.md") and path.parts[0] != "constraints.txt"
        for match in RETIRED_PHRASES.finditer((ROOT / path).read_text("utf-8"))
    }
    assert found == set()


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


def test_the_architecture_walk_names_ten_files_and_functions_that_are_there() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    steps = re.findall(r"\*\*\d+\. \[`([^`]+)`\].*?Read ((?:`[^`]+`(?:, )?)+)\.", text, re.DOTALL)
    assert len(steps) == 10
    for name, functions in steps:
        code = (ROOT / name).read_text("utf-8")
        for function in re.findall(r"`([^`]+)`", functions):
            assert re.search(rf"(def|class) {function.rpartition('.')[2]}\b", code), (name, function)
