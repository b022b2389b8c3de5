"""The file of a backup: what is written is read again, and damage is found."""

from __future__ import annotations

import io
import tarfile

import pytest

from cli.backup.archive import ArchiveWriter, DamagedBackup, read_archive

FILES = {"fusequeue-backup.json": b"{}", "storage/jobs/a.png": b"a" * 3000, "storage/empty": b""}


def archive(files: dict[str, bytes] = FILES, *, complete: bool = True) -> bytes:
    file = io.BytesIO()
    writer = ArchiveWriter(file)
    for name, data in files.items():
        assert writer.add(name, io.BytesIO(data)) == len(data)
    if complete:
        writer.close()
    return file.getvalue()


def contents(data: bytes) -> dict[str, bytes]:
    return {name: file.read() for name, file in read_archive(io.BytesIO(data))}


def with_entry(member: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(member)
    return file.getvalue()


def link() -> tarfile.TarInfo:
    member = tarfile.TarInfo("storage/link")
    member.type, member.linkname = tarfile.SYMTYPE, "/etc"
    return member


def test_the_files_are_read_as_they_were_written() -> None:
    assert contents(archive()) == FILES


def test_a_file_that_was_added_again_replaces_the_earlier_one() -> None:
    file = io.BytesIO()
    writer = ArchiveWriter(file)
    for data in (b"old", b"newer"):
        writer.add("storage/a", io.BytesIO(data))
    writer.close()
    assert contents(file.getvalue()) == {"storage/a": b"newer"}


def test_a_tar_program_and_sha256sum_can_read_it() -> None:
    with tarfile.open(fileobj=io.BytesIO(archive())) as tar:
        names = tar.getnames()
        assert {member.mode for member in tar.getmembers()} == {0o600}
        digests = tar.extractfile("SHA256SUMS")
        assert digests is not None
        lines = digests.read().decode().splitlines()
    assert names == [*FILES, "SHA256SUMS"]
    assert [line.split("  ")[1] for line in lines] == list(FILES)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file|its end is missing"),
        (b"no tar", "truncated|invalid"),
        (archive(complete=False), "end"),
        (archive()[:1000], "end"),
        (archive()[:3000], "end"),
        (archive().replace(b"a" * 20, b"a" * 19 + b"b", 1), "1 files differ from their digests, such as storage/jobs"),
        (archive({"../outside": b"x"}), "no backup has: '../outside'"),
        (archive({"/etc/x": b"x"}), "no backup has: '/etc/x'"),
        (with_entry(link()), "no backup has: 'storage/link'"),
    ],
)
def test_a_file_that_is_no_complete_backup_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DamagedBackup, match=message):
        contents(data)
