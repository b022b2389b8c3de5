"""Lines of a backfill that name others by their keys, and wait until these have ended."""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusequeue.bulk_lines import with_jobs
from fusequeue.image_sources import FOREIGN

SCHEMA = """
CREATE TABLE IF NOT EXISTS link (
    child INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    needed INTEGER NOT NULL,  -- whether the child fails with the parent
    PRIMARY KEY (child, parent)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_parent ON link (parent);
"""
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOLD = """
UPDATE line SET state = 'waiting' WHERE state = 'new' AND number IN (
    SELECT child FROM link JOIN line AS parent ON parent.number = link.parent WHERE parent.state != 'done'
)
"""
_ENDED = """
SELECT DISTINCT link.parent FROM link JOIN line AS parent ON parent.number = link.parent
JOIN line AS child ON child.number = link.child WHERE child.state = 'waiting' AND parent.state IN ('done', 'failed')
"""
_WAITING = """
SELECT child.number, max(link.needed AND parent.state = 'failed'), max(parent.state NOT IN ('done', 'failed'))
FROM link JOIN line AS parent ON parent.number = link.parent JOIN line AS child ON child.number = link.child
WHERE child.state = 'waiting' AND child.number IN (SELECT child FROM link WHERE parent = ?) GROUP BY child.number
"""


class LinkError(Exception):
    """A line of the file has an invalid key, or names another one wrongly; the message begins with its number."""


@dataclass(frozen=True)
class Links:
    """The lines that a line names, each with whether the line needs its result; and a digest of what they and those
    that they name say."""

    parents: Mapping[int, bool]
    digest: str = ""


class FileKeys:
    """The keys of a file. A line can name those of the lines before it."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[int, str]] = {}  # numbers, and digests of the content

    def add(self, number: int, body: Mapping[str, Any], text: str) -> Links:
        """Return the links of the next line, whose key later lines can name; `text` is its body. Raises `LinkError`."""
        parents: dict[int, bool] = {}
        digests: set[str] = set()

        def note(param: str, name: Any) -> Any:
            if isinstance(name, str) and name in self._lines:
                parent, digest = self._lines[name]
                waits_only = param.startswith("after.") and body.get("on_parent_failure") == "run"
                parents[parent] = parents.get(parent, False) or not waits_only
                digests.add(digest)
            elif not isinstance(name, str) or not name.startswith("job_"):
                raise LinkError(f"{number}: {param}: no line before this one has the key {name!r:.80}")
            return name

        with_jobs(body, note)
        links = Links(parents, _digest(*sorted(digests)) if digests else "")
        if "key" in body:
            self._add_key(number, body["key"], _digest(text, links.digest))
        return links

    def _add_key(self, number: int, key: Any, digest: str) -> None:
        if not isinstance(key, str) or not _KEY.fullmatch(key) or FOREIGN.match(key):
            message = "1 to 64 letters, digits, '.', '-' and '_', a letter or digit first, and no id of a job"
            raise LinkError(f"{number}: key: {key!r:.80} is not {message}")
        if key in self._lines:
            raise LinkError(f"{number}: key: line {self._lines[key][0]} has it too: {key}")
        self._lines[key] = number, digest


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def hold(db: sqlite3.Connection) -> None:
    """Let new lines wait for those that they name, and those that wait for none any more go on."""
    db.execute(_HOLD)
    pass_on(db, [parent for (parent,) in db.execute(_ENDED)])


def pass_on(db: sqlite3.Connection, ended: Iterable[int]) -> None:
    """Go on with the lines that wait for some that are done or failed: each is new when it waits for none any more, and
    fails if it needs one that has failed, and with it those that need it."""
    todo = [*ended]
    while todo:
        parent = todo.pop()
        for child, fails, waits in db.execute(_WAITING, (parent,)).fetchall():
            if fails:
                error = f"line {parent}, which it names, has failed"
                db.execute("UPDATE line SET state = 'failed', error = ? WHERE number = ?", (error, child))
                todo.append(child)
            elif not waits:
                db.execute("UPDATE line SET state = 'new' WHERE number = ?", (child,))


def parent_jobs(db: sqlite3.Connection, child: int) -> dict[str, str | None]:
    """Return the jobs of the lines that a line names, by their keys."""
    query = "SELECT body, job FROM link JOIN line ON number = parent WHERE child = ?"
    return {json.loads(body)["key"]: job for body, job in db.execute(query, (child,))}
