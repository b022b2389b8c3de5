"""`docs/clients-tested.md`: what each client did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.catalog import Client

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "clients-tested.md"
INTRODUCTION = """# Clients, tested

Written by `make clients`: unmodified clients from their registries, against a `fusequeue up` that requires keys and
serves the demo model and a tiny video model. Each call checks what it gets: the size and format of an image, the
beginning of a video, the class and text of an error. [How to use them](clients/README.md).

| client | version | calls | result |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Call:
    """One call of a script, with its seconds; `error` is what went wrong."""

    name: str
    seconds: float
    error: str | None


@dataclass(frozen=True)
class Outcome:
    """What a client did; `output` is what its script printed, if it failed outside of a call."""

    client: Client
    versions: tuple[str, ...]
    calls: Sequence[Call]
    seconds: float
    output: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.calls) and not self.output and all(call.error is None for call in self.calls)

    @property
    def result(self) -> str:
        if self.passed:
            return "pass"
        failed = [call.name for call in self.calls if call.error is not None]
        return "<br>".join(("fail", *failed))


def write(outcomes: Sequence[Outcome]) -> None:
    """Write the page."""
    PAGE.write_text(INTRODUCTION + "".join(_row(outcome) for outcome in outcomes), "utf-8")


def _row(outcome: Outcome) -> str:
    packages = zip(outcome.client.packages, outcome.versions, strict=True)
    versions = ", ".join(f"`{package}` {version}" for package, version in packages)
    calls = "<br>".join(call.name for call in outcome.calls) or "none"
    return f"| {outcome.client.name} | {versions} | {calls} | {outcome.result} |\n"
