"""Settings, read from the environment once, in the entry point, and passed down.

Each name is prefixed `FUSEQUEUE_`. `None` means unlimited or unset; names carry their unit.
`docs/operations.md` holds the table of them, made by `python -m shared.config.settings`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, IPvAnyNetwork, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.errors import ConfigurationError

PREFIX = "FUSEQUEUE_"
# Of clients; and what Kubernetes sets in every pod where a service's name begins with `fusequeue`.
_NO_SETTINGS = re.compile(r"API_KEY|URL|(.*_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)")


def _redis_url(url: str) -> str:
    """Return `url`, or raise `ValueError` without its words: it may hold a password."""
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("a URL must begin with redis://, rediss:// or unix://")
    try:
        port = urlsplit(url).port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("the URL's port must be a number from 1 to 65535")
    return url


def _by_commas(value: Any) -> Any:
    return [word for part in value.split(",") if (word := part.strip())] if isinstance(value, str) else value


Positive = Annotated[int, Field(gt=0)]
PortNumber = Annotated[int, Field(ge=1, le=65_535)]
RedisUrl = Annotated[str, AfterValidator(_redis_url)]
ByCommas = BeforeValidator(_by_commas)


class Settings(BaseSettings):
    """Everything an operator can set without touching `models.toml`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True, enable_decoding=False
    )

    redis_url: Annotated[RedisUrl, Field(description="The queue's Redis.")] = "redis://127.0.0.1:6379/0"
    rq_redis_url: Annotated[
        RedisUrl | None, Field(description="Redis of the chores (rq); a plain one, not a cluster. Unset: as redis_url.")
    ] = None
    namespace: Annotated[
        str, Field(description="Pool this process belongs to; part of every key.", pattern=r"^[a-z0-9-]{1,32}$")
    ] = "default"
    models: Annotated[Path, Field(description="The models file.")] = Path("models.toml")
    batch_rules: Annotated[
        Path | None, Field(description="JSON file of rules that lower `max_batch` for some models and sizes.")
    ] = None
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(description="Least severe line logged.")
    ] = "INFO"

    storage_dir: Annotated[Path, Field(description="Folder for inputs and results, when no S3 bucket is set.")] = Path(
        "data/storage"
    )
    s3_bucket: Annotated[str | None, Field(description="S3 bucket for inputs and results.")] = None
    s3_endpoint_url: Annotated[str | None, Field(description="S3 endpoint, for servers other than AWS.")] = None
    s3_public_endpoint_url: Annotated[
        str | None, Field(description="Endpoint that clients reach, for presigned URLs. Unset: as s3_endpoint_url.")
    ] = None
    s3_region: Annotated[str, Field(description="S3 region.")] = "us-east-1"
    s3_access_key_id: Annotated[str | None, Field(description="Unset: boto3's own chain of credentials.")] = None
    s3_secret_access_key: Annotated[SecretStr | None, Field(description="Secret of s3_access_key_id.")] = None
    s3_prefix: Annotated[str, Field(description="Prefix of every object key.")] = ""
    storage_timeout_s: Annotated[float, Field(gt=0, description="Bound on one storage request.")] = 10.0
    presign_expires_s: Annotated[
        Positive, Field(description="Life of a presigned URL, and of the signed URLs of pictures.")
    ] = 3600

    retention_s: Annotated[Positive, Field(description="How long finished jobs and their pictures are kept.")] = 86_400
    input_retention_s: Annotated[Positive, Field(description="How long an uploaded input is kept unused.")] = 86_400
    file_retention_s: Annotated[
        Positive, Field(description="How long files are kept, those that batches write too, and batches that ended.")
    ] = 7 * 86_400
    idempotency_s: Annotated[Positive, Field(description="How long an Idempotency-Key is remembered.")] = 86_400
    max_waiting_jobs: Annotated[Positive, Field(description="Jobs that may wait; more get 429.")] = 100_000
    max_waiting_jobs_per_tenant: Annotated[
        Positive, Field(description="The same, for one tenant that has no limit of its own.")
    ] = 50_000
    max_running_seats_per_tenant: Annotated[
        Positive | None, Field(description="Pictures in the making at once for one tenant. Unset: unlimited.")
    ] = None
    max_requests_per_minute_per_tenant: Annotated[
        Positive | None, Field(description="Requests of one tenant over all API processes. Unset: unlimited.")
    ] = None
    max_attempts: Annotated[Positive, Field(description="Losses while running alone before the dead letters.")] = 3

    lease_ms: Annotated[Positive, Field(description="Life of a claim that is not renewed.")] = 30_000
    overdue_ms: Annotated[
        Positive, Field(description="Ripe for longer than this, a signature stops admissions to the running one.")
    ] = 2_000
    patience_ms: Annotated[
        Positive, Field(description="A job that more urgent ones set aside for so long counts as one priority higher.")
    ] = 30_000
    rows_aside: Annotated[
        int | None,
        Field(ge=0, description="Pictures that interactive jobs may set aside. Unset: as many as one forward holds."),
    ] = None
    stall_factor: Annotated[
        float, Field(gt=1, description="A forward longer than this many learned ones counts as hung.")
    ] = 20.0
    stall_floor_s: Annotated[float, Field(gt=0, description="No forward counts as hung sooner.")] = 60.0
    drain_timeout_s: Annotated[
        float, Field(gt=0, description="Time a stopping worker has to finish what runs; the rest is given back.")
    ] = 25.0
    spool_bytes: Annotated[Positive, Field(description="Finished pictures a worker holds while storage is down.")] = (
        512 * 1024 * 1024
    )
    gpu_memory_bytes: Annotated[
        int | None, Field(description="Budget for loaded models on one device. Unset: 0.7 of its memory.")
    ] = None
    adapter_memory_bytes: Annotated[
        Positive, Field(description="LoRA adapters a loaded model keeps, unless jobs under way use more.")
    ] = 1024**3
    device: Annotated[str | None, Field(description="Torch device. Unset: cuda if there is one, else cpu.")] = None
    torch_threads: Annotated[int | None, Field(description="CPU threads of torch. Unset: torch's choice.")] = None

    worker_port: Annotated[
        PortNumber | None, Field(description="Port of a worker's /healthz, /readyz and /metrics. Unset: none.")
    ] = None
    worker_host: Annotated[str, Field(description="Address of that port; it asks nobody for a key.")] = "127.0.0.1"
    pod_name: Annotated[
        str | None,
        Field(description="A worker's own pod in Kubernetes, whose deletion cost it keeps. Unset: none."),
    ] = None
    pod_namespace: Annotated[str, Field(description="The pod's namespace in Kubernetes.")] = "default"

    target_wait_s: Annotated[
        float, Field(gt=0, description="Wait that the number of workers wanted aims at (GET /v1/scale).")
    ] = 30.0

    auth: Annotated[
        Literal["auto", "keys", "insecure-no-keys"],
        Field(description="When API keys are asked for: from the first key made on, always, or never."),
    ] = "auto"
    cors_origins: Annotated[
        tuple[Annotated[str, Field(pattern=r"^https?://[a-z0-9.\[\]:-]+$")], ...],
        ByCommas,
        Field(description="Origins whose pages may call the API from a browser, by commas."),
    ] = ()
    max_body_bytes: Annotated[Positive, Field(description="Largest request body but for uploads and bulk.")] = 1_048_576
    max_input_bytes: Annotated[Positive, Field(description="Largest input image, as a file.")] = 20 * 1024 * 1024
    max_input_pixels: Annotated[Positive, Field(description="Largest input image, decoded.")] = 40_000_000
    max_file_bytes: Annotated[Positive, Field(description="Largest file of `POST /v1/files`.")] = 200 * 1024 * 1024
    fetch_timeout_s: Annotated[float, Field(gt=0, description="Bound on fetching an image URL.")] = 15.0
    fetch_allow_networks: Annotated[
        tuple[IPvAnyNetwork, ...],
        ByCommas,
        Field(description="Private networks (CIDR) that image URLs may point into, by commas."),
    ] = ()
    fetch_allow_http: Annotated[bool, Field(description="Let image URLs be plain http.")] = False
    fetch_ports: Annotated[
        tuple[PortNumber, ...], ByCommas, Field(description="Ports that image URLs may name, by commas.")
    ] = (443, 8443)
    webhook_timeout_s: Annotated[
        float, Field(gt=0, le=30, description="Bound on one attempt to deliver a webhook.")
    ] = 20.0
    webhook_allow_networks: Annotated[
        tuple[IPvAnyNetwork, ...],
        ByCommas,
        Field(description="Private networks (CIDR) that webhooks may point into, by commas."),
    ] = ()
    webhook_allow_http: Annotated[bool, Field(description="Let webhooks be plain http.")] = False
    webhook_ports: Annotated[
        tuple[PortNumber, ...], ByCommas, Field(description="Ports that webhooks may name, by commas.")
    ] = (443, 8443)
    max_wait_s: Annotated[Positive, Field(description="Longest wait that a request may ask for.")] = 60
    sync_wait_s: Annotated[
        Positive,
        Field(description="Longest that a call of OpenAI's or Hugging Face's protocol waits for its pictures."),
    ] = 540
    hangup_grace_s: Annotated[
        float, Field(ge=0, description="After its client hung up, a job waits so long for a retry, then is canceled.")
    ] = 15.0
    max_bulk_lines: Annotated[Positive, Field(description="Lines that one bulk request may carry.")] = 100_000
    public_url: Annotated[
        str | None, Field(description="Where clients reach the API, for the URLs it tells. Unset: the request's own.")
    ] = None
    trusted_proxies: Annotated[
        str | None, Field(description="Addresses of proxies whose X-Forwarded-* headers are believed, by commas.")
    ] = None
    sse_keepalive_s: Annotated[float, Field(gt=0, description="Silence on an event stream before a comment.")] = 15.0


def load() -> Settings:
    """Read the settings from the environment, or raise `ConfigurationError` naming each variable at fault."""
    try:
        return Settings()
    except ValidationError as error:
        faults = "; ".join(
            f"{PREFIX}{'.'.join(map(str, fault['loc'])).upper()}: {fault['msg']}" for fault in error.errors()
        )
        raise ConfigurationError(f"settings in the environment: {faults}") from error


def misspelt(variables: Iterable[str]) -> list[str]:
    """Return a sentence on each of `variables` that is named like a setting and is none."""
    known = [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
    told = []
    for name in sorted(set(variables) - set(known)):
        if name.startswith(PREFIX) and not _NO_SETTINGS.fullmatch(name.removeprefix(PREFIX)):
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            told.append(f"{name} is no setting and changes nothing" + "".join(f"; is it {one}?" for one in nearest))
    return told


def table() -> str:
    """Return the Markdown table of all settings."""
    rows = ["| variable | default | what it sets |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        shown = "" if default in (None, "") else f"`{default}`"
        rows.append(f"| `{PREFIX}{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
