"""The two packages as wheels, unpacked beside each other as pip installs them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT, SERVICE = ROOT / "fusequeue", ROOT
TIMEOUT_S = 120.0


def unpacked_wheel(project: Path, folder: Path) -> Path:
    """Build the wheel of a project and return the new folder with its files, below `folder`."""
    built = folder / f"wheel-of-{project.name}"
    command = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(built))
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=TIMEOUT_S)
    (wheel,) = built.glob("*.whl")
    files = built / "files"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(files)
    return files
