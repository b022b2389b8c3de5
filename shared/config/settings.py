"""Settings, read from the environment once by the entry point.

Variables are prefixed with `FUSEQUEUE_`. `None` means unlimited or unset; names end in their unit.
`python -m shared.config.settings` prints the table in `docs/operations/settings.md`.
"""

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    IPvAnyNetwork,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.config.addresses import Host, HostPattern, HttpUrl, Origin, Proxies, RedisUrl, SecretWord, Word
from shared.config.destinations import OutputBucket
from shared.config.setting_readers import READERS
from shared.errors import ConfigurationError

PREFIX = "FUSEQUEUE_"
# Read by clients, or set by Kubernetes in every pod for services whose names begin with `fusequeue`.
_NOT_SETTINGS = re.compile(r"API_KEY|URL|(.*_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)")


def _split(value: Any) -> Any:
    return [item for part in value.split(",") if (item := part.strip())] if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _output_bucket(value: Any) -> Any:
    return OutputBucket.parse(value) if isinstance(value, str) else value


Positive = Annotated[int, Field(gt=0)]
PortNumber = Annotated[int, Field(ge=1, le=65_535)]
CommaSeparated = BeforeValidator(_split)
Ports = Annotated[tuple[PortNumber, ...], CommaSeparated]
Networks = Annotated[tuple[IPvAnyNetwork, ...], CommaSeparated]
Buckets = Annotated[tuple[Annotated[OutputBucket, BeforeValidator(_output_bucket)], ...], CommaSeparated]
Origins = Annotated[tuple[Origin, ...], CommaSeparated]
HostPatterns = Annotated[tuple[HostPattern, ...], CommaSeparated]


LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)]


def _setting(default: Any, description: str, **limits: Any) -> Any:
    return Field(default, description=description, **limits)


class Settings(BaseSettings):
    """Everything an operator can set outside `models.toml`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True, enable_decoding=False
    )

    redis_url: RedisUrl = _setting("redis://127.0.0.1:6379/0", "The queue's Redis.")
    rq_redis_url: RedisUrl | None = _setting(None, "Redis of the chores (rq), not a cluster. Unset: redis_url.")
    namespace: str = _setting(
        "default", "Name of this deployment; part of every Redis key.", pattern=r"^[a-z0-9-]{1,32}$"
    )
    worker_pool: str = _setting(
        "default", "Worker pool of this worker, by which operators load and pin models.", pattern=r"^[a-z0-9-]{1,32}$"
    )
    models: Path = _setting(Path("models.toml"), "The models file.")
    batch_rules: Path | None = _setting(None, "JSON file of rules that limit batches by model and size.")
    umask: str = _setting(
        "077", "Permissions withheld from new files and folders. 027: a group can read them.", pattern=r"^0?[0-7]{3}$"
    )
    log_level: LogLevel = _setting("INFO", "Lowest level that is logged.")
    traces: bool = _setting(False, "Send OpenTelemetry traces (extra `traces`). The OTEL_ variables say where.")

    storage_dir: Path = _setting(Path("data/storage"), "Folder for inputs and results if no S3 bucket is set.")
    s3_bucket: Word | None = _setting(None, "S3 bucket for inputs and results.")
    s3_endpoint_url: HttpUrl | None = _setting(None, "S3 endpoint, for servers other than AWS.")
    s3_public_endpoint_url: HttpUrl | None = _setting(None, "Endpoint in presigned URLs. Unset: s3_endpoint_url.")
    s3_region: Word | None = _setting(
        None, "S3 region. Unset: that of boto3's variables and files, AWS_REGION first, else us-east-1."
    )
    s3_addressing: Literal["path", "virtual"] | None = _setting(
        None,
        "Whether the bucket is in the path of S3 URLs or in their host name. Unset: in the path, but for AWS, whose "
        "client chooses.",
    )
    s3_access_key_id: Word | None = _setting(None, "Access key. Unset: boto3's credential chain.")
    s3_secret_access_key: SecretWord | None = _setting(None, "Secret of s3_access_key_id.")
    s3_checksums: Literal["when_required", "when_supported"] | None = _setting(
        None,
        "Checksums of boto3; over https `when_supported` sends them as trailers. Unset: boto3's own variables and "
        "files, else `when_supported` for AWS only.",
    )
    s3_prefix: str = _setting("", "Prefix of every object key.")
    storage_timeout_s: float = _setting(
        10.0, "Timeout of a storage request. A write has another second for each 256 KiB.", gt=0
    )
    presign_expires_s: Positive = _setting(3600, "Lifetime of signed URLs; of those of S3 a week at most.")
    output_buckets: Buckets = _setting(
        (), "Buckets that jobs can name as `output`, comma-separated: BUCKET, BUCKET/PREFIX, TENANT=BUCKET/PREFIX."
    )

    retention_s: Positive = _setting(86_400, "How long finished jobs and their images are kept.")
    input_retention_s: Positive = _setting(86_400, "How long an unused input or fetched adapter is kept.")
    file_retention_s: Positive = _setting(
        7 * 86_400, "How long ended batches are kept, and files without `expires_after`."
    )
    usage_retention_days: int = _setting(400, "How long the usage of tenants is kept, by day.", ge=1, le=4_000)
    idempotency_s: Positive = _setting(86_400, "How long an Idempotency-Key is remembered.")
    max_queued_jobs: Positive = _setting(100_000, "Limit of queued jobs; more get 429.")
    max_queued_jobs_per_tenant: Positive = _setting(
        50_000,
        "The same for one tenant that is alone; beside others each leaves as much room as it takes. "
        "`fusequeue tenants limit` overrides it.",
    )
    max_running_slots_per_tenant: Positive | None = _setting(
        None, "Images generated at once for one tenant. Unset: unlimited."
    )
    max_device_seconds_per_day_per_tenant: Positive | None = _setting(
        None, "Device seconds of one tenant in a day (UTC), after which its jobs get 429. Unset: unlimited."
    )
    max_device_seconds_per_month_per_tenant: Positive | None = _setting(None, "The same in a month (UTC).")
    max_kept_jobs_per_tenant: Positive = _setting(1_000_000, "Records of jobs of one tenant, ended ones included.")
    max_record_bytes_per_tenant: Positive = _setting(2 * 1024**3, "Redis memory of one tenant's records, estimated.")
    max_stored_objects_per_tenant: Positive = _setting(2_000_000, "Inputs, results and file parts of one tenant.")
    max_stored_bytes_per_tenant: Positive = _setting(1024**4, "Their size in storage.")
    max_checkpoint_bytes: Positive = _setting(
        100 * 1024**3, "Checkpoints of running jobs in storage, of all tenants; beyond it none are stored."
    )
    max_requests_per_minute_per_tenant: Positive | None = _setting(
        None, "Requests of one tenant over all API processes. Unset: unlimited."
    )
    max_attempts: Positive = _setting(
        3, "Workers that a job can lose while it runs solo; then it becomes a dead letter."
    )

    lease_ms: Positive = _setting(30_000, "Lifetime of a claim that is not renewed.")
    overdue_ms: Positive = _setting(
        2_000, "A signature ready for longer stops admissions to other batches if the next claim would choose it."
    )
    bulk_share: float = _setting(
        0.1, "Share of a model's slots for its bulk jobs while others are queued. 0: none.", ge=0, le=0.9
    )
    interactive_allowance_s: float = _setting(
        10.0,
        "GPU-seconds above the least-served tenant's up to which interactive jobs precede its jobs.",
        ge=0,
    )
    aging_ms: Positive = _setting(
        30_000,
        "After so long a preempted job gains one priority, and few jobs with deadlines overtake a queued one.",
    )
    max_preempted_rows: int | None = _setting(
        None, "Images that interactive jobs can preempt. Unset: one forward.", ge=0
    )
    stall_factor: float = _setting(20.0, "Multiple of the expected time after which a forward is hung.", gt=1)
    stall_floor_s: float = _setting(60.0, "Shortest time after which a forward is hung.", gt=0)
    load_retry_s: float = _setting(
        5.0, "Time after which a failed model load is repeated; doubles with each failure, up to 64 times.", gt=0
    )
    drain_timeout_s: float = _setting(25.0, "Time for running jobs when a worker stops; others go on elsewhere.", gt=0)
    spool_bytes: Positive = _setting(
        512 * 1024 * 1024, "Images a worker holds while storage is down; each counts as 2 MiB or more."
    )
    gpu_memory_bytes: int | None = _setting(None, "Memory for loaded models on one device. Unset: 70 %.")
    cpu_memory_bytes: int | None = _setting(
        None, "CPU memory for weights of evicted models. Unset: while a quarter stays free. 0: none.", ge=0
    )
    adapter_memory_bytes: Positive = _setting(
        1024**3, "Memory for LoRA adapters of a loaded model, exceeded only by running jobs."
    )
    adapter_folder_bytes: Positive = _setting(
        4 * 1024**3, "Disk of a worker for files of uploaded adapters, exceeded only by running jobs."
    )
    device: str | None = _setting(None, "Torch device. Unset: cuda if there is one, else cpu with a warning.")
    torch_threads: int | None = _setting(
        None, "CPU threads of torch. Unset: torch's choice, at most the cores of the container."
    )

    worker_port: PortNumber | None = _setting(None, "Port of a worker's /healthz, /readyz and /metrics. Unset: none.")
    worker_host: Host = _setting("127.0.0.1", "Address of that port, which needs no API key.")
    api_metrics_port: PortNumber | None = _setting(
        None, "Port of the /healthz, /readyz and /metrics of one API process. Unset: none but those of the API's port."
    )
    api_metrics_host: Host = _setting("127.0.0.1", "Address of that port, which needs no API key.")

    target_wait_s: float = _setting(
        30.0, "Queue wait that the wanted number of workers aims at (GET /v1/scale/{namespace}).", gt=0
    )
    bulk_window_s: Positive = _setting(
        86_400,
        "Time in which bulk jobs without a deadline are to end; workers are wanted for it (GET /v1/scale/{namespace}).",
    )

    auth: Literal["auto", "keys", "insecure-no-keys"] = _setting(
        "auto", "When API keys are required: once one exists, always, or never."
    )
    cors_origins: Origins = _setting((), "Origins allowed to call the API from a browser, comma-separated.")
    max_body_bytes: Positive = _setting(1_048_576, "Largest request body but for uploads, bulk requests and images.")
    max_input_bytes: Positive = _setting(20 * 1024 * 1024, "Largest input image or video file.")
    max_input_pixels: Positive = _setting(
        40_000_000, "Most pixels of an input image; the images of a job have at most twice as many in total."
    )
    max_file_bytes: Positive = _setting(200 * 1024 * 1024, "Largest file of `POST /v1/files`.")
    max_adapter_bytes: Positive = _setting(512 * 1024 * 1024, "Largest file of an uploaded or fetched adapter.")
    max_adapters_per_tenant: int = _setting(200, "Uploaded and fetched adapters of one tenant. 0: none.", ge=0)
    max_adapters: Positive = _setting(10_000, "Uploaded and fetched adapters of all tenants.")
    adapter_hosts: HostPatterns = _setting(
        (),
        "Hosts from which jobs can name adapters by URL, and to which these can redirect, comma-separated; "
        "`*.hf.co`: all names below it. Unset: none.",
    )
    adapter_hub_url: HttpUrl = _setting(
        "https://huggingface.co", "Hub of adapters that jobs name by its ids; adapter_hosts must have its host."
    )
    adapter_fetch_timeout_s: float = _setting(
        120.0, "Time for fetching an adapter, and for all of a request.", gt=0, le=600
    )
    adapter_recheck_s: float = _setting(
        3600.0, "Time after which a fetched adapter is compared with its URL again, at the next request.", ge=0
    )
    refuse_networks: Networks = _setting(
        (), "Networks (CIDR) refused in all URLs of clients, comma-separated: public addresses of your own services."
    )
    fetch_timeout_s: float = _setting(15.0, "Timeout for fetching an image URL.", gt=0, le=30)
    fetch_allow_networks: Networks = _setting(
        (), "Private networks (CIDR) allowed in URLs of images and adapters, comma-separated."
    )
    fetch_allow_http: bool = _setting(False, "Allow plain http in URLs of images and adapters.")
    fetch_ports: Ports = _setting((443, 8443), "Ports allowed in URLs of images and adapters, comma-separated.")
    webhook_timeout_s: float = _setting(20.0, "Timeout of one webhook delivery attempt.", gt=0, le=30)
    webhook_allow_networks: Networks = _setting((), "Private networks (CIDR) allowed for webhooks, comma-separated.")
    webhook_allow_loopback: bool = _setting(
        False, "Allow webhooks to this machine, by http and on any port: for development."
    )
    webhook_allow_http: bool = _setting(False, "Allow plain http for webhooks.")
    webhook_ports: Ports = _setting((443, 8443), "Ports allowed for webhooks, comma-separated.")
    output_timeout_s: float = _setting(30.0, "Timeout of one PUT of an output to a URL of its job.", gt=0, le=120)
    output_allow_networks: Networks = _setting((), "Private networks (CIDR) allowed in those URLs, comma-separated.")
    output_allow_http: bool = _setting(False, "Allow plain http in those URLs.")
    output_ports: Ports = _setting((443, 8443), "Ports allowed in those URLs, comma-separated.")
    max_wait_s: Positive = _setting(60, "Longest `wait` of a request.")
    sync_wait_s: Positive = _setting(540, "Longest wait of a synchronous OpenAI or Hugging Face call.")
    disconnect_grace_s: float = _setting(15.0, "Time for a retry after a disconnect, before the job is canceled.", ge=0)
    max_bulk_lines: Positive = _setting(100_000, "Most lines of a bulk request.")
    public_url: HttpUrl | None = _setting(None, "Base of the URLs in responses. Unset: that of the request.")
    max_connections: Positive | None = _setting(
        None, "Connections of an API process. Unset: what its limit of open files allows, at most 11,500."
    )
    max_connections_per_address: Positive | None = _setting(
        None, "The same for one client address. Unset: as many as are free; on this machine unlimited."
    )
    trusted_proxies: Proxies | None = _setting(
        None,
        "Addresses and networks of proxies whose X-Forwarded-For, -Proto, -Host, -Port and -Prefix count, "
        "comma-separated; `*`: all.",
    )
    keep_alive_s: float = _setting(15.0, "How long a connection without a request stays open.", gt=0)
    proxy_keep_alive_s: float = _setting(
        620.0, "The same for trusted proxies: longer than they keep theirs, as they would meet its end.", gt=0
    )
    sse_keepalive_s: float = _setting(15.0, "Interval of keep-alive comments on event streams.", gt=0)

    @field_validator("output_buckets")
    @classmethod
    def _not_the_own_bucket(cls, buckets: tuple[OutputBucket, ...], info: ValidationInfo) -> tuple[OutputBucket, ...]:
        own = info.data.get("s3_bucket")
        if any(entry.bucket == own for entry in buckets):
            raise ValueError(f"{own} is FUSEQUEUE_S3_BUCKET, with the results of all tenants; use another bucket")
        return buckets


def withhold_permissions(settings: Settings) -> None:
    """Let this process and its children create files that only their owner can read, or as `umask` says."""
    os.umask(int(settings.umask, 8))


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
    rows = ["| variable | default | read by | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        shown = "" if default in (None, "") else f"`{default}`"
        rows.append(f"| `{PREFIX}{name.upper()}` | {shown} | {READERS[name]} | {field.description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
