"""An S3 server process for tests."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config


def wait_until_listening(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=10).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"the moto server did not start: {log.read_text()}")


def admin(url: str) -> Any:
    """Return a client; boto3's presigned URLs of the first version would fix the type of what is sent to them."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(signature_version="s3v4"),
    )
