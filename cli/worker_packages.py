"""The packages of a worker, which an installation of the API alone lacks."""

from importlib.util import find_spec

from shared.errors import ConfigurationError

PACKAGES = ("torch", "diffusers", "transformers", "numpy", "PIL")
REMEDY = "pip install 'fusequeue-server[worker]', in a checkout pip install -c constraints.txt ./fusequeue '.[worker]'"


def require_worker_packages(otherwise: str = "") -> None:
    """Raise `ConfigurationError` if a worker cannot start; `otherwise` says what can be done without one."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigurationError(f"a worker needs {', '.join(missing)}: {REMEDY}{otherwise}")
