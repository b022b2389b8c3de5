"""A folder of a user with files that have the names of our packages, and of some that we import."""

from __future__ import annotations

from pathlib import Path

MODULES = ("cli", "demo", "fusequeue", "shared", "worker", "json", "redis", "torch")


def hostile_folder(folder: Path) -> Path:
    """Write such files into `folder`, each of which ends a process that imports it; return the folder."""
    for name in MODULES:
        (folder / f"{name}.py").write_text(f'raise SystemExit("{name}.py of the current folder is imported")\n')
    package = folder / "api"
    package.mkdir()
    (package / "__init__.py").write_text('raise SystemExit("api/ of the current folder is imported")\n')
    return folder
