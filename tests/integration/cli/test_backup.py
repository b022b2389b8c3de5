"""`fusequeue backup` and `fusequeue restore` on a real Redis."""

from __future__ import annotations

import io
import os
import re
import stat
import subprocess
import sys
import tarfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.waiting import wait_until
from redis import Redis
from typer.testing import CliRunner

from cli.backup import create, redis_data
from cli.backup.archive import ArchiveWriter
from cli.backup.redis_connection import RedisConnection
from cli.main import app
from cli.up import environment, folder_lock, redis_server

ROOT = Path(__file__).resolve().parents[3]
PASSWORD_URL = "redis://:{}@127.0.0.1:{}/0"
DiskUsage = namedtuple("DiskUsage", "total used free")


def fusequeue(*arguments: object) -> tuple[int, str]:
    """Run a command and return its status and messages."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, result.stderr


class Deployment:
    """The data folder of a `fusequeue up`, with the Redis server of it while `running`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = folder / "storage"
        (self.storage / ".incomplete").mkdir(parents=True)
        (folder / "redis").mkdir()
        self.put("jobs/job_1/0.png", b"image")
        self.put(".incomplete/half", b"half")
        self.record("redis://127.0.0.1:1/0")

    def put(self, key: str, data: bytes) -> None:
        path = self.storage / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def record(self, url: str, **settings: str) -> None:
        values = {"FUSEQUEUE_STORAGE_DIR": str(self.storage), environment.REDIS_URL: url, **settings}
        environment.record(self.folder, values, "http://127.0.0.1:8000", own_redis=True)


def files_of(storage: Path) -> dict[str, bytes]:
    paths = (path for path in storage.rglob("*") if path.is_file())
    return {path.relative_to(storage).as_posix(): path.read_bytes() for path in paths}


def data_of(folder: Path) -> dict[str, str]:
    """Return the strings in the Redis data of a folder."""
    with redis_data.running_server(folder / "redis") as connection, client_of(folder) as client:
        assert connection.key_count() == client.dbsize()
        return {key: client.get(key) for key in client.scan_iter()}  # type: ignore[misc]


def client_of(folder: Path) -> Redis:
    lines = (folder / "redis" / "redis.conf").read_text().splitlines()
    values = dict(line.split(maxsplit=1) for line in lines)
    return Redis(port=int(values["port"]), password=values["requirepass"], decode_responses=True)


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """A stopped one, with one key in its Redis."""
    made = Deployment(tmp_path / "data")
    with redis_data.running_server(made.folder / "redis"), client_of(made.folder) as client:
        client.set("job", "succeeded")
    return made


@pytest.fixture
def running(deployment: Deployment) -> Iterator[Deployment]:
    """A running one."""
    with (
        folder_lock.lock(deployment.folder / "lock", "--data-dir"),
        redis_data.running_server(deployment.folder / "redis"),
        client_of(deployment.folder) as client,
    ):
        options = client.connection_pool.connection_kwargs
        deployment.record(PASSWORD_URL.format(options["password"], options["port"]))
        yield deployment


def test_a_stopped_deployment_is_restored_to_another_folder(deployment: Deployment, tmp_path: Path) -> None:
    target, restored = tmp_path / "backup.tar", tmp_path / "restored here"
    status, messages = fusequeue("backup", target, "--data-dir", deployment.folder)
    assert (status, bool(re.fullmatch(rf"{target}: 2 files, \d+\.\d KiB\n", messages))) == (0, True)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    status, messages = fusequeue("restore", target, "--data-dir", restored)
    assert (status, f"start it with: fusequeue up --data-dir '{restored}'" in messages) == (0, True)
    assert (restored / "storage" / "jobs" / "job_1" / "0.png").read_bytes() == b"image"
    assert not (restored / "storage" / ".incomplete").exists(), "what was being written belongs to no job"
    assert stat.S_IMODE(restored.stat().st_mode) == 0o700
    assert data_of(restored) == {"job": "succeeded"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar", "data", "restored here"]


@pytest.mark.parametrize("diskless", ["yes", "no"])
def test_a_running_one_is_copied_as_it_is_now(running: Deployment, tmp_path: Path, diskless: str) -> None:
    """In both forms in which servers send a snapshot, of more than one piece."""
    with client_of(running.folder) as client:
        client.config_set("repl-diskless-sync", diskless)
        client.set("large", os.urandom(1_500_000).hex())
        expected = {key: client.get(key) for key in client.scan_iter()}
        assert fusequeue("backup", tmp_path / "backup.tar", "--data-dir", running.folder)[0] == 0
        client.set("later", "1")
    assert fusequeue("restore", tmp_path / "backup.tar", "--data-dir", tmp_path / "restored")[0] == 0
    assert data_of(tmp_path / "restored") == expected


def test_files_of_jobs_that_end_during_the_backup_are_in_it(
    running: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is stored before its job ends, so those of all jobs of the snapshot are there when it is taken."""
    snapshot = RedisConnection.snapshot

    def after_changes(*arguments: object) -> None:
        running.put("jobs/job_2/0.png", b"new")
        running.put("jobs/job_1/0.png", b"image, changed")
        snapshot(*arguments)  # type: ignore[arg-type]
        running.put("jobs/job_3/0.png", b"newer")

    monkeypatch.setattr(RedisConnection, "snapshot", after_changes)
    assert fusequeue("backup", tmp_path / "backup.tar", "--data-dir", running.folder)[0] == 0
    assert fusequeue("restore", tmp_path / "backup.tar", "--data-dir", tmp_path / "restored")[0] == 0
    expected = {name: data for name, data in files_of(running.storage).items() if not name.startswith(".")}
    assert files_of(tmp_path / "restored" / "storage") == expected


def test_a_killed_backup_leaves_no_file_of_its_name(running: Deployment, tmp_path: Path) -> None:
    """The next one to the same name replaces what was left."""
    target = tmp_path / "backup.tar"
    command = [sys.executable, "-m", "cli.main", "backup", str(target), "--data-dir", str(running.folder)]
    with client_of(running.folder) as client:
        client.config_set("repl-diskless-sync-delay", 60)  # it waits for the snapshot
        with subprocess.Popen(command, cwd=ROOT) as process:
            wait_until(lambda: client.info("replication")["connected_slaves"] == 1, "it waits for Redis")
            process.kill()
        client.config_set("repl-diskless-sync-delay", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar.part", "data"]
    assert fusequeue("backup", target, "--data-dir", running.folder)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar", "data"]


def test_a_backup_that_takes_too_long_ends_without_a_file(
    running: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create.Progress, "count", lambda self, nbytes: (_ for _ in ()).throw(TimeoutError))
    status, messages = fusequeue("backup", tmp_path / "backup.tar", "--data-dir", running.folder)
    assert (status, "raise --timeout-s" in messages) == (6, True)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_backup_that_does_not_fit_is_refused(
    running: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create.shutil, "disk_usage", lambda path: DiskUsage(1, 1, 4))
    status, messages = fusequeue("backup", tmp_path / "backup.tar", "--data-dir", running.folder)
    assert (status, "has 0.0 KiB free, and the backup takes up to" in messages) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_images_in_a_bucket_are_named_as_missing(deployment: Deployment, tmp_path: Path) -> None:
    deployment.record("redis://127.0.0.1:1/0", FUSEQUEUE_S3_BUCKET="images")
    status, messages = fusequeue("backup", tmp_path / "backup.tar", "--data-dir", deployment.folder)
    assert (status, "the images are in a bucket, and not in the backup" in messages) == (0, True)
    with tarfile.open(tmp_path / "backup.tar") as tar:
        assert tar.getnames() == ["fusequeue-backup.json", "redis/dump.rdb", "SHA256SUMS"]


def no_deployment(folder: Path) -> None:
    (folder / "environment.json").unlink()


def other_redis(folder: Path) -> None:
    environment.record(folder, {environment.REDIS_URL: "redis://elsewhere"}, "http://127.0.0.1:8000", own_redis=False)


@pytest.mark.parametrize(
    ("change", "target", "message"),
    [
        (no_deployment, "backup.tar", "--data-dir must name the folder of a `fusequeue up`"),
        (other_redis, "backup.tar", "is not its own, but that of FUSEQUEUE_REDIS_URL: back it up by its own means"),
        (None, "data/redis", "exists already; choose another name"),
        (None, "data/storage/backup.tar", "is in the storage; choose another folder"),
        (None, "missing/backup.tar", "No such file or directory"),
    ],
)
def test_a_backup_that_cannot_be_made_is_refused_in_one_line(
    deployment: Deployment, tmp_path: Path, change: Callable[[Path], None] | None, target: str, message: str
) -> None:
    if change is not None:
        change(deployment.folder)
    status, messages = fusequeue("backup", tmp_path / target, "--data-dir", deployment.folder)
    assert (status, messages.count("\n"), message in messages) == (2, 1, True), messages
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_running_or_used_folder_is_not_restored_to(running: Deployment, tmp_path: Path) -> None:
    assert fusequeue("backup", tmp_path / "backup.tar", "--data-dir", running.folder)[0] == 0
    status, messages = fusequeue("restore", tmp_path / "backup.tar", "--data-dir", running.folder)
    assert (status, "is in use by process" in messages) == (2, True)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    status, messages = fusequeue("restore", tmp_path / "backup.tar", "--data-dir", tmp_path / "used")
    assert (status, "is not empty; move it away" in messages) == (2, True)


def older_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found = redis_server.find()
    monkeypatch.setattr(redis_server, "find", lambda: redis_server.RedisServer(found.path, (5, 0, 0)))


def other_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.backup.restore.QUEUE_SCHEMA", 1)


@pytest.mark.parametrize(
    ("version", "message"), [(older_server, "cannot read; put the newer one"), (other_schema, "queue schema")]
)
def test_a_backup_of_a_newer_version_is_refused(
    deployment: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: Callable[[pytest.MonkeyPatch], None],
    message: str,
) -> None:
    assert fusequeue("backup", tmp_path / "backup.tar", "--data-dir", deployment.folder)[0] == 0
    version(monkeypatch)
    status, messages = fusequeue("restore", tmp_path / "backup.tar", "--data-dir", tmp_path / "restored")
    assert (status, message in messages) == (2, True), messages
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar", "data"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("fusequeue-backup.json", b"{", "fusequeue-backup.json: Expecting"),
        ("fusequeue-backup.json", b"[1]", "fusequeue-backup.json: "),
        ("photo.png", b"{}", "it is no backup of fusequeue"),
    ],
)
def test_another_archive_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with (tmp_path / "backup.tar").open("wb") as file:
        archive = ArchiveWriter(file)
        archive.add(name, io.BytesIO(data))
        archive.close()
    status, messages = fusequeue("restore", tmp_path / "backup.tar", "--data-dir", tmp_path / "restored")
    assert (status, messages.count("\n"), message in messages) == (1, 1, True), messages
    assert [path.name for path in tmp_path.iterdir()] == ["backup.tar"]


def test_a_backup_that_is_not_there_is_a_bad_argument(tmp_path: Path) -> None:
    status, messages = fusequeue("restore", tmp_path / "backup.tar", "--data-dir", tmp_path / "restored")
    assert (status, f"'{tmp_path / 'backup.tar'}' does not exist" in messages) == (2, True)
    assert not list(tmp_path.iterdir())


def test_a_damaged_backup_leaves_no_folder(deployment: Deployment, tmp_path: Path) -> None:
    target = tmp_path / "backup.tar"
    assert fusequeue("backup", target, "--data-dir", deployment.folder)[0] == 0
    target.write_bytes(target.read_bytes().replace(b"image", b"imago", 1))
    status, messages = fusequeue("restore", target, "--data-dir", tmp_path / "restored")
    assert (status, "1 files differ from their digests, such as storage/jobs/job_1/0.png" in messages) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar", "data"]
