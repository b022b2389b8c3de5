"""What `up` decides before it starts anything: ports, servers, folders, the environment of its parts."""

import os
import socket
import stat
from pathlib import Path

import pytest

from cli.up import command, ports, redis_server
from cli.up.redis_server import RedisServer
from shared.config.settings import Settings
from shared.errors import ConfigurationError


def options(tmp_path: Path, **more) -> command.Options:
    return command.Options(
        **{"host": "127.0.0.1", "port": 8000, "data_dir": tmp_path, "workers": 1, "models": None, **more}
    )


def server(path: Path, version: str) -> Path:
    path.mkdir(exist_ok=True)
    program = path / "redis-server"
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0:0 malloc=libc bits=64'\n")
    program.chmod(0o755)
    return program


def test_a_taken_port_is_stepped_over_with_a_word():
    """The next free port is taken, and the user is told."""
    told = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = ports.first_free("127.0.0.1", port, told.append, "the API")
    assert found > port
    assert told == [f"port {port} is taken; the API gets {found}"]


def test_a_free_port_is_taken_without_a_word():
    """Nothing is said when all is as asked."""
    told = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert ports.first_free("127.0.0.1", port, told.append, "the API") == port
    assert told == []


def test_an_address_of_another_machine_is_an_error_that_names_it():
    """No port of an address that is not ours is ever free: that is said at once."""
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1"):
        ports.first_free("192.0.2.1", 8000, lambda _: None, "the API")


def test_the_server_on_the_path_comes_first(tmp_path, monkeypatch):
    """Whoever has installed a redis-server means it to be used."""
    program = server(tmp_path, "7.2.4")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_server.find() == RedisServer(program, (7, 2, 4))


@pytest.mark.parametrize("version", ["5.0.7", "nonsense"])
def test_a_server_that_is_too_old_or_odd_is_passed_over(tmp_path, monkeypatch, version):
    """The scripts need Redis 6.2; an older one on the PATH must not be started with them."""
    server(tmp_path, version)
    monkeypatch.setenv("PATH", str(tmp_path))
    carried = server(tmp_path / "wheel", "6.2.14")
    monkeypatch.setattr(redis_server, "_carried", lambda: carried)
    assert redis_server.find().path == carried


def test_without_any_server_the_error_names_the_command_that_installs_one(monkeypatch):
    """Nobody is left alone with a traceback."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(redis_server, "_carried", lambda: None)
    with pytest.raises(ConfigurationError, match="apt-get install redis-server"):
        redis_server.find()


def test_the_configuration_is_for_its_owner_alone(tmp_path):
    """It holds the password; what the queue rests on is set in it."""
    folder = tmp_path / 'with "quotes"'
    command = redis_server.configure(RedisServer(Path("/bin/redis-server"), (7, 0, 1)), folder, 6391, "secret")
    written = Path(command[1])
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    lines = written.read_text().splitlines()
    expected = {"bind 127.0.0.1", "port 6391", "appendonly yes", "maxmemory-policy noeviction", "requirepass secret"}
    assert expected <= set(lines)
    assert f'dir "{tmp_path}/with \\"quotes\\""' in lines


def test_an_older_server_does_not_start_on_newer_data(tmp_path):
    """Redis 6 does not see what Redis 7 appended: it would start empty, without the acknowledged jobs."""
    newer, older = RedisServer(Path("/a"), (7, 0, 15)), RedisServer(Path("/b"), (6, 2, 14))
    redis_server.configure(newer, tmp_path, 6390, "secret")
    with pytest.raises(ConfigurationError, match=r"written by redis-server 7\.0\.15"):
        redis_server.configure(older, tmp_path, 6390, "secret")
    redis_server.configure(newer, tmp_path, 6390, "secret")


def test_two_do_not_share_a_data_folder(tmp_path):
    """Two Redis servers on one append-only file would destroy it; the second is told who has it."""
    with (
        command.locked(tmp_path),
        pytest.raises(ConfigurationError, match=f"process {os.getpid()}"),
        command.locked(tmp_path),
    ):
        pass
    with command.locked(tmp_path):
        pass


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_data_folder_that_cannot_be_is_an_error_that_names_it(tmp_path, name):
    """What is no folder, or cannot be made or written, is said in one line with the option to change."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=f"{tmp_path / 'file'}.*--data-dir"), command.locked(tmp_path / name):
        pass


@pytest.mark.parametrize(("cores", "workers", "threads"), [(1, 1, 1), (2, 1, 1), (8, 1, 7), (8, 2, 3), (4, 16, 1)])
def test_torch_leaves_a_core_to_the_rest(cores, workers, threads):
    """Workers share the cores but one; more threads than cores make all of them slower."""
    assert command.torch_threads(cores, workers) == threads


def test_pictures_go_to_the_data_folder(tmp_path):
    """The children find everything by absolute paths, wherever they run."""
    env = command.child_environment(tmp_path, 1, Path("/m.toml"), Settings(), {"HOME": "/root"})
    assert env["FUSEQUEUE_STORAGE_DIR"] == str(tmp_path / "storage")
    assert env["FUSEQUEUE_MODELS"] == "/m.toml"
    assert env["HOME"] == "/root"


def test_a_bucket_takes_the_folders_place(tmp_path, monkeypatch):
    """With an S3 bucket set, no folder is named to the children."""
    monkeypatch.setenv("FUSEQUEUE_S3_BUCKET", "pictures")
    env = command.child_environment(tmp_path, 1, Path("/m.toml"), Settings(), dict(os.environ))
    assert "FUSEQUEUE_STORAGE_DIR" not in env


def test_the_models_file_named_wins_and_the_demos_is_the_last_resort(tmp_path, monkeypatch):
    """An option, the environment, the present folder, what came with the program: in this order."""
    monkeypatch.chdir(tmp_path)
    assert command.chosen_models_file(None, {}) == command.CHECKOUT / "models.toml"
    (tmp_path / "models.toml").touch()
    assert command.chosen_models_file(None, {}) == tmp_path / "models.toml"
    assert command.chosen_models_file(None, {"FUSEQUEUE_MODELS": "/env.toml"}) == Path("/env.toml")
    assert command.chosen_models_file(Path("named.toml"), {"FUSEQUEUE_MODELS": "/env.toml"}) == tmp_path / "named.toml"


@pytest.mark.parametrize(
    ("host", "written"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "127.0.0.1")]
)
def test_the_url_is_one_that_a_client_here_can_open(host, written):
    """A wildcard address is not one to connect to."""
    assert command.reachable(host) == written


@pytest.mark.parametrize(
    ("number", "gpus", "environ", "visible"),
    [
        (1, [], {}, None),  # a CPU
        (2, ["0"], {}, None),  # one GPU is everybody's
        (1, ["0", "1"], {}, "0"),
        (2, ["0", "1"], {}, "1"),
        (3, ["0", "1"], {}, "0"),  # more workers than GPUs: in turn
        (2, ["GPU-a", "GPU-b"], {}, "GPU-b"),
        (2, ["0", "1"], {"FUSEQUEUE_DEVICE": "cuda:1"}, None),  # what the operator names stands
    ],
)
def test_workers_share_the_gpus_in_turn(number, gpus, environ, visible):
    expected = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert command.worker_environment(number, gpus, environ) == expected


@pytest.mark.parametrize(("number", "port", "own"), [(1, "9100", "9100"), (3, "9100", "9102"), (2, "http", None)])
def test_each_worker_has_a_port_of_its_own(number, port, own):
    """One port cannot be listened on twice; what is no port is left to the worker to refuse."""
    expected = {} if own is None else {"FUSEQUEUE_WORKER_PORT": own}
    assert command.worker_environment(number, [], {"FUSEQUEUE_WORKER_PORT": port}) == expected


def test_gpus_are_those_that_are_visible_else_those_there_are(tmp_path):
    """An empty list hides all of them, as CUDA takes it."""
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert command.gpus({}, tmp_path) == ["0", "1", "2", "10"]
    assert command.gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}, tmp_path) == ["3", "1"]
    assert command.gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
