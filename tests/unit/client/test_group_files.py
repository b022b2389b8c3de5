"""The files of a group in a folder, against the real API."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fusequeue import AsyncClient, GroupDownload, NotFound

Work = Callable[..., Awaitable[bytes]]
PROMPTS = ("a Red fox!", "東京", "É" * 60, "")


async def make(api: AsyncClient, work: Work, prompt: str = "a fox", group: str = "nightly") -> None:
    await api.submit("demo", prompt or " ", group=group)
    await work()


async def test_files_are_named_as_in_the_archive(api: AsyncClient, work: Work, tmp_path: Path) -> None:
    """Those of the group only; a repetition saves what the folder lacks."""
    for prompt in PROMPTS:
        await make(api, work, prompt)
    await make(api, work, group="other")
    await api.submit("demo", "a fox", group="nightly")
    assert await api.download_group("nightly", tmp_path / "new") == GroupDownload(saved=4)
    archive = zipfile.ZipFile(io.BytesIO(await api.read("/v1/groups/nightly/artifacts.zip")))
    files = sorted((tmp_path / "new").iterdir())
    assert [file.name for file in files] == [name for name in archive.namelist() if name != "manifest.jsonl"]
    assert [file.read_bytes() for file in files] == [archive.read(file.name) for file in files]
    files[1].unlink()
    assert await api.download_group("nightly", tmp_path / "new") == GroupDownload(saved=1, kept=3)
    assert sorted((tmp_path / "new").iterdir()) == files


async def test_a_file_that_is_deleted_meanwhile_ends_no_download(api: AsyncClient, work: Work, tmp_path: Path) -> None:
    """Its job is still listed."""
    for _ in range(2):
        await make(api, work)
    gone, kept = [job.id async for job in api.jobs(group="nightly")]
    for file in (tmp_path / "storage").rglob(f"*{gone}*/*/*.png"):
        file.unlink()
    assert await api.download_group("nightly", tmp_path / "new") == GroupDownload(saved=1)
    assert [file.name.partition("-")[0] for file in (tmp_path / "new").iterdir()] == [kept]


async def test_a_group_that_does_not_exist_is_an_error(api: AsyncClient, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nightly"):
        await api.download_group("nightly", tmp_path)
    with pytest.raises(FileNotFoundError, match="/proc/new"):
        await api.download_group("nightly", "/proc/new")
