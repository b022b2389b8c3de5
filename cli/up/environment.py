"""What the started processes use of this machine: models file, storage folder, CPU threads and GPUs."""

import json
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from shared.config.settings import Settings
from shared.runtime.cores import usable_cores

CHECKOUT = Path(__file__).resolve().parents[2]
GPU_DEVICES = ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")
RECORD = "environment.json"
REDIS_URL = "FUSEQUEUE_REDIS_URL"
API_METRICS_PORT = "FUSEQUEUE_API_METRICS_PORT"
RECORDED = ("FUSEQUEUE_MODELS", "FUSEQUEUE_NAMESPACE", REDIS_URL, "FUSEQUEUE_STORAGE_DIR", "FUSEQUEUE_URL")


def models_path(option: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the models file: the option, else FUSEQUEUE_MODELS, else ./models.toml, else the demo's."""
    if option is not None:
        return option.resolve()
    if "FUSEQUEUE_MODELS" in environ:
        return Path(environ["FUSEQUEUE_MODELS"]).resolve()
    local = Path("models.toml").resolve()
    return local if local.exists() else CHECKOUT / "models.toml"


def child_environment(
    data_dir: Path, ranks: int, models: Path, settings: Settings, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return `environ` with the models file, storage folder and torch threads; variables that are set are kept.

    `ranks` are the processes that compute: one for each worker, or as many as the devices of its model.
    """
    env = {**environ, "FUSEQUEUE_MODELS": str(models), "PYTHONUNBUFFERED": "1"}
    if settings.s3_bucket is None:
        folder = settings.storage_dir if "FUSEQUEUE_STORAGE_DIR" in environ else data_dir / "storage"
        env["FUSEQUEUE_STORAGE_DIR"] = str(folder.resolve())
    if settings.torch_threads is None and not any(Path(device).exists() for device in GPU_DEVICES):
        env["FUSEQUEUE_TORCH_THREADS"] = str(torch_threads(usable_cores(), ranks))
    return env


def record(data_dir: Path, environ: Mapping[str, str], url: str, own_redis: bool) -> None:
    """Write to `data_dir` how commands find the parts of this `fusequeue up`, with its API at `url`.

    The URL of a Redis that is not its own is left out: it can hold a password of the user.
    """
    values = {name: environ[name] for name in RECORDED if name in environ and (own_redis or name != REDIS_URL)}
    if environ.get("FUSEQUEUE_S3_BUCKET"):
        values.pop("FUSEQUEUE_STORAGE_DIR", None)
    path = data_dir / RECORD
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    part.touch(mode=0o600)
    part.write_text(json.dumps({**values, "FUSEQUEUE_URL": url}, indent=2) + "\n", "utf-8")
    part.replace(path)


def recorded(data_dir: Path) -> dict[str, str]:
    """Return the variables of the last `fusequeue up` on `data_dir`; none if there was none."""
    try:
        values = json.loads((data_dir / RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: str(values[name]) for name in RECORDED if name in values} if isinstance(values, dict) else {}


def use_deployment(data_dir: Path, environ: MutableMapping[str, str]) -> None:
    """Set what is not set to that of the last `fusequeue up` on `data_dir`, unless another Redis is set."""
    values = recorded(data_dir)
    redis_url = environ.get(REDIS_URL)
    if redis_url and values.get(REDIS_URL, redis_url) != redis_url:
        return
    for name, value in values.items():
        if not environ.get(name):
            environ[name] = value


def torch_threads(cores: int, ranks: int) -> int:
    """Return the CPU threads of torch in each of `ranks` processes: an equal share of all cores but one."""
    return max(1, (cores - 1) // max(1, ranks))


def gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the NVIDIA GPUs that workers may use, as written in CUDA_VISIBLE_DEVICES."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for part in visible.split(",") if (name := part.strip())]
    numbers = [path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*")]
    return sorted((number for number in numbers if number.isdecimal()), key=int)


def workers_of_gpus(gpus: Sequence[str], devices: int) -> int:
    """Return how many workers of `devices` GPUs each there are GPUs for; one without a GPU."""
    return max(1, len(gpus) // devices)


def worker_environment(
    number: int, gpus: Sequence[str], environ: Mapping[str, str], devices: int = 1
) -> dict[str, str]:
    """Return the variables of worker `number` (from 1): `devices` of more GPUs in turn, and a port.

    FUSEQUEUE_DEVICE overrides the GPU. FUSEQUEUE_WORKER_PORT is the first worker's port; the others use the next ones.
    """
    env = {}
    if len(gpus) > devices and not environ.get("FUSEQUEUE_DEVICE"):
        first = (number - 1) % workers_of_gpus(gpus, devices) * devices
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + devices])
    port = environ.get("FUSEQUEUE_WORKER_PORT", "")
    if port.isdecimal():  # otherwise the worker reports the bad value
        env["FUSEQUEUE_WORKER_PORT"] = str(int(port) + number - 1)
    return env


def worker_environments(workers: int, environ: Mapping[str, str], devices: int = 1) -> list[dict[str, str]]:
    """Return the variables of each worker, which has `devices` GPUs."""
    available = gpus(environ)
    return [worker_environment(number, available, environ, devices) for number in range(1, workers + 1)]


def api_environments(processes: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the variables of each API process: FUSEQUEUE_API_METRICS_PORT is that of the first one."""
    port = environ.get(API_METRICS_PORT, "")
    if not port.isdecimal():  # the process reports a bad value
        return [{} for _ in range(processes)]
    return [{API_METRICS_PORT: str(int(port) + number)} for number in range(processes)]
