"""Settings, read from the environment once by the entry point.

Variables are prefixed with `FUSEQUEUE_`. `None` means unlimited or unset; names end in their unit.
`python -m shared.config.settings` prints the table in `docs/operations.md`.
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
# Read by clients, or set by Kubernetes in every pod for services whose names begin with `fusequeue`.
_NOT_SETTINGS = re.compile(r"API_KEY|URL|(.*_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)")


def _redis_url(url: str) -> str:
    """Return `url`, or raise `ValueError`. The message does not repeat the URL: it can hold a password."""
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("a URL must begin with redis://, rediss:// or unix://")
    try:
        port = urlsplit(url).port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("the URL's port must be a number from 1 to 65535")
    return url


def _split(value: Any) -> Any:
    return [item for part in value.split(",") if (item := part.strip())] if isinstance(value, str) else value


Positive = Annotated[int, Field(gt=0)]
PortNumber = Annotated[int, Field(ge=1, le=65_535)]
RedisUrl = Annotated[str, AfterValidator(_redis_url)]
CommaSeparated = BeforeValidator(_split)


class Settings(BaseSettings):
    """Everything an operator can set outside `models.toml`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True, enable_decoding=False
    )

    redis_url: Annotated[RedisUrl, Field(description="The queue's Redis.")] = "redis://127.0.0.1:6379/0"
    rq_redis_url: Annotated[
        RedisUrl | None, Field(description="Redis of the chores (rq), not a cluster. Unset: redis_url.")
    ] = None
    namespace: Annotated[
        str, Field(description="Pool of this process; part of every Redis key.", pattern=r"^[a-z0-9-]{1,32}$")
    ] = "default"
    models: Annotated[Path, Field(description="The models file.")] = Path("models.toml")
    batch_rules: Annotated[
        Path | None, Field(description="JSON file of rules that limit batches by model and size.")
    ] = None
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(description="Lowest level that is logged.")
    ] = "INFO"

    storage_dir: Annotated[Path, Field(description="Folder for inputs and results if no S3 bucket is set.")] = Path(
        "data/storage"
    )
    s3_bucket: Annotated[str | None, Field(description="S3 bucket for inputs and results.")] = None
    s3_endpoint_url: Annotated[str | None, Field(description="S3 endpoint, for servers other than AWS.")] = None
    s3_public_endpoint_url: Annotated[
        str | None, Field(description="Endpoint in presigned URLs. Unset: s3_endpoint_url.")
    ] = None
    s3_region: Annotated[str, Field(description="S3 region.")] = "us-east-1"
    s3_access_key_id: Annotated[str | None, Field(description="Access key. Unset: boto3's credential chain.")] = None
    s3_secret_access_key: Annotated[SecretStr | None, Field(description="Secret of s3_access_key_id.")] = None
    s3_prefix: Annotated[str, Field(description="Prefix of every object key.")] = ""
    storage_timeout_s: Annotated[float, Field(gt=0, description="Timeout of a storage request.")] = 10.0
    presign_expires_s: Annotated[Positive, Field(description="Lifetime of presigned and signed URLs.")] = 3600

    retention_s: Annotated[Positive, Field(description="How long finished jobs and their images are kept.")] = 86_400
    input_retention_s: Annotated[Positive, Field(description="How long an unused input is kept.")] = 86_400
    file_retention_s: Annotated[Positive, Field(description="How long files and ended batches are kept.")] = 7 * 86_400
    idempotency_s: Annotated[Positive, Field(description="How long an Idempotency-Key is remembered.")] = 86_400
    max_queued_jobs: Annotated[Positive, Field(description="Limit of queued jobs; more get 429.")] = 100_000
    max_queued_jobs_per_tenant: Annotated[
        Positive, Field(description="The same for one tenant. `fusequeue tenants limit` overrides it.")
    ] = 50_000
    max_running_slots_per_tenant: Annotated[
        Positive | None, Field(description="Images generated at once for one tenant. Unset: unlimited.")
    ] = None
    max_requests_per_minute_per_tenant: Annotated[
        Positive | None, Field(description="Requests of one tenant over all API processes. Unset: unlimited.")
    ] = None
    max_attempts: Annotated[Positive, Field(description="Losses of a solo job before it becomes a dead letter.")] = 3

    lease_ms: Annotated[Positive, Field(description="Lifetime of a claim that is not renewed.")] = 30_000
    overdue_ms: Annotated[
        Positive, Field(description="A signature ready for longer stops admissions to other batches.")
    ] = 2_000
    aging_ms: Annotated[Positive, Field(description="A job preempted for this long in total gains one priority.")] = (
        30_000
    )
    max_preempted_rows: Annotated[
        int | None,
        Field(ge=0, description="Images that interactive jobs can preempt. Unset: one forward."),
    ] = None
    stall_factor: Annotated[
        float, Field(gt=1, description="Multiple of the expected time after which a forward is hung.")
    ] = 20.0
    stall_floor_s: Annotated[float, Field(gt=0, description="Shortest time after which a forward is hung.")] = 60.0
    drain_timeout_s: Annotated[
        float, Field(gt=0, description="Time for running jobs when a worker stops; others are released.")
    ] = 25.0
    spool_bytes: Annotated[Positive, Field(description="Finished images a worker holds while storage is down.")] = (
        512 * 1024 * 1024
    )
    gpu_memory_bytes: Annotated[
        int | None, Field(description="Memory for loaded models on one device. Unset: 70 %.")
    ] = None
    adapter_memory_bytes: Annotated[
        Positive, Field(description="Memory for LoRA adapters of a loaded model, exceeded only by running jobs.")
    ] = 1024**3
    device: Annotated[str | None, Field(description="Torch device. Unset: cuda if there is one, else cpu.")] = None
    torch_threads: Annotated[int | None, Field(description="CPU threads of torch. Unset: torch's choice.")] = None

    worker_port: Annotated[
        PortNumber | None, Field(description="Port of a worker's /healthz, /readyz and /metrics. Unset: none.")
    ] = None
    worker_host: Annotated[str, Field(description="Address of that port, which needs no API key.")] = "127.0.0.1"
    pod_name: Annotated[
        str | None,
        Field(description="Kubernetes pod of a worker, which updates its deletion cost. Unset: none."),
    ] = None
    pod_namespace: Annotated[str, Field(description="Kubernetes namespace of the pod.")] = "default"

    target_wait_s: Annotated[
        float, Field(gt=0, description="Queue wait that the wanted number of workers aims at (GET /v1/scale).")
    ] = 30.0

    auth: Annotated[
        Literal["auto", "keys", "insecure-no-keys"],
        Field(description="When API keys are required: once one exists, always, or never."),
    ] = "auto"
    cors_origins: Annotated[
        tuple[Annotated[str, Field(pattern=r"^https?://[a-z0-9.\[\]:-]+$")], ...],
        CommaSeparated,
        Field(description="Origins allowed to call the API from a browser, comma-separated."),
    ] = ()
    max_body_bytes: Annotated[
        Positive, Field(description="Largest request body, except uploads and bulk requests.")
    ] = 1_048_576
    max_input_bytes: Annotated[Positive, Field(description="Largest input image file.")] = 20 * 1024 * 1024
    max_input_pixels: Annotated[Positive, Field(description="Largest decoded input image.")] = 40_000_000
    max_file_bytes: Annotated[Positive, Field(description="Largest file of `POST /v1/files`.")] = 200 * 1024 * 1024
    fetch_timeout_s: Annotated[float, Field(gt=0, description="Timeout for fetching an image URL.")] = 15.0
    fetch_allow_networks: Annotated[
        tuple[IPvAnyNetwork, ...],
        CommaSeparated,
        Field(description="Private networks (CIDR) allowed in image URLs, comma-separated."),
    ] = ()
    fetch_allow_http: Annotated[bool, Field(description="Allow plain http in image URLs.")] = False
    fetch_ports: Annotated[
        tuple[PortNumber, ...], CommaSeparated, Field(description="Ports allowed in image URLs, comma-separated.")
    ] = (443, 8443)
    webhook_timeout_s: Annotated[float, Field(gt=0, le=30, description="Timeout of one webhook delivery attempt.")] = (
        20.0
    )
    webhook_allow_networks: Annotated[
        tuple[IPvAnyNetwork, ...],
        CommaSeparated,
        Field(description="Private networks (CIDR) allowed for webhooks, comma-separated."),
    ] = ()
    webhook_allow_http: Annotated[bool, Field(description="Allow plain http for webhooks.")] = False
    webhook_ports: Annotated[
        tuple[PortNumber, ...], CommaSeparated, Field(description="Ports allowed for webhooks, comma-separated.")
    ] = (443, 8443)
    max_wait_s: Annotated[Positive, Field(description="Longest `wait` of a request.")] = 60
    sync_wait_s: Annotated[
        Positive,
        Field(description="Longest wait of a synchronous OpenAI or Hugging Face call."),
    ] = 540
    disconnect_grace_s: Annotated[
        float, Field(ge=0, description="Time for a retry after a disconnect, before the job is canceled.")
    ] = 15.0
    max_bulk_lines: Annotated[Positive, Field(description="Most lines of a bulk request.")] = 100_000
    public_url: Annotated[
        str | None, Field(description="Base of the URLs in responses. Unset: that of the request.")
    ] = None
    trusted_proxies: Annotated[
        str | None, Field(description="Proxies whose X-Forwarded-* headers are trusted, comma-separated.")
    ] = None
    sse_keepalive_s: Annotated[float, Field(gt=0, description="Interval of keep-alive comments on event streams.")] = (
        15.0
    )


def load() -> Settings:
    """Read the settings from the environment, or raise `ConfigurationError` naming each invalid variable."""
    try:
        return Settings()
    except ValidationError as error:
        faults = (f"{PREFIX}{'.'.join(map(str, fault['loc'])).upper()}: {fault['msg']}" for fault in error.errors())
        raise ConfigurationError(f"invalid settings: {'; '.join(faults)}") from error


def unknown_variables(variables: Iterable[str]) -> list[str]:
    """Return a message for each of `variables` that is named like a setting but is not one."""
    known = [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
    messages = []
    for name in sorted(set(variables) - set(known)):
        if name.startswith(PREFIX) and not _NOT_SETTINGS.fullmatch(name.removeprefix(PREFIX)):
            hints = [f"; did you mean {near}?" for near in difflib.get_close_matches(name, known, n=1, cutoff=0.8)]
            messages.append(f"unknown setting {name} (ignored){''.join(hints)}")
    return messages


def table() -> str:
    """Return the Markdown table of all settings."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        shown = "" if default in (None, "") else f"`{default}`"
        rows.append(f"| `{PREFIX}{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
