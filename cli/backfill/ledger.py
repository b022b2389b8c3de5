"""State of each line of a backfill, in a SQLite file that survives a kill at any moment."""

import hashlib
import json
import sqlite3
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from cli.backfill import links
from shared.runtime.clock import now_ms

NAME = "backfill.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (source TEXT NOT NULL, id TEXT NOT NULL, edition INTEGER NOT NULL DEFAULT 0, name TEXT,
    began_at_ms INTEGER);
CREATE TABLE IF NOT EXISTS line (
    number INTEGER PRIMARY KEY,  -- in the source
    body TEXT NOT NULL,
    state TEXT NOT NULL,
    failed_attempts INTEGER NOT NULL DEFAULT 0,
    job TEXT,
    files TEXT,
    error TEXT,
    flagged TEXT,  -- indexes of files
    made TEXT,  -- what the images were made with
    edition INTEGER NOT NULL DEFAULT 0,  -- of the file that brought it, and its number there: its idempotency key
    place INTEGER,
    named TEXT NOT NULL DEFAULT ''  -- digest of what the lines that it names say
);
DROP INDEX IF EXISTS by_state;  -- of an earlier version
CREATE INDEX IF NOT EXISTS in_order ON line (state, failed_attempts, number);
"""


# Columns that earlier versions did not have.
_EDITION = "INTEGER NOT NULL DEFAULT 0"
_LATER = {
    "run": {"edition": _EDITION, "name": "TEXT", "began_at_ms": "INTEGER"},
    "line": {
        **{"flagged": "TEXT", "made": "TEXT", "edition": _EDITION, "place": "INTEGER"},
        "named": "TEXT NOT NULL DEFAULT ''",
    },
}
_KEPT = "state, failed_attempts, job, files, error, flagged, made, edition, place"
_NOTHING: tuple[Any, ...] = ("new", 0, None, None, None, None, None)


class LedgerError(Exception):
    """The folder belongs to another backfill."""


@dataclass(frozen=True)
class Corrections:
    """How the lines of a corrected file compare with those of the folder: by content, wherever they stand."""

    kept: int
    added: int
    removed: int


class EntryState(StrEnum):
    """State of a line."""

    WAITING = "waiting"  # for lines that it names
    NEW = "new"
    SUBMITTED = "submitted"  # `job` is set
    DONE = "done"
    FAILED = "failed"


_PROGRESS = (EntryState.DONE, EntryState.SUBMITTED, EntryState.NEW, EntryState.WAITING, EntryState.FAILED)
"""Which of identical lines stay when a corrected file has fewer of them."""


@dataclass(frozen=True)
class Entry:
    """One line; `failed_attempts` counts its failed submits and jobs.

    `edition` is that of the file that brought it, `place` its number there: they stay when a corrected file moves it.
    """

    number: int
    body: dict[str, Any]
    failed_attempts: int
    job: str | None
    edition: int
    place: int


@dataclass(frozen=True)
class _Row:
    """A line of the file, with its body as text; lines of the same `content` are the same wherever they stand."""

    number: int
    text: str
    links: links.Links

    @property
    def content(self) -> tuple[str, str]:
        return self.text, self.links.digest


class Ledger:
    """The lines of one backfill. Every change is on disk when its method returns."""

    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / NAME, isolation_level=None, timeout=5)
        try:
            self._db.executescript(_SCHEMA + links.SCHEMA)
            for table, columns in _LATER.items():
                have = [column[1] for column in self._db.execute(f"PRAGMA table_info({table})")]
                for name in [column for column in columns if column not in have]:
                    self._db.execute(f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}")
                    if name == "place":
                        self._db.execute("UPDATE line SET edition = coalesce((SELECT edition FROM run), 0)")
        except sqlite3.Error:
            self._db.close()
            raise
        self.run_id = ""
        self.group: str | None = None
        """The group of its jobs; None of a folder that an earlier version has begun."""
        self.edition = 0
        self.began_at_ms = now_ms()
        """From when delays of its lines count, also when it is continued."""

    def close(self) -> None:
        self._db.close()

    def begin(
        self, lines: Iterable[tuple[int, Mapping[str, Any]]], group: str | None = None, *, prefix: str = ""
    ) -> Corrections | None:
        """Store (number, body) lines, all or none; `group` is that of their jobs, by default `prefix` and an id.

        If the folder has other ones, lines with the same content keep their state, and the others replace the rest.
        Returns what has changed, None if nothing has. Raises `LedgerError` if fewer than half of the folder's lines are
        the same and some have been submitted, or if its jobs have another group, and `LinkError` for a line that names
        another one wrongly.
        """
        digest, keys = hashlib.sha256(), links.FileKeys()
        rows = []
        for number, body in lines:
            text = json.dumps(body, sort_keys=True)
            rows.append(_Row(number, text, keys.add(number, body, text)))
            digest.update(f"{number} {text}\n".encode())
        source = digest.hexdigest()
        run = self._db.execute("SELECT source, id, edition, name, began_at_ms FROM run").fetchone()
        if run is not None:
            self.run_id, self.edition, self.group, began_at_ms = run[1:]
            self.began_at_ms = began_at_ms or self.began_at_ms  # an earlier version has kept none
            self._db.execute("UPDATE run SET began_at_ms = ?", (self.began_at_ms,))
            if group not in (None, self.group):
                self._rename(group)
            return None if run[0] == source else self._correct(rows, source)
        self.run_id = f"backfill-{uuid.uuid4().hex[:20]}"
        self.group = group or f"{prefix}{uuid.uuid4().hex[:8]}"
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._insert([(row, (*_NOTHING, 0, row.number)) for row in rows])
            values = (source, self.run_id, self.group, self.began_at_ms)
            self._db.execute("INSERT INTO run (source, id, name, began_at_ms) VALUES (?, ?, ?, ?)", values)
        return None

    def _rename(self, group: str | None) -> None:
        """Give the jobs another group, unless some have been submitted."""
        if not self.is_untouched():
            known = f"the group {self.group}" if self.group else "no group"
            raise LedgerError(f"the jobs of the folder have {known}: leave --group out, or choose another --out")
        self.group = group
        self._db.execute("UPDATE run SET name = ?", (group,))

    def _insert(self, rows: Sequence[tuple[_Row, tuple[Any, ...]]]) -> None:
        """Insert lines with what is kept of them; those that name others wait for these."""
        self._db.executemany(
            f"INSERT INTO line (number, body, named, {_KEPT}) VALUES ({', '.join('?' * 12)})",
            ((row.number, row.text, row.links.digest, *kept) for row, kept in rows),
        )
        self._db.executemany(
            "INSERT INTO link (child, parent, needed) VALUES (?, ?, ?)",
            ((row.number, parent, needed) for row, _ in rows for parent, needed in row.links.parents.items()),
        )
        links.hold(self._db)

    def _correct(self, rows: Sequence[_Row], source: str) -> Corrections:
        """Replace the lines of the folder by those of a corrected file."""
        copies = Counter(row.content for row in rows)
        states: defaultdict[tuple[str, str], deque[tuple[Any, ...]]] = defaultdict(deque)
        before = 0
        for content, same in groupby(self._by_progress(), key=itemgetter(0, 1)):
            found = [(number, state) for _, _, number, *state in same]
            before += len(found)
            states[content].extend(tuple(state) for _, state in sorted(found[: copies[content]], key=itemgetter(0)))
        kept = sum(map(len, states.values()))
        new = self.edition + 1
        corrected = [
            (row, states[row.content].popleft() if states.get(row.content) else (*_NOTHING, new, row.number))
            for row in rows
        ]
        if 2 * kept < before and not self.is_untouched():
            raise LedgerError(
                f"the folder holds another backfill: the prompts or the options changed, and only {kept} of its "
                f"{before} lines are the same; choose another --out, or resume with the original ones"
            )
        self.edition = new
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._db.execute("DELETE FROM line")
            self._db.execute("DELETE FROM link")
            self._insert(corrected)
            self._db.execute("UPDATE run SET source = ?, edition = ?", (source, self.edition))
        return Corrections(kept, added=len(rows) - kept, removed=before - kept)

    def _by_progress(self) -> sqlite3.Cursor:
        """Return (body, named, number, state...) of all lines; of identical ones, what is nearest to an image is first.

        Then the order of submits counts: a line that was sent just before a kill is still new.
        """
        progress = " ".join(f"WHEN '{state}' THEN {at}" for at, state in enumerate(_PROGRESS))
        columns = _KEPT.replace("place", "coalesce(place, number)")
        return self._db.execute(
            f"SELECT body, named, number, {columns} FROM line "
            f"ORDER BY body, named, CASE state {progress} END, failed_attempts, number"
        )

    def key(self, chunk: int, attempt: int, edition: int = 0) -> str:
        """Return the idempotency key of an attempt of a chunk of an edition of the file."""
        part = f"{edition}-" if edition else ""
        return f"{self.run_id}-{part}{chunk}-{attempt}"

    def have_in_common(self, field: str) -> bool:
        """Return whether all lines have the same value of a field, or none has it."""
        values = {json.dumps(json.loads(body).get(field)) for (body,) in self._db.execute("SELECT body FROM line")}
        return len(values) <= 1

    def all_have(self, field: str) -> bool:
        """Return whether each line has a field."""
        return all(field in json.loads(body) for (body,) in self._db.execute("SELECT body FROM line"))

    def counts(self) -> dict[EntryState, int]:
        counts = dict(self._db.execute("SELECT state, count(*) FROM line GROUP BY state").fetchall())
        return {state: counts.get(state, 0) for state in EntryState}

    def flagged(self) -> int:
        """Return how many lines have flagged files."""
        (count,) = self._db.execute("SELECT count(*) FROM line WHERE flagged != '[]'").fetchone()
        return int(count)

    def failures(self, limit: int) -> list[tuple[int, str]]:
        """Return the numbers and errors of the first failed lines."""
        query = "SELECT number, error FROM line WHERE state = ? ORDER BY number LIMIT ?"
        return self._db.execute(query, (EntryState.FAILED, limit)).fetchall()

    def is_finished(self) -> bool:
        """Return whether every line is done or failed."""
        query = "SELECT NOT EXISTS (SELECT 1 FROM line WHERE state IN (?, ?, ?))"
        unfinished = (EntryState.WAITING, EntryState.NEW, EntryState.SUBMITTED)
        (finished,) = self._db.execute(query, unfinished).fetchone()
        return bool(finished)

    def is_untouched(self) -> bool:
        """Return whether no line has been submitted yet."""
        query = "SELECT NOT EXISTS (SELECT 1 FROM line WHERE state NOT IN (?, ?))"
        (untouched,) = self._db.execute(query, (EntryState.WAITING, EntryState.NEW)).fetchone()
        return bool(untouched)

    def entries(self, state: EntryState, limit: int = -1) -> list[Entry]:
        """Return the first lines in a state, by default all of them, those with the fewest failed attempts first."""
        rows = self._db.execute(
            "SELECT number, body, failed_attempts, job, edition, coalesce(place, number) FROM line WHERE state = ? "
            "ORDER BY failed_attempts, number LIMIT ?",
            (state, limit),
        )
        return [Entry(number, json.loads(body), *rest) for number, body, *rest in rows]

    def parent_jobs(self, number: int) -> dict[str, str | None]:
        """Return the jobs of the lines that a line names, by their keys."""
        return links.parent_jobs(self._db, number)

    def submitted(self, entries: Sequence[tuple[int, str | None, str | None]]) -> None:
        """Record (line, job, error) of submitted lines; a line without a job was refused."""
        states = [
            (EntryState.SUBMITTED if job else EntryState.FAILED, job, error, number) for number, job, error in entries
        ]
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._db.executemany("UPDATE line SET state = ?, job = ?, error = ? WHERE number = ?", states)
            links.pass_on(self._db, [number for number, job, _ in entries if job is None])

    def done(
        self,
        number: int,
        files: Sequence[str],
        flagged: Sequence[int] = (),
        made: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the saved files of a line, the indexes of those that a safety checker flagged, and what the service
        has chosen for them. Lines that wait for it go on."""
        query = "UPDATE line SET state = ?, files = ?, flagged = ?, made = ?, error = NULL WHERE number = ?"
        values = (EntryState.DONE, json.dumps(files), json.dumps(flagged), json.dumps(made or {}), number)
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            self._db.execute(query, values)
            links.pass_on(self._db, [number])

    def failed(self, failures: Sequence[tuple[Entry, str, bool]]) -> None:
        """Record (entry, error, whether it is submitted again) of failed attempts.

        A line that has another job by now is left as it is. With a line that fails for good fail those that need it.
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
            links.pass_on(self._db, [entry.number for entry, _, again in failures if not again])

    def retry_failed(self) -> int:
        """Set all failed lines to NEW, or to WAITING for others of them, and return how many."""
        query = "UPDATE line SET state = ?, job = NULL, failed_attempts = failed_attempts + 1 WHERE state = ?"
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            count = self._db.execute(query, (EntryState.NEW, EntryState.FAILED)).rowcount
            links.hold(self._db)
        return count

    def write_manifest(self, path: Path) -> None:
        """Write one JSON object per line (number, body fields, state, job, files, flagged, made, error), atomically."""
        part = path.with_suffix(".part")
        try:
            with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(self._manifest_rows())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _manifest_rows(self) -> Iterator[str]:
        query = "SELECT number, body, state, job, files, flagged, made, error FROM line ORDER BY number"
        with closing(self._db.execute(query)) as rows:
            for number, body, state, job, files, flagged, made, error in rows:
                row = {"line": number, **json.loads(body), "state": state, "job": job}
                row |= {"files": json.loads(files or "[]"), "flagged": json.loads(flagged or "[]")}
                row |= {"made": json.loads(made or "{}"), "error": error}
                yield json.dumps(row, ensure_ascii=False) + "\n"
