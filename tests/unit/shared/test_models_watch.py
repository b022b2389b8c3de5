"""A models file that changes while a process runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import models_file
from shared.config.catalog import Catalog
from shared.config.model_facts import ModelFacts
from shared.config.models_watch import ModelsWatch

ONE = '[[model]]\nid = "one"\nsource = "org/one"\n'
TWO = '[[model]]\nid = "two"\nsource = "org/two"\n'


def catalog_of(folder: Path, text: str) -> Catalog:
    path = folder / "other.toml"
    path.write_text(text, "utf-8")
    return models_file.load(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "models.toml"
    file.write_text(ONE, "utf-8")
    return file


async def watch_of(path: Path, rules: Path | None = None) -> ModelsWatch:
    """Return a watch that has read the file as it is."""
    watch = ModelsWatch(path, rules)
    assert await watch.poll() is None
    assert models_in(await watch.poll()) == ["one"]
    assert await watch.poll() is None
    return watch


def models_in(catalog: Catalog | None) -> list[str]:
    assert catalog is not None
    return [spec.id for spec in catalog]


async def test_a_change_counts_when_two_polls_have_read_it(path: Path) -> None:
    """A file that is being written can be a valid one with fewer models."""
    watch = await watch_of(path)
    path.write_text(TWO, "utf-8")
    assert await watch.poll() is None
    path.write_text(TWO + ONE, "utf-8")
    assert await watch.poll() is None
    assert models_in(await watch.poll()) == ["two", "one"]
    assert await watch.poll() is None


async def test_a_swapped_link_and_changed_rules_are_changes(path: Path, tmp_path: Path) -> None:
    """A ConfigMap is a folder of links to a link that is swapped; the times of its files can be older."""
    for name, text in (("old", ONE), ("new", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "models.toml").write_text(text, "utf-8")
    link, rules = tmp_path / "data", tmp_path / "rules.json"
    link.symlink_to(tmp_path / "old")
    rules.write_text('{"schema_version": 1, "rules": []}')
    watch = await watch_of(link / "models.toml", rules)
    (tmp_path / "swap").symlink_to(tmp_path / "new")
    (tmp_path / "swap").replace(link)
    assert await watch.poll() is None
    assert models_in(await watch.poll()) == ["two"]
    rules.write_text('{"schema_version": 1, "rules": [{"model_contains": "two", "max_batch_size": 2}]}')
    assert await watch.poll() is None
    changed = await watch.poll()
    assert changed is not None
    assert changed.for_size("two", 512, 512).max_batch == 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (ONE + "max_bach = 2\n", "model 'one': max_bach: unknown key"),
        ("", "model: Field required"),
        (ONE + ONE, "duplicate model ids or aliases: one"),
        (None, "No such file or directory"),
    ],
)
async def test_a_file_with_a_fault_is_named_until_it_is_mended(path: Path, text: str | None, fault: str) -> None:
    watch = await watch_of(path)
    if text is None:
        path.unlink()
    else:
        path.write_text(text, "utf-8")
    for _ in range(3):
        assert await watch.poll() is None
    assert fault in (watch.fault or "")
    path.write_text(ONE, "utf-8")
    assert await watch.poll() is None
    assert models_in(await watch.poll()) == ["one"]
    assert watch.fault is None


async def test_the_fault_of_a_change_that_cannot_be_applied_stays_until_the_next_one(path: Path) -> None:
    watch = await watch_of(path)
    watch.refuse("it needs more devices")
    await watch.poll()
    assert watch.fault == "it needs more devices"


def test_a_replaced_catalog_keeps_what_is_known_of_unchanged_models(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, ONE + TWO)
    catalog.learn({"one": ModelFacts(size_step=16), "two": ModelFacts(size_step=32)})
    version = catalog.version
    assert catalog.replace(catalog_of(tmp_path, TWO + 'aliases = ["second"]\n' + ONE.replace("org/one", "org/new")))
    assert catalog.version > version
    assert [spec.id for spec in catalog] == ["two", "one"]
    assert catalog.get("second").limits.multiple_of == 32
    assert catalog.get("one").limits.multiple_of == 8, "other weights"
    assert not catalog.replace(catalog_of(tmp_path, TWO + 'aliases = ["second"]\n' + ONE.replace("org/one", "org/new")))


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (ONE, {"two"}),
        (ONE + TWO + '[[model]]\nid = "new"\nsource = "org/new"\n', set()),
        (ONE + TWO + 'revision = "main"\n', {"two"}),
        (ONE + TWO + 'dtype = "float16"\n', {"two"}),
        (ONE + TWO + 'schedulers = ["euler"]\n', {"two"}),
        (ONE + TWO + "window_ms = 5\nmax_batch = 12\nslice_s = 3.0\n", set()),
        (ONE + TWO + "[model.defaults]\nsteps = 4\n[model.limits]\nmax_steps = 9\n", set()),
        (ONE + TWO + '[model.defaults]\nscheduler = "euler"\n', {"two"}),
        (ONE + TWO + "[model.limits]\nmax_controls = 2\n", {"two"}),
    ],
)
def test_models_are_loaded_anew_for_changes_of_what_is_in_memory_only(
    tmp_path: Path, text: str, changed: set[str]
) -> None:
    assert catalog_of(tmp_path, ONE + TWO).changed_in(catalog_of(tmp_path, text)) == changed
