"""Destinations: where the artifacts of a job go instead of the service's storage, and the buckets for that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from shared.errors import InvalidRequest

MAX_PUT_URL_CHARS = 4096
"""Presigned URLs of temporary credentials contain their session token."""

MAX_PUT_URLS = 256
MAX_PREFIX_CHARS = 256
BUCKETS_SCHEME = "s3"

_PREFIX = r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*"  # as keys of the storage
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_ENTRY = re.compile(rf"((?P<tenant>[a-z0-9][a-z0-9_-]{{0,62}})=)?(?P<bucket>{_BUCKET})(/(?P<prefix>{_PREFIX}))?/?")

PutUrl = Annotated[str, Field(min_length=1, max_length=MAX_PUT_URL_CHARS)]


@dataclass(frozen=True)
class OutputBucket:
    """A bucket that jobs can name, below `prefix`. Without a `tenant` it is for all, each below its own name."""

    bucket: str
    prefix: str = ""
    tenant: str | None = None

    @classmethod
    def parse(cls, entry: str) -> OutputBucket:
        """Return the bucket of a setting's entry, or raise `ValueError`."""
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"invalid entry: {entry[:80]!r}; use BUCKET, BUCKET/PREFIX or TENANT=BUCKET/PREFIX")
        return cls(match["bucket"], match["prefix"] or "", match["tenant"])

    def root_of(self, tenant: str) -> str | None:
        """Return the prefix below which a tenant can write, None if it cannot."""
        if self.tenant is None:
            return _joined(self.prefix, tenant)
        return self.prefix if self.tenant == tenant else None


class DestinationChoice(BaseModel):
    """Where the artifacts of a job go instead of the service's storage: to `put_url`, `put_urls` or `bucket`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    put_url: PutUrl | None = Field(
        None, repr=False, description="A presigned https URL that receives the only output with a PUT."
    )
    put_urls: tuple[PutUrl, ...] | None = Field(
        None, repr=False, min_length=1, max_length=MAX_PUT_URLS, description="One for each output, in their order."
    )
    bucket: str | None = Field(None, max_length=63, description="A bucket that the operator allows.")
    prefix: str | None = Field(
        None, max_length=MAX_PREFIX_CHARS, description="Of the keys in `bucket`. Unset: the one that the tenant has."
    )

    @model_validator(mode="after")
    def _names_one_place(self) -> DestinationChoice:
        if sum(place is not None for place in (self.put_url, self.put_urls, self.bucket)) != 1:
            raise PydanticCustomError("output", "send one of put_url, put_urls and bucket")
        if self.prefix is not None and self.bucket is None:
            raise PydanticCustomError("output", "prefix needs a bucket")
        return self

    @property
    def urls(self) -> dict[str, str]:
        """PUT URLs by field path."""
        if self.put_url is not None:
            return {"output.put_url": self.put_url}
        return {f"output.put_urls.{index}": url for index, url in enumerate(self.put_urls or ())}

    def fault(self, outputs: int) -> str | None:
        """Return what is wrong with the PUT URLs of a job with so many outputs."""
        urls = tuple(self.urls.values())
        if urls and len(urls) != outputs:
            return f"{len(urls)} PUT URLs for {outputs} outputs; send one for each"
        return "two outputs have the same PUT URL; send one for each" if len(set(urls)) < len(urls) else None


class Destination(BaseModel):
    """Where the artifacts of a job go: to a presigned URL each, which are secrets, or into a bucket."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    put_urls: tuple[str, ...] = Field(default=(), repr=False)
    bucket: str | None = None
    prefix: str = ""

    def key(self, name: str) -> str:
        """Return the key of a file in the bucket; its name for a URL."""
        return _joined(self.prefix, name)

    def location(self, key: str, index: int) -> str:
        """Return where output `index` is; of a URL without its signature."""
        return f"{BUCKETS_SCHEME}://{self.bucket}/{key}" if self.bucket else without_signature(self.put_urls[index])

    def without_signatures(self) -> Destination:
        """Return what clients see."""
        return self.model_copy(update={"put_urls": tuple(map(without_signature, self.put_urls))})

    def param(self, index: int) -> str:
        """Return the request field that names the place of output `index`."""
        if self.bucket:
            return "output.bucket"
        return "output.put_url" if len(self.put_urls) == 1 else f"output.put_urls.{index}"


def without_signature(url: str) -> str:
    """Return a URL without its query, which can hold a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def bucket_of(location: str) -> str | None:
    """Return the bucket of an artifact's location, None for a URL."""
    parts = urlsplit(location)
    return parts.netloc if parts.scheme == BUCKETS_SCHEME else None


def resolve_destination(
    choice: DestinationChoice | None, tenant: str, allowed: Sequence[OutputBucket]
) -> Destination | None:
    """Return the destination of a job, or raise `InvalidRequest` for a bucket or prefix that its tenant cannot use."""
    if choice is None:
        return None
    if choice.bucket is None:
        return Destination(put_urls=tuple(choice.urls.values()))
    entries = (entry.root_of(tenant) for entry in allowed if entry.bucket == choice.bucket)
    roots = [root for root in entries if root is not None]
    if not roots:
        message = f"output.bucket: not allowed: {choice.bucket!r}; the operator allows buckets for each tenant"
        raise InvalidRequest(message, param="output.bucket")
    prefix = roots[0] if choice.prefix is None else choice.prefix.removesuffix("/")
    if prefix and not re.fullmatch(_PREFIX, prefix):
        message = f"output.prefix: invalid: {prefix!r}; use letters, digits, '_', '-' and '.', with '/' between parts"
        raise InvalidRequest(message, param="output.prefix")
    if not any(not root or prefix == root or prefix.startswith(f"{root}/") for root in roots):
        message = f"output.prefix: not allowed: {prefix!r}; begin with {' or '.join(f'{root}/' for root in roots)}"
        raise InvalidRequest(message, param="output.prefix")
    return Destination(bucket=choice.bucket, prefix=prefix)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
