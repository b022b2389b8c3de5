"""Clients of S3: of AWS, or of another server, which may know neither its checksums nor its trailers."""

from __future__ import annotations

import base64
import hashlib
import os
from typing import Any
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from shared.config.settings import Settings
from shared.errors import ConfigurationError

CONNECTIONS = 16
_ATTEMPTS = 3
_MAX_CONNECT_S = 5.0
_WHEN_SUPPORTED = "when_supported"
_AWS = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws")


class S3Client:
    """A client of boto3 for `endpoint_url`, None: that of boto3's configuration, by default AWS.

    `validates`: whole reads are to be compared with the checksum that the server keeps. boto3 itself validates nothing:
    it compares a range with the checksum of the whole object where a server returns that.
    """

    def __init__(
        self,
        settings: Settings,
        endpoint_url: str | None,
        core: botocore.session.Session,
        connections: int = CONNECTIONS,
    ) -> None:
        try:
            found = endpoint_url or _client(core, settings, None, _WHEN_SUPPORTED).meta.endpoint_url
            own = endpoint_url is None and is_aws(found)
            requests = checksum_mode(settings.s3_checksums, _configured(core, "request_checksum_calculation"), found)
            responses = checksum_mode(settings.s3_checksums, _configured(core, "response_checksum_validation"), found)
            self.client = _client(core, settings, endpoint_url, requests, path_style=not own, connections=connections)
        except BotoCoreError as error:
            raise ConfigurationError(f"configuration of boto3: {error}; correct its AWS_ variables or files") from error
        except ValueError as error:
            raise ConfigurationError(f"FUSEQUEUE_S3_ENDPOINT_URL or its public one: {error}") from error
        self.validates = responses == _WHEN_SUPPORTED
        if not is_aws(found):
            self.client.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)


def is_aws(endpoint_url: str) -> bool:
    """Whether an endpoint is one of AWS, which knows checksums in trailers."""
    return (urlsplit(endpoint_url).hostname or "").endswith(_AWS)


def region(settings: Settings, core: botocore.session.Session) -> str:
    """Return the region of the setting, else of boto3's configuration. Other SDKs of AWS read AWS_REGION, boto3 does
    not."""
    return settings.s3_region or os.environ.get("AWS_REGION") or core.get_config_variable("region") or "us-east-1"


def checksum_mode(setting: str | None, configured: str | None, endpoint_url: str) -> str:
    """Return when checksums are sent or validated: as the setting says, else boto3's configuration, else by endpoint.

    Over https, boto3 sends them as trailers of an `aws-chunked` body. Some servers store its frames in the object,
    others refuse it.
    """
    return setting or configured or (_WHEN_SUPPORTED if is_aws(endpoint_url) else "when_required")


def _configured(core: botocore.session.Session, name: str) -> str | None:
    """Return a value of boto3's variables or files, None if only boto3's default is left."""
    value = os.environ.get(f"AWS_{name.upper()}") or core.get_scoped_config().get(name)
    return None if value is None else value.lower()


def _client(
    core: botocore.session.Session,
    settings: Settings,
    endpoint_url: str | None,
    requests: str,
    *,
    path_style: bool = False,
    connections: int = CONNECTIONS,
) -> Any:
    secret = settings.s3_secret_access_key
    return core.create_client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=region(settings, core),
        aws_access_key_id=settings.s3_access_key_id,
        aws_secret_access_key=None if secret is None else secret.get_secret_value(),
        config=Config(
            connect_timeout=min(_MAX_CONNECT_S, settings.storage_timeout_s),
            read_timeout=settings.storage_timeout_s / 2,  # leaves time for a second attempt
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            max_pool_connections=connections,
            signature_version="s3v4",
            # Bucket names as host names need DNS entries, which only AWS is sure to have.
            s3={"addressing_style": settings.s3_addressing or ("path" if path_style else "auto")},
            request_checksum_calculation=requests,
            response_checksum_validation="when_required",
        ),
    )


def _add_md5(request: Any, **_: Any) -> None:
    """Add the checksum that servers required for deletions before boto3 sent CRC32 instead."""
    digest = hashlib.md5(request.data or b"", usedforsecurity=False).digest()
    request.headers["Content-MD5"] = base64.b64encode(digest).decode("ascii")
