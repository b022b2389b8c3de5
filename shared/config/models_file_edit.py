"""Writes the `[model.step_cache]` table of one model into a models file; comments and everything else stay."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from shared.config.step_schedules import CacheLevel, StepCaching
from shared.errors import ConfigurationError

HEADER = "[model.step_cache]"


def step_cache_table(caching: StepCaching) -> str:
    """Return the table of a models file, without the levels that are not allowed."""
    values: dict[str, Any] = caching.model_dump(mode="json")
    lines = [HEADER, *(f"{key} = {json.dumps(values[key])}" for key in ("default", "allowed"))]
    for level in CacheLevel:
        if level.value in caching.allowed:
            fields = ", ".join(f"{key} = {json.dumps(value)}" for key, value in values[level].items())
            lines.append(f"{level.value} = {{{fields}}}")
    return "\n".join(lines) + "\n"


def save_step_cache(path: Path, model: str, caching: StepCaching) -> None:
    """Insert or replace the table of `model`; raises `ConfigurationError` if the file is as before."""
    target = path.resolve()
    part = target.with_name(f"{target.name}.part")
    try:
        part.write_text(with_step_cache(path.read_text("utf-8"), model, caching), "utf-8")
        shutil.copymode(target, part)
        part.replace(target)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; insert the table by hand") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}; insert the table by hand") from error


def with_step_cache(text: str, model: str, caching: StepCaching) -> str:
    """Return a models file with the table of `model`; raises `ValueError` if the model's own table is not found.

    The file is edited as text. So it is read again, and nothing but the table can have changed.
    """
    table = step_cache_table(caching)
    starts = [0, *(found.start() for found in re.finditer(r"^\[\[model\]\]", text, re.MULTILINE)), len(text)]
    blocks = (text[start:end] for start, end in itertools.pairwise(starts))
    edited = "".join(_replaced(block, table) if _id_of(block) == model else block for block in blocks)
    expected: dict[str, Any] = tomllib.loads(text)
    for one in expected["model"]:
        if one["id"] == model:
            one["step_cache"] = tomllib.loads(table)["model"]["step_cache"]
    if _parsed(edited) != expected:
        raise ValueError(f"the [[model]] table of {model!r} has an unusual form")
    return edited


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _id_of(block: str) -> str | None:
    found = re.search(r"""^id\s*=\s*["'](.*?)["']""", block, re.MULTILINE)
    return found[1] if found else None


def _replaced(block: str, table: str) -> str:
    """Insert `table` before the model's other tables, and remove the old one, which ends at a blank line."""
    lines, inside = list[str](), False
    for line in block.splitlines():
        inside = line.startswith(HEADER) or (inside and bool(line.strip()) and not line.startswith("["))
        if not inside:
            lines.append(line)
    at = next((at for at, line in enumerate(lines) if at and line.startswith("[")), len(lines))
    while not lines[at - 1].strip() or lines[at - 1].startswith("#"):  # comments belong to what follows
        at -= 1
    rest = "\n".join(lines[at:]).lstrip("\n")
    return "\n".join(lines[:at]) + f"\n\n{table}" + (f"\n{rest}\n" if rest else "")
