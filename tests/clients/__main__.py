"""`make clients`: installs the clients, starts a service, runs a script per client, and writes the page.

`make clients ONLY="openai replicate"` runs those with one of these words in their name or package, and writes no page.
Fails if a call of a client fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from clients import install, page
from clients.catalog import CLIENTS, Client
from clients.page import Call, Outcome
from clients.service import Service, running

TIMEOUT_S = 240.0
"""Of one client's script."""


def run(client: Client, service: Service) -> Outcome:
    """Run the script of a client."""
    started = time.monotonic()
    versions = tuple(install.version(client.environment, package) for package in client.packages)
    env = install.variables(client.environment) | service.variables()
    with tempfile.TemporaryDirectory(prefix="fusequeue-client-") as folder:
        try:
            command = install.command(client.environment, client.script)
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
            stdout, stderr, status = done.stdout, done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            stdout, stderr, status = "", f"no end within {TIMEOUT_S:.0f} s; {_text(error.stderr)}", -1
    calls = _calls(stdout)
    crashed = status != 0 and not any(call.error for call in calls)
    output = f"exit status {status}\n{stdout[-2000:]}{stderr[-4000:]}" if crashed or not calls else ""
    return Outcome(client, versions, calls, time.monotonic() - started, output)


def _calls(stdout: str) -> list[Call]:
    """Return the calls that a script reports in its last line."""
    try:
        rows = json.loads(stdout.strip().rpartition("\n")[2])["calls"]
    except (ValueError, KeyError, TypeError):
        return []
    return [Call(row["call"], row["seconds"], row["error"]) for row in rows]


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def report(outcome: Outcome) -> None:
    """Print a line about a client, and what failed."""
    failures = [call for call in outcome.calls if call.error is not None]
    count = f"{len(outcome.calls) - len(failures)} of {len(outcome.calls)} calls"
    state = "pass" if outcome.passed else "FAIL"
    print(f"{state}  {outcome.client.name} {' '.join(outcome.versions)}: {count}, {outcome.seconds:.1f} s", flush=True)
    for call in failures:
        print(f"      {call.name}: {call.error}", flush=True)
    if outcome.output:
        print(outcome.output, flush=True)


def selected(words: Sequence[str]) -> list[Client]:
    """Return the clients with one of the words in their name, packages or script; all without words."""
    texts = {client: " ".join((client.name, *client.packages, client.script)).lower() for client in CLIENTS}
    return [client for client, text in texts.items() if not words or any(word.lower() in text for word in words)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make clients", description=__doc__)
    parser.add_argument("only", nargs="*", help="words of names or packages; default: all clients")
    words = parser.parse_args(argv).only
    clients = selected(words)
    if not clients:
        parser.error(f"no client's name or package contains {' or '.join(words)}")
    try:
        for environment in dict.fromkeys(client.environment for client in clients):
            install.install(environment)
    except install.NotInstalled as error:
        print(error, file=sys.stderr)
        return 1
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="fusequeue-clients-") as folder, running(Path(folder)) as service:
        print(f"{len(clients)} clients, {service.url}", flush=True)
        for client in clients:
            outcomes.append(run(client, service))
            report(outcomes[-1])
    if not words:
        page.write(outcomes)
        print(f"wrote {page.PAGE.relative_to(page.ROOT)}", flush=True)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
