"""Environments of the clients, apart from that of the service: virtual ones for Python, `node_modules` for Node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".clients"
NODE = "node"
INSTALL_TIMEOUT_S = 900.0


class NotInstalled(Exception):
    """An environment could not be made."""


def install(environment: str) -> None:
    """Install the pinned packages of an environment, unless they are already there; raises `NotInstalled`."""
    source, folder = _source(environment), ENVIRONMENTS / environment
    wanted = "".join(path.read_text("utf-8") for path in source)
    installed = folder / "installed"
    if installed.is_file() and installed.read_text("utf-8") == wanted:
        return
    print(f"installing {environment} ...", flush=True)
    installed.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for command in _node_commands(source, folder) if environment == NODE else _python_commands(source, folder):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        if done.returncode:
            raise NotInstalled(f"{environment}: {' '.join(command[:4])} ...: {(done.stderr or done.stdout)[-2000:]}")
    installed.write_text(wanted, "utf-8")


def _source(environment: str) -> tuple[Path, Path]:
    """Return the files that name an environment's packages, and all packages that these need."""
    if environment == NODE:
        return HERE / NODE / "package.json", HERE / NODE / "package-lock.json"
    folder = HERE / "python" / environment
    return folder / "requirements.txt", folder / "constraints.txt"


def _python_commands(source: tuple[Path, Path], folder: Path) -> Iterable[list[str]]:
    venv.create(folder, with_pip=True, clear=True)
    requirements, constraints = map(str, source)
    options = ["--quiet", "--disable-pip-version-check", "-r", requirements, "-c", constraints]
    yield [str(python(folder.name)), "-m", "pip", "install", *options]


def _node_commands(source: tuple[Path, Path], folder: Path) -> Iterable[list[str]]:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NotInstalled("node: Node.js 20 and npm are needed for the clients of JavaScript")
    for path in source:
        shutil.copy(path, folder)
    yield [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]


def python(environment: str) -> Path:
    return ENVIRONMENTS / environment / "bin" / "python"


def command(environment: str, script: str) -> list[str]:
    """Return the command that runs a script in its environment."""
    if environment == NODE:
        # Node finds packages beside a script only.
        return ["node", str(shutil.copytree(HERE / NODE, ENVIRONMENTS / NODE, dirs_exist_ok=True) / script)]
    return [str(python(environment)), str(HERE / "python" / environment / script)]


def variables(environment: str) -> dict[str, str]:
    """Return the environment variables of a script: none that changes what a client does."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    binaries = ENVIRONMENTS / environment / "bin"
    return inherited | {
        "PATH": f"{binaries}{os.pathsep}{inherited.get('PATH', os.defpath)}",
        "PYTHONPATH": str(HERE / "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def version(environment: str, package: str) -> str:
    """Return the installed version of a package."""
    if environment == NODE:
        manifest = ENVIRONMENTS / NODE / "node_modules" / package / "package.json"
        return str(json.loads(manifest.read_text("utf-8"))["version"])
    library = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = ENVIRONMENTS / environment / "lib" / library / "site-packages"
    return next(found.version for found in metadata.distributions(name=package, path=[str(path)]))
