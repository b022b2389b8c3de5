"""Files of results: their names, where they can be, and how they are written."""

from __future__ import annotations

import re
import tempfile
import unicodedata
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusequeue.response_types import Artifact, Job

MAX_WORDS_CHARS = 48


def file_name(artifact: Artifact, name: str) -> str:
    """Return the name of the file in which an artifact is saved."""
    extension = artifact.content_type.rpartition("/")[2]
    extension = {"jpeg": "jpg", "mpeg": "mp3", "ogg": "opus", "gltf-binary": "glb"}.get(extension, extension)
    return f"{name}-{artifact.index}.{extension}"


def stem(job: Job) -> str:
    """Return how the names of a job's files begin, as in the archive of its group; they sort by age."""
    ascii_prompt = unicodedata.normalize("NFKD", job.prompt.casefold()).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", ascii_prompt)[:MAX_WORDS_CHARS].strip("-")
    return f"{job.id}-{words}" if words else job.id


def check_folder(folder: Path) -> Path:
    """Return a folder that files can be written to, or that can be created; raises `OSError` for any other.

    It is checked before a job, which would otherwise run in vain. Nothing is created: the job may be refused.
    """
    nearest = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return folder
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
