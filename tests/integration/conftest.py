"""Fixtures of the integration tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny pipeline of every family, made once."""
    import factory  # here, so that tests without models do not wait for torch

    folder = tmp_path_factory.mktemp("models")
    for family in factory.FAMILIES:
        factory.save(family, folder / family)
    return folder
