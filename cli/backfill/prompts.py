"""Prompt files: JSON lines, CSV with a header, or one prompt per line."""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.durations import duration_s
from shared.file_names import slug

MAX_LINES = 1_000_000
_DRAWN_FROM = frozenset(("prompt", "image", "images", "controls"))  # meshes, and jobs of Redux, need no prompt
OWN_BATCH = "batch_id: a backfill sets it, to find its jobs"


class PromptsError(Exception):
    """The prompt file is invalid; the message names the file and line."""


def read(path: Path, common: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, request body) for each prompt of the file; blank lines are skipped.

    `common` are the fields of all lines; fields of the line itself override them.
    """
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv_rows, ".txt": _plain}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise PromptsError(f"{path}: the name must end in {', '.join(readers)}")
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, body in reader(path, file):
                if number > MAX_LINES:
                    raise PromptsError(f"{path}: more than {MAX_LINES} lines; split the file")
                if "batch_id" in body:
                    raise PromptsError(f"{path}:{number}: {OWN_BATCH}")
                yield number, {**common, **body}
    except OSError as error:
        raise PromptsError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptsError(f"{path}: not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8") from error
    if not number:
        raise PromptsError(f"{path}: no line has a prompt")


Bodies = Iterator[tuple[int, dict[str, Any]]]


def _plain(_path: Path, file: Iterator[str]) -> Bodies:
    for number, line in enumerate(file, start=1):
        if prompt := line.strip():
            yield number, {"prompt": prompt}


def _json_lines(path: Path, file: Iterator[str]) -> Bodies:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            body = _parse(line)
        except json.JSONDecodeError as error:
            raise PromptsError(f"{path}:{number}: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets in brackets
            raise PromptsError(f"{path}:{number}: {error}") from error
        if not isinstance(body, dict):
            raise PromptsError(f"{path}:{number}: a line must be a JSON object with the fields of a job")
        yield number, body


def _csv_rows(path: Path, file: Iterator[str]) -> Bodies:
    rows = csv.DictReader(file, strict=True)
    try:
        names = rows.fieldnames = [name.strip() for name in rows.fieldnames or ()]
        if not _DRAWN_FROM.intersection(names):
            found = f", but {', '.join(f'`{name}`' for name in names)}" if names else ""
            hint = "; separate columns by commas" if len(names) == 1 and set(";\t") & set(names[0]) else ""
            raise PromptsError(f"{path}:1: the header has no column `prompt`{found}{hint}")
        for row in rows:
            if None in row:
                raise PromptsError(f"{path}:{rows.line_num}: more columns than the header has")
            yield rows.line_num, {name: parse_field(name, text) for name, text in row.items() if text not in (None, "")}
    except csv.Error as error:
        raise PromptsError(f"{path}:{rows.reader.line_num}: {error}") from error  # `rows` counts those before it


def parse_field(name: str, text: str) -> Any:
    """Return a field's value: parsed if it is JSON and neither a prompt nor a key, else the text itself."""
    if name in ("prompt", "negative_prompt", "prompt_2", "key"):
        return text
    try:
        value = _parse(text)
    except (ValueError, RecursionError):  # also an integer of thousands of digits
        value = text
    if name == "not_before" and (delay_s := duration_s(text)) is not None:
        return delay_s
    return [text] if name == "after" and not isinstance(value, list) else value


def _parse(text: str) -> Any:
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    """Return a number of JSON; raises ValueError for NaN and infinity, which Python reads and JSON does not have."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def file_name(number: int, prompt: str, edition: int = 0) -> str:
    """Return the file name of a line's results: its number and the first words of its prompt.

    The lines of a corrected file, an `edition` above 0, can have numbers that earlier results have.
    """
    words = slug(prompt)
    place = f"{number:06d}.{edition}" if edition else f"{number:06d}"
    return f"{place}-{words}" if words else place
