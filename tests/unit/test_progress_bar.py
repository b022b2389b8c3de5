"""The bar of the library: in a notebook without ipywidgets it is a text."""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace

import pytest
from rich.console import Console

from library import progress_bar


@pytest.mark.parametrize(("has_widgets", "is_text"), [(False, True), (True, False)])
def test_a_notebook_without_widgets_has_a_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_widgets: bool, is_text: bool
) -> None:
    found = SimpleNamespace() if has_widgets else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    monkeypatch.setattr(progress_bar, "get_console", lambda: Console(force_jupyter=True))
    bar = progress_bar.items_bar(shown=True)
    assert bar.console.is_jupyter is not is_text
    if is_text:
        with warnings.catch_warnings(), bar:
            warnings.simplefilter("error")
            bar.update(bar.add_task("items", total=3), completed=2)
        assert "2/3" in capsys.readouterr().out
