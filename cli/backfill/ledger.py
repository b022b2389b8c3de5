"""What is known of each line of a backfill, in a file that survives a kill at any moment."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

NAME = "backfill.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (source TEXT NOT NULL, id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS line (
    number INTEGER PRIMARY KEY,  -- in the source
    body TEXT NOT NULL,
    state TEXT NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    job TEXT,
    files TEXT,
    error TEXT
);
CREATE INDEX IF NOT EXISTS by_state ON line (state, number);
"""


class LedgerError(Exception):
    """The folder belongs to another backfill."""


class Line(StrEnum):
    """What has become of a line."""

    NEW = "new"
    SUBMITTED = "submitted"  # a job of the service, `job` being its id
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Entry:
    """One line; `tries` counts the jobs that were made for it and failed."""

    number: int
    body: dict[str, Any]
    tries: int
    job: str | None


class Ledger:
    """The lines of one backfill. Every change is on disk when its method returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(folder / NAME, isolation_level=None, timeout=5)
        self._db.executescript(_SCHEMA)
        self.run_id = ""

    def close(self) -> None:
        self._db.close()

    def begin(self, lines: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Take the lines in, all or none; raises `LedgerError` when others were taken in before."""
        digest = hashlib.sha256()
        rows = []
        for number, body in lines:
            rows.append((number, json.dumps(body, sort_keys=True), Line.NEW))
            digest.update(f"{number} {rows[-1][1]}\n".encode())
        source = digest.hexdigest()
        known = self._db.execute("SELECT source, id FROM run").fetchone()
        if known is not None:
            if known[0] != source:
                raise LedgerError(
                    "the folder holds another backfill: the prompts or the options changed; "
                    "choose another --out, or give the same ones to go on"
                )
            self.run_id = known[1]
            return
        self.run_id = f"backfill-{uuid.uuid4().hex[:20]}"
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._db.executemany("INSERT INTO line (number, body, state) VALUES (?, ?, ?)", rows)
            self._db.execute("INSERT INTO run VALUES (?, ?)", (source, self.run_id))

    def counts(self) -> dict[Line, int]:
        """Return how many lines are in each state."""
        found = dict(self._db.execute("SELECT state, count(*) FROM line GROUP BY state").fetchall())
        return {state: found.get(state, 0) for state in Line}

    def entries(self, state: Line, limit: int) -> list[Entry]:
        """Return the first lines in a state, those that never failed before those that did."""
        rows = self._db.execute(
            "SELECT number, body, tries, job FROM line WHERE state = ? ORDER BY tries > 0, number LIMIT ?",
            (state, limit),
        )
        return [Entry(number, json.loads(body), tries, job) for number, body, tries, job in rows]

    def submitted(self, entries: Sequence[tuple[int, str | None, str | None]]) -> None:
        """Note (line, job, error) of what was submitted: a line without a job was refused."""
        states = [(Line.SUBMITTED if job else Line.FAILED, job, error, number) for number, job, error in entries]
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._db.executemany("UPDATE line SET state = ?, job = ?, error = ? WHERE number = ?", states)

    def done(self, number: int, files: Sequence[str]) -> None:
        """Note that a line's pictures are saved."""
        self._db.execute(
            "UPDATE line SET state = ?, files = ?, error = NULL WHERE number = ?",
            (Line.DONE, json.dumps(files), number),
        )

    def failed(self, number: int, error: str, *, again: bool) -> None:
        """Note that a line's job failed; with `again` it gets another."""
        state = Line.NEW if again else Line.FAILED
        self._db.execute(
            "UPDATE line SET state = ?, error = ?, job = NULL, tries = tries + 1 WHERE number = ?",
            (state, error, number),
        )

    def retry_failed(self) -> int:
        """Let every failed line be tried again; returns how many."""
        changed = self._db.execute(
            "UPDATE line SET state = ?, job = NULL, tries = tries + 1 WHERE state = ?", (Line.NEW, Line.FAILED)
        )
        return changed.rowcount

    def write_manifest(self, path: Path) -> None:
        """Write a line of JSON for each line: number, prompt, state, job, files, error. Whole or not at all."""
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self._manifest())
        part.replace(path)

    def _manifest(self) -> Iterator[dict[str, Any]]:
        query = "SELECT number, body, state, job, files, error FROM line ORDER BY number"
        with closing(self._db.execute(query)) as rows:
            for number, body, state, job, files, error in rows:
                told = {"line": number, **json.loads(body), "state": state, "job": job}
                yield {**told, "files": json.loads(files or "[]"), "error": error}
