"""Policies: which ones differ between processes, and that scripts read all of them."""

from __future__ import annotations

import re

import pytest

from shared.config.settings import Settings
from shared.queue.policies import PolicySource, conflicts
from shared.queue.policy_table import POLICIES
from shared.queue.scripts import PARTS, script_files, script_text

API, WORKER = "api", "worker"
CONFLICTS = [
    ("no process", [], []),
    ("equal values", [(API, {"retention_s": "9"}, {}), (WORKER, {"retention_s": "9"}, {})], []),
    ("one sets it, the other follows", [(API, {"retention_s": "9"}, {}), (WORKER, {}, {"retention_s": "5"})], []),
    (
        "both set it",
        [(API, {"retention_s": "9"}, {}), (WORKER, {"retention_s": "5"}, {})],
        ["9 (api) applies, not 5 (worker)"],
    ),
    (
        "workers of two values",
        [(WORKER, {"retention_s": "9"}, {}), (WORKER, {"retention_s": "5"}, {}), (API, {}, {"retention_s": "1"})],
        ["9 (worker) applies, not 5 (worker)"],
    ),
    (
        "a worker reads its own leases",
        [(API, {"lease_ms": "9"}, {}), (WORKER, {}, {"lease_ms": "5"})],
        ["9 (api) applies, not 5 (worker)"],
    ),
    ("the API does not", [(WORKER, {"lease_ms": "9"}, {}), (API, {}, {"lease_ms": "5"})], []),
]


@pytest.mark.parametrize(("case", "sources", "seen"), CONFLICTS, ids=[row[0] for row in CONFLICTS])
def test_conflicts(case: str, sources: list[tuple[str, dict[str, str], dict[str, str]]], seen: list[str]) -> None:
    found = conflicts({"retention_s": "9", "lease_ms": "9"}, [PolicySource(*source) for source in sources])
    assert [conflict.seen for conflict in found] == seen, case


def test_an_announcement_is_read_as_it_was_written() -> None:
    source = PolicySource.of("api", Settings(retention_s=60))
    assert source.set == {"retention_s": "60"}
    assert source.set.keys() | source.defaults.keys() == POLICIES.keys()
    assert PolicySource.parse(source.text()) == source


def test_scripts_use_every_policy_and_know_every_name() -> None:
    """A name that the table lacks would be nil in Lua."""
    names = [name for name, path in script_files().items() if path.parent.name not in PARTS]
    texts = [script_text(name, Settings()) for name in names]
    read = {
        field
        for text in texts
        for field in re.findall(r"'(\w+)'", _line(text, "local policy = redis.call('HMGET', key.policies, "))
    }
    assert read == POLICIES.keys()
    for name, text in zip(names, texts, strict=True):
        defined = set(re.findall(r"(\w+) = ", _line(text, "local conf = ")))
        assert defined >= set(re.findall(r"\bconf\.(\w+)", text)), name
        assert "conf[" not in text, name


def _line(text: str, start: str) -> str:
    return next((line.removeprefix(start) for line in text.splitlines() if line.startswith(start)), "")
