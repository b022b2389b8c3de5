"""`make containers`: build the images, and run the compose file with jobs, kills and stops; prints a table.

DOCKER is the engine's command, and COMPOSE_FILES names more compose files, such as one with other arguments of the
builds. Temporary files lie in TMPDIR, which the engine must see. Fails if a row of the table is not as it must be.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from containers.project import BUILD_S, COMMAND_S, SERVICES, Project, engine_command, project, until

LINES, STEPS, SCALED = 150, 60, 60
BACKFILL_S = 600.0
"""Most seconds of a backfill, which takes half a minute on two cores that nothing else uses."""
KILLED = ("worker-cpu", "api", "chores", "redis", "s3")
GRACE_S = 20.0
"""Most seconds that a stop takes that waits for nothing; the least grace period of the services."""


@dataclass(frozen=True)
class Row:
    """What was tried, its figures, and whether they are as they must be."""

    tried: str
    seen: str
    right: bool = True


class Rows:
    def __init__(self) -> None:
        self.all: list[Row] = []

    def add(self, tried: str, seen: str, right: bool = True) -> None:
        self.all.append(Row(tried, seen, right))
        print(f"{'ok   ' if right else 'WRONG'} {tried}: {seen}", flush=True)


def timed(run: Callable[[], object]) -> float:
    started = time.monotonic()
    run()
    return time.monotonic() - started


def build(compose: Project, rows: Rows) -> None:
    """Build both images, and the worker's once more after an edit."""
    seconds = timed(lambda: compose.compose("build", "api", "worker-cpu", timeout_s=BUILD_S))
    rows.add("build of both images", f"{seconds:.0f} s")
    edited = compose.folder / "source/shared/job.py"
    edited.write_text(edited.read_text("utf-8") + "\n# edited\n", "utf-8")
    seconds = timed(lambda: compose.compose("build", "worker-cpu", timeout_s=BUILD_S))
    rows.add("build after an edit", f"{seconds:.1f} s", seconds < 60)
    for image in ("fusequeue-api", "fusequeue-worker-cpu"):
        size = int(compose.docker("image", "inspect", image, "--format", "{{.Size}}").stdout)
        rows.add(f"size of {image}", f"{size / 1e6:.0f} MB")


def missing_key(compose: Project, rows: Rows) -> None:
    """Start without the metrics key: refused, and no folder is made."""
    done = compose.compose("up", "-d", "prometheus", check=False)
    named = "metrics.key" in done.stdout + done.stderr
    rows.add(
        "up without metrics.key",
        "refused by name" if done.returncode and named else "started",
        bool(done.returncode and named and not (compose.folder / "metrics.key").exists()),
    )


def create_keys(compose: Project) -> str:
    """Write Prometheus' key; return a client's."""
    run = ("run", "--rm", "-T", "api", "fusequeue", "keys", "create", "--quiet")
    (compose.folder / "metrics.key").write_text(compose.compose(*run, "--scopes", "metrics").stdout.strip())
    return compose.compose(*run).stdout.strip()


def start(compose: Project, key: str, rows: Rows) -> None:
    """Start all services, and make one image."""
    started = time.monotonic()
    compose.compose("up", "-d", *SERVICES, timeout_s=300)
    until(compose.healthy, "all services are healthy", 300)
    rows.add("up until all are healthy", f"{time.monotonic() - started:.0f} s")
    done = subprocess.run(
        compose.client(key, "fusequeue", "submit", "a red circle"), capture_output=True, text=True, timeout=COMMAND_S
    )
    right = done.returncode == 0 and ".png" in done.stdout
    rows.add("up until the first image is saved", f"{time.monotonic() - started:.0f} s", right)
    if not right:
        print(done.stdout, done.stderr)


def hardened(compose: Project, rows: Rows) -> None:
    """Read the users, capabilities and roots that the engine has given."""
    wrong = 0
    for name, one in compose.containers().items():
        user, host = one["Config"]["User"], one["HostConfig"]
        right = (
            host["ReadonlyRootfs"]
            and host["CapDrop"] == ["ALL"]
            and (user not in ("", "0", "root", "0:0") or name == "s3-owner")
        )
        if not right:
            wrong += 1
            rows.add(f"{name} is hardened", f"user {user or 'root'}, read-only {host['ReadonlyRootfs']}", False)
    if not wrong:
        rows.add("all containers", "read-only root, no capabilities, no user root but that of s3-owner")


def scraped(compose: Project, rows: Rows) -> None:
    """Wait until Prometheus has read both kinds of targets, and count its rules."""

    def read(path: str) -> dict[str, dict[str, list[dict[str, object]]]]:
        url = f"http://127.0.0.1:9090/api/v1/{path}"
        return dict(json.loads(compose.compose("exec", "-T", "prometheus", "wget", "-qO-", url).stdout))

    def up() -> Counter[object]:
        return Counter(one["health"] for one in read("targets?state=active")["data"]["activeTargets"])

    until(lambda: up()["up"] >= 2, "Prometheus has read the API and the worker", 90)
    groups = read("rules")["data"]["groups"]
    health = Counter(rule["health"] for group in groups for rule in group["rules"])  # type: ignore[attr-defined]
    rows.add("Prometheus", f"targets {dict(up())}, rules {dict(health)}", set(health) <= {"ok", "unknown"})


def kills(compose: Project, key: str, rows: Rows) -> None:
    """Kill each service in turn while a backfill runs: each of its lines gets one image."""
    prompts = "\n".join(f"a red circle, number {number}" for number in range(LINES))
    backfill = f"fusequeue backfill /tmp/p.txt --out /tmp/out -s steps={STEPS}"
    script = f"cat > /tmp/p.txt && {backfill} && ls /tmp/out/*.png | wc -l"
    command = compose.client(key, "sh", "-ec", script)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdin is not None
        running.stdin.write(prompts)
        running.stdin.close()
        running.stdin = None
        for service in KILLED:
            time.sleep(4)
            compose.compose("kill", "-s", "KILL", service)
            compose.compose("start", service)
        output, _ = running.communicate(timeout=BACKFILL_S)
    states = Counter(job["status"] for job in listed(compose, key))
    images = (output.split() or ["none"])[-1]
    right = running.returncode == 0 and states == {"succeeded": LINES + 1} and images == str(LINES)
    rows.add(f"{', '.join(KILLED)} killed during {LINES} jobs", f"{images} images, jobs {dict(states)}", right)
    if not right:
        print(output[-4000:])
    until(compose.healthy, "all services are healthy again", 120)


def scaled(compose: Project, key: str, rows: Rows) -> None:
    """Run the same jobs on one worker and on two, which share the cores."""
    seconds = []
    for workers in (1, 2):
        compose.compose("up", "-d", "--no-recreate", "--scale", f"worker-cpu={workers}", "worker-cpu")
        until(lambda count=workers: compose.healthy_workers() == count, f"{workers} workers are healthy")
        script = (
            f"for n in $(seq {SCALED}); do echo a blue cross, number $n; done > /tmp/p.txt"
            f" && fusequeue backfill /tmp/p.txt --out /tmp/out -s steps={STEPS}"
        )
        command = compose.client(key, "sh", "-ec", script)
        seconds.append(timed(partial(subprocess.run, command, capture_output=True, timeout=BACKFILL_S, check=True)))
    rows.add(
        f"{SCALED} jobs by one worker, by two", f"{seconds[0]:.1f} s, {seconds[1]:.1f} s", seconds[1] < 1.5 * seconds[0]
    )
    compose.compose("up", "-d", "--no-recreate", "--scale", "worker-cpu=1", "worker-cpu")


def listed(compose: Project, key: str) -> list[dict[str, str]]:
    """Return all jobs."""
    command = compose.client(key, "fusequeue", "jobs", "--limit", "1000", "--json")
    lines = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def early_stops(compose: Project, rows: Rows) -> None:
    """Stop containers in the first half second of their lives."""
    compose.compose("stop", "api", "chores", "worker-cpu")
    for service in ("api", "chores", "worker-cpu"):
        for delay_s in (0.0, 0.3, 1.0):
            container = compose.compose("run", "-d", "--no-deps", service).stdout.split()[-1]
            time.sleep(delay_s)
            seconds = timed(partial(compose.docker, "stop", "-t", "60", container))
            code = int(compose.docker("inspect", container, "--format", "{{.State.ExitCode}}").stdout)
            rows.add(
                f"{service} stopped {delay_s} s after its start",
                f"{seconds:.1f} s, exit status {code}",
                code != 137 and seconds < GRACE_S,
            )
            compose.docker("rm", "-f", container)
    compose.compose("start", "api", "chores", "worker-cpu")
    until(compose.healthy, "all services are healthy again", 120)


def stop_with_jobs(compose: Project, key: str, rows: Rows) -> None:
    """Stop all services while jobs run."""
    for number in range(4):
        large = ("--steps", "100", "--size", "128x128", "-n", "2")  # seconds of a core
        command = compose.client(key, "fusequeue", "submit", f"number {number}", *large, "--no-wait")
        subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=True)
    seconds = timed(lambda: compose.compose("stop", "worker-cpu", "chores", "api", timeout_s=200))
    codes = {name: one["State"]["ExitCode"] for name, one in compose.containers().items() if name in SERVICES[:3]}
    rows.add("stop with jobs running", f"{seconds:.1f} s, exit statuses {codes}", set(codes.values()) == {0})


def main() -> int:
    command = engine_command()
    if shutil.which(command[0]) is None:
        print(
            f"no {command[0]}: install Docker with compose, or set DOCKER to the command of an engine", file=sys.stderr
        )
        return 2
    rows = Rows()
    with project(command, os.environ.get("COMPOSE_FILES", "").split()) as compose:
        build(compose, rows)
        missing_key(compose, rows)
        key = create_keys(compose)
        start(compose, key, rows)
        hardened(compose, rows)
        scraped(compose, rows)
        kills(compose, key, rows)
        scaled(compose, key, rows)
        early_stops(compose, rows)
        stop_with_jobs(compose, key, rows)
    table = Table("tried", "seen", "")
    for row in rows.all:
        table.add_row(row.tried, row.seen, "" if row.right else "WRONG")
    Console(width=120).print(table)
    return 0 if all(row.right for row in rows.all) else 1


if __name__ == "__main__":
    sys.exit(main())
