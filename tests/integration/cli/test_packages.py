"""The two packages that pip installs: `fusequeue`, the client of applications, and `fusequeue-server`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from harness.wheels import CLIENT, ROOT, SERVICE, unpacked_wheel

# Imports the client where nothing but the named packages is installed.
USE_CLIENT = """
import sys

class Others:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name[0] != "_" and name.partition(".")[0] not in {*sys.argv[1:], *sys.stdlib_module_names}:
            raise ModuleNotFoundError(f"no module {name}", name=name)

sys.meta_path.insert(0, Others)
import fusequeue
fusequeue.Client("http://127.0.0.1:9").close()
print(fusequeue.__file__)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheels")


def test_the_client_alone_needs_few_packages(folder: Path) -> None:
    """It works where only what its wheel asks for is installed."""
    client = unpacked_wheel(CLIENT, folder)
    assert {path.name.partition("-")[0] for path in client.iterdir()} == {"fusequeue"}
    (about,) = client.glob("*.dist-info/METADATA")
    needed = re.findall(r"^Requires-Dist: ([\w-]+)", about.read_text("utf-8"), re.M)
    assert sorted(needed) == ["httpx", "httpx-sse", "pydantic"]
    wanted = _with_their_own(needed)
    modules = [name for name, owners in metadata.packages_distributions().items() if wanted & {*map(_plain, owners)}]
    command = (sys.executable, "-P", "-c", USE_CLIENT, "fusequeue", *modules)
    ran = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(client)}, capture_output=True, text=True)
    assert ran.stdout.strip() == str(client / "fusequeue" / "__init__.py"), ran.stderr
    assert len(wanted) <= 12


def _plain(package: str) -> str:
    return package.lower().replace("_", "-")


def _with_their_own(packages: list[str]) -> set[str]:
    """Return packages with those that they require without an extra, and so on."""
    found: set[str] = set()
    missing = list(packages)
    while missing:
        name = _plain(missing.pop())
        if name not in found:
            found.add(name)
            lines = (line for line in metadata.requires(name) or () if "extra ==" not in line and _is_installed(line))
            missing += [re.split(r"[^\w.-]", line)[0] for line in lines]
    return found


def _is_installed(requirement: str) -> bool:
    try:
        metadata.version(re.split(r"[^\w.-]", requirement)[0])
    except metadata.PackageNotFoundError:
        return False
    return True


def test_the_service_has_all_of_its_files_and_needs_the_client_of_its_version(folder: Path) -> None:
    service = unpacked_wheel(SERVICE, folder)
    packages = {"api", "cli", "demo", "library", "shared", "worker"}
    names = {path.name.partition("-")[0] for path in service.iterdir()}
    assert names == {*packages, "models.toml", "fusequeue_server"}
    listed = (f"{ROOT / package}/**/*.{end}" for package in packages for end in ("py", "lua", "js", "css", "html"))
    sources = {path.relative_to(ROOT) for pattern in listed for path in Path("/").glob(pattern[1:])}
    assert sources <= {path.relative_to(service) for path in service.rglob("*")}
    versions = {
        tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]["version"]
        for project in (CLIENT, SERVICE)
    }
    (about,) = service.glob("*.dist-info/METADATA")
    assert f"Requires-Dist: fusequeue=={versions.pop()}" in about.read_text("utf-8")
    assert not versions, "both have one version"
