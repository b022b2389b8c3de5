"""State of each line of a backfill, in a SQLite file that survives a kill at any moment."""

import hashlib
import json
import sqlite3
import uuid
from collections.abc import Iterable, Mapping, Sequence
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
    failed_attempts INTEGER NOT NULL DEFAULT 0,
    job TEXT,
    files TEXT,
    error TEXT,
    flagged TEXT  -- indexes of files
);
DROP INDEX IF EXISTS by_state;  -- of an earlier version
CREATE INDEX IF NOT EXISTS in_order ON line (state, failed_attempts, number);
"""


class LedgerError(Exception):
    """The folder belongs to another backfill."""


class EntryState(StrEnum):
    """State of a line."""

    NEW = "new"
    SUBMITTED = "submitted"  # `job` is set
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Entry:
    """One line; `failed_attempts` counts its failed submits and jobs."""

    number: int
    body: dict[str, Any]
    failed_attempts: int
    job: str | None


class Ledger:
    """The lines of one backfill. Every change is on disk when its method returns."""

    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / NAME, isolation_level=None, timeout=5)
        try:
            self._db.executescript(_SCHEMA)
            if "flagged" not in [column[1] for column in self._db.execute("PRAGMA table_info(line)")]:
                self._db.execute("ALTER TABLE line ADD COLUMN flagged TEXT")  # of an earlier version
        except sqlite3.Error:
            self._db.close()
            raise
        self.run_id = ""

    def close(self) -> None:
        self._db.close()

    def begin(self, lines: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Store (number, body) lines, all or none; raises `LedgerError` if the folder has different ones."""
        digest = hashlib.sha256()
        rows = []
        for number, body in lines:
            rows.append((number, json.dumps(body, sort_keys=True), EntryState.NEW))
            digest.update(f"{number} {rows[-1][1]}\n".encode())
        source = digest.hexdigest()
        run = self._db.execute("SELECT source, id FROM run").fetchone()
        if run is not None:
            if run[0] != source:
                raise LedgerError(
                    "the folder holds another backfill: the prompts or the options changed; "
                    "choose another --out, or resume with the original ones"
                )
            self.run_id = run[1]
            return
        self.run_id = f"backfill-{uuid.uuid4().hex[:20]}"
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._db.executemany("INSERT INTO line (number, body, state) VALUES (?, ?, ?)", rows)
            self._db.execute("INSERT INTO run VALUES (?, ?)", (source, self.run_id))

    def counts(self) -> dict[EntryState, int]:
        counts = dict(self._db.execute("SELECT state, count(*) FROM line GROUP BY state").fetchall())
        return {state: counts.get(state, 0) for state in EntryState}

    def flagged(self) -> int:
        """Return how many lines have flagged files."""
        (count,) = self._db.execute("SELECT count(*) FROM line WHERE flagged != '[]'").fetchone()
        return int(count)

    def is_finished(self) -> bool:
        """Return whether every line is done or failed."""
        query = "SELECT NOT EXISTS (SELECT 1 FROM line WHERE state IN (?, ?))"
        (finished,) = self._db.execute(query, (EntryState.NEW, EntryState.SUBMITTED)).fetchone()
        return bool(finished)

    def entries(self, state: EntryState, limit: int = -1) -> list[Entry]:
        """Return the first lines in a state, by default all of them, those with the fewest failed attempts first."""
        rows = self._db.execute(
            "SELECT number, body, failed_attempts, job FROM line WHERE state = ? "
            "ORDER BY failed_attempts, number LIMIT ?",
            (state, limit),
        )
        return [Entry(number, json.loads(body), attempts, job) for number, body, attempts, job in rows]

    def submitted(self, entries: Sequence[tuple[int, str | None, str | None]]) -> None:
        """Record (line, job, error) of submitted lines; a line without a job was refused."""
        states = [
            (EntryState.SUBMITTED if job else EntryState.FAILED, job, error, number) for number, job, error in entries
        ]
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._db.executemany("UPDATE line SET state = ?, job = ?, error = ? WHERE number = ?", states)

    def done(self, number: int, files: Sequence[str], flagged: Sequence[int] = ()) -> None:
        """Record the saved files of a line, and the indexes of those that a safety checker flagged."""
        query = "UPDATE line SET state = ?, files = ?, flagged = ?, error = NULL WHERE number = ?"
        self._db.execute(query, (EntryState.DONE, json.dumps(files), json.dumps(flagged), number))

    def failed(self, failures: Sequence[tuple[Entry, str, bool]]) -> None:
        """Record (entry, error, whether it is submitted again) of failed attempts.

        A line that has another job by now is left as it is.
        """
        states = [
            (EntryState.NEW if again else EntryState.FAILED, error, entry.number, entry.job)
            for entry, error, again in failures
        ]
        query = (
            "UPDATE line SET state = ?, error = ?, job = NULL, failed_attempts = failed_attempts + 1 "
            "WHERE number = ? AND job IS ?"
        )
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._db.executemany(query, states)

    def retry_failed(self) -> int:
        """Set all failed lines to NEW and return how many."""
        query = "UPDATE line SET state = ?, job = NULL, failed_attempts = failed_attempts + 1 WHERE state = ?"
        return self._db.execute(query, (EntryState.NEW, EntryState.FAILED)).rowcount

    def write_manifest(self, path: Path) -> None:
        """Write one JSON object per line (number, body fields, state, job, files, flagged, error), atomically."""
        part = path.with_suffix(".part")
        query = "SELECT number, body, state, job, files, flagged, error FROM line ORDER BY number"
        with (
            part.open("w", encoding="utf-8", errors="backslashreplace") as file,
            closing(self._db.execute(query)) as rows,
        ):
            for number, body, state, job, files, flagged, error in rows:
                row = {"line": number, **json.loads(body), "state": state, "job": job}
                row |= {"files": json.loads(files or "[]"), "flagged": json.loads(flagged or "[]"), "error": error}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        part.replace(path)
