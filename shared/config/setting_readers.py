"""Which processes read each setting: the column "read by" in `docs/operations/settings.md`."""

from __future__ import annotations

from collections.abc import Mapping

_ALL = "api, worker, chores, cli"
_API_WORKER_CHORES = "api, worker, chores"

_GROUPS = {
    _ALL: """
        redis_url namespace models batch_rules umask
        storage_dir s3_bucket s3_endpoint_url s3_public_endpoint_url s3_region s3_addressing s3_checksums
        s3_access_key_id
        s3_secret_access_key
        s3_prefix storage_timeout_s
    """,
    _API_WORKER_CHORES: """
        log_level traces refuse_networks max_input_pixels output_buckets output_allow_networks output_allow_http
        output_ports
        retention_s input_retention_s usage_retention_days idempotency_s max_queued_jobs max_queued_jobs_per_tenant
        max_device_seconds_per_day_per_tenant max_device_seconds_per_month_per_tenant
        max_running_slots_per_tenant max_kept_jobs_per_tenant max_record_bytes_per_tenant max_stored_objects_per_tenant
        max_stored_bytes_per_tenant max_checkpoint_bytes max_attempts lease_ms overdue_ms bulk_share
        interactive_allowance_s aging_ms sync_wait_s
    """,
    "api, chores": """
        presign_expires_s file_retention_s max_body_bytes max_input_bytes fetch_timeout_s fetch_allow_networks
        fetch_allow_http fetch_ports webhook_allow_networks webhook_allow_loopback webhook_allow_http
        webhook_ports public_url max_adapter_bytes max_adapters_per_tenant max_adapters adapter_hosts adapter_hub_url
        adapter_fetch_timeout_s adapter_recheck_s
    """,
    "api, cli": "auth",
    "worker, cli": "drain_timeout_s torch_threads",
    "chores": "rq_redis_url webhook_timeout_s",
    "worker": """
        worker_pool max_preempted_rows stall_factor stall_floor_s load_retry_s spool_bytes gpu_memory_bytes
        cpu_memory_bytes adapter_memory_bytes adapter_folder_bytes device worker_port worker_host
        output_timeout_s
    """,
    "api": """
        api_metrics_port api_metrics_host target_wait_s bulk_window_s cors_origins max_file_bytes
        max_requests_per_minute_per_tenant max_wait_s disconnect_grace_s max_bulk_lines
        max_connections max_connections_per_address trusted_proxies keep_alive_s
        proxy_keep_alive_s sse_keepalive_s
    """,
}

READERS: Mapping[str, str] = {name: readers for readers, names in _GROUPS.items() for name in names.split()}
"""By setting, as the column shows them."""
