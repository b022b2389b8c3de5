"""Bugs for tests of the checker: each changes the text of one script in the processes of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

BUG = "CHAOS_BUG"


@dataclass(frozen=True)
class PlantedBug:
    """In the script `script`, `pattern` is replaced once."""

    script: str
    pattern: str
    replacement: str


BUGS = {
    # A settlement of any claim is accepted, also one of a claim that was lost.
    "unfenced_settle": PlantedBug(
        "settle",
        r"if job\.state ~= 'running' or job\.worker ~= worker or tonumber\(job\.epoch\) ~= epoch then",
        "if false then",
    ),
    # Jobs are taken from workers whose leases have not expired.
    "no_lease_check": PlantedBug("reclaim", r"(ZRANGEBYSCORE', key\.leases, '-inf', )[^,]+,", r"\1'+inf',"),
    # A repeated submit is a second job.
    "submit_twice": PlantedBug("submit", r"local known = redis\.call\('GET', idem\)", "local known = false"),
    # A job starts after its first parent that ends.
    "first_parent_is_enough": PlantedBug("parents.tell", r"if left\[1\] then return", "if false then return"),
    # A job starts although a parent has failed.
    "failed_parent_is_ignored": PlantedBug("parents.tell", r"if state ~= 'succeeded' and", "if false and"),
    # A job starts from one that has failed, if it is to run after failed parents.
    "failed_source_is_ignored": PlantedBug("parents.tell", r" and not sources\.has\(job\.sources, parent\)", ""),
    # A job is not kept for those that start from its result.
    "sources_are_not_kept": PlantedBug("sources.hold", r"redis\.call\('ZADD', key\.dependents\([^\n]*", ""),
    # A fifth of the events never leave the queue.
    "lost_outbox_entry": PlantedBug(
        "add_to_outbox",
        r"(function events\.add_to_outbox\(event[^\n]*\n)",
        r"\1  if tonumber(string.match(event, '^(%d+)')) % 5 == 0 then return end\n",
    ),
}


def plant(name: str) -> None:
    """Change the script texts of this process; raises `ValueError` if the bug no longer fits its script."""
    from shared.queue import client, scripts

    bug, script_text = BUGS[name], scripts.script_text

    def changed(script: str, *args: object) -> str:
        text = script_text(script, *args)  # type: ignore[arg-type]
        applies = script == bug.script or (bug.script not in scripts.script_files() and bug.script in text)
        if not applies:
            return text
        text, count = re.subn(bug.pattern, bug.replacement, text, count=1)
        if not count and script == bug.script:
            raise ValueError(f"planted bug {name}: its pattern is not in {script}.lua; adapt it to the script")
        return text

    client.script_text = changed
    scripts.script_text = changed
