"""The results of all stages as Markdown: one table for each stage, errors and skipped cases below it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTES = ("error", "skipped", "stopped")


def text_of(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{key} {one}" for key, one in value.items())
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")[:160]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table under a line of what all rows share, or one line for each figure of a long row by itself."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if len(rows) == 1 and len(columns) > 16:
        return [f"- {key}: {text_of(rows[0][key])}" for key in columns]
    texts = [[text_of(row.get(column)) for row in rows] for column in columns]
    shared = [
        f"{column} {one[0]}" for column, one in zip(columns, texts, strict=True) if len(rows) > 1 and len({*one}) == 1
    ]
    own = [(column, one) for column, one in zip(columns, texts, strict=True) if len(rows) == 1 or len({*one}) > 1]
    lines = [
        *([", ".join(shared), ""] if shared else []),
        "|".join(column for column, _ in own),
        "|".join("---" for _ in own),
    ]
    return lines + ["|".join(cells) for cells in zip(*(one for _, one in own), strict=True)]


def alike(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group rows in a row that have about the same figures, so that tables have few empty cells."""
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        known = {key for one in groups[-1] for key in one} if groups else set()
        if groups and len(known & row.keys()) >= 0.6 * len(known | row.keys()):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def note(line: dict[str, Any]) -> str:
    """Return the line of a case that failed, or was skipped or ended."""
    return "- " + "; ".join(f"**{key}** {text_of(one)}" if key in NOTES else text_of(one) for key, one in line.items())


def summary(results: Path) -> str:
    """Return the tables of a results file."""
    lines = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    parts = []
    for stage in dict.fromkeys(line["stage"] for line in lines):
        own = [{key: one for key, one in line.items() if key != "stage"} for line in lines if line["stage"] == stage]
        tables = [table(group) for group in alike([line for line in own if line.keys().isdisjoint(NOTES)])]
        notes = [note(line) for line in own if not line.keys().isdisjoint(NOTES)]
        parts += [[f"## {stage}"], *tables, *([notes] if notes else [])]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"
