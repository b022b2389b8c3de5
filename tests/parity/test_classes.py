"""The page of pipeline classes knows every class of the installed diffusers, and is current."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
from diffusers import DiffusionPipeline, ModularPipeline, StableDiffusionPipeline
from parity.classes import page
from parity.classes.facts import Facts, Row
from parity.classes.standings import CHANGES_DENOISER, DECLARED, DEPRECATED, UNFUSED, UNTRIED, Kind, standing_of

from shared.tasks import Task

PAGE = Path(__file__).resolve().parents[2] / "docs/pipeline-classes.md"
TEXT = (Task.TEXT_TO_IMAGE,)

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_knows_every_class_of_diffusers(classes_page: Path | None) -> None:
    """A class that a new diffusers adds is judged, and `make classes` run."""
    known = page.standings()
    if classes_page is not None:
        classes_page.write_text(page.text(known), "utf-8")
    written = PAGE.read_text("utf-8")
    assert known.keys() - page.classes_on(written) == set(), "unknown classes: run `make classes` and read their lines"
    assert page.text(known) == written, "run `make classes`"


def test_a_new_class_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrandNewPipeline(StableDiffusionPipeline):  # type: ignore[misc]
        pass

    monkeypatch.setattr(diffusers, "BrandNewPipeline", BrandNewPipeline, raising=False)
    assert page.standings().keys() - page.classes_on(PAGE.read_text("utf-8")) == {"BrandNewPipeline"}


def test_declared_classes_are_there_and_have_one_reason() -> None:
    declared = [name for table in (DECLARED, UNFUSED) for names in table.values() for name in names]
    assert len(declared) == len({*declared})
    kinds = DiffusionPipeline | ModularPipeline
    assert [name for name in declared if not issubclass(getattr(diffusers, name), kinds)] == []


@pytest.mark.parametrize(
    ("facts", "kind", "why"),
    [
        (Facts("A", tasks=TEXT, ruled=("Net",)), Kind.FUSED, "rules of Net"),
        (Facts("A", tasks=TEXT, row=Row("page.md", fused=True)), Kind.FUSED, "[row](page.md)"),
        (Facts("A", tasks=TEXT, deprecated=True, row=Row("page.md", fused=True)), Kind.FUSED, "[row](page.md)"),
        (Facts("A", tasks=TEXT, denoisers=("Net",)), Kind.UNFUSED, UNTRIED),
        (Facts("A", tasks=TEXT, row=Row("page.md", fused=False)), Kind.UNFUSED, CHANGES_DENOISER),
        (Facts("A", tasks=TEXT, ruled=("Net",), changes_denoiser=True), Kind.UNFUSED, CHANGES_DENOISER),
        (Facts("A", tasks=TEXT, ruled=("Net",), deprecated=True), Kind.NOT_SERVED, DEPRECATED),
        (Facts("A", tasks=TEXT, packages=("onnx",)), Kind.NOT_SERVED, "it needs onnx, which workers lack"),
        (
            Facts("A", tasks=TEXT, ruled=("Net",), inputs=("hint",)),
            Kind.NOT_SERVED,
            "it needs hint, for which requests have no field",
        ),
    ],
)
def test_the_standing_of_a_class(facts: Facts, kind: Kind, why: str) -> None:
    assert standing_of(facts) == (kind, why)
