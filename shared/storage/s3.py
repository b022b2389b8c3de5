"""Storage in an S3 bucket, of AWS or another server."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

import botocore.session
from botocore.exceptions import BotoCoreError, ClientError, FlexibleChecksumError, NoCredentialsError

from shared.config.settings import Settings
from shared.errors import ConfigurationError, NotFound, StorageRefused, StorageUnavailable
from shared.storage import CHUNK_BYTES, NO_RESPONSE, ObjectInfo, check_key, check_prefix, range_length
from shared.storage.grouped_deletions import MOST_KEYS, GroupedDeletions
from shared.storage.s3_client import CONNECTIONS, S3Client
from shared.storage.threads import NoResponse, StorageThreads

T = TypeVar("T")

_MAX_PRESIGNED_S = 604_800  # of a signature of version 4
_PROBES = 1000
"""Names of probes: processes that check at the same time would delete each other's, and a killed one leaves one."""

_PROBE_BYTES = bytes(range(256)) * 4
_PROBE_RANGE = (300, 400)
_MISMATCH_S = 60.0
"""Time until a server that stores other bytes is written again: a versioned bucket keeps each probe."""

_ACCESS_DENIED = "storage: access denied"
_MISSING = {"NoSuchKey", "404", "NotFound"}
_DENIED = {"AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
# Refusals that a repetition, the operator or new credentials can change, though their status is 4xx.
_PASSING_STATUSES = {401, 403, 404, 407, 408, 409, 425, 429}
_PASSING = {
    "AuthorizationHeaderMalformed",
    "BadDigest",
    "IncompleteBody",
    "InvalidToken",
    "RequestTimeout",
    "TokenRefreshRequired",
    "XAmzContentSHA256Mismatch",
}
_LASTING = {"InvalidObjectState"}  # its status is 403: an archived object


class S3Storage:
    """Objects of one bucket; `timeout_s` limits each request with its retries, a write also by its size.

    boto3 blocks, so its calls run in a thread pool, which can share a client.
    """

    def __init__(
        self, opened: S3Client, presigner: Any, *, bucket: str, prefix: str, timeout_s: float, connections: int
    ) -> None:
        self._client = opened.client
        self._validates = opened.validates
        self._presigner = presigner
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._probe = secrets.randbelow(_PROBES)
        self._probe_written = False
        self._mismatch, self._mismatch_until_s = "", 0.0
        self._threads = StorageThreads(connections, "s3-storage", timeout_s)
        self._deletions = GroupedDeletions(
            lambda keys: self._threads.run(lambda: self._delete_keys(keys)), _is_fault_of_a_key
        )

    @classmethod
    def connect(cls, settings: Settings, requests: int | None = None) -> S3Storage:
        """Create the clients, or raise `ConfigurationError`; makes no request yet."""
        assert settings.s3_bucket is not None
        if (settings.s3_access_key_id is None) != (settings.s3_secret_access_key is None):
            raise ConfigurationError(
                "one of FUSEQUEUE_S3_ACCESS_KEY_ID and FUSEQUEUE_S3_SECRET_ACCESS_KEY is missing: set both, or none"
            )
        core, public = botocore.session.Session(), settings.s3_public_endpoint_url
        connections = requests or CONNECTIONS
        opened = S3Client(settings, settings.s3_endpoint_url, core, connections)
        return cls(
            opened,
            opened.client if public is None else S3Client(settings, public, core).client,
            bucket=settings.s3_bucket,
            prefix=settings.s3_prefix,
            timeout_s=settings.storage_timeout_s,
            connections=connections,
        )

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        name = self._name(key)

        def put() -> None:
            self._client.put_object(Bucket=self._bucket, Key=name, Body=data, ContentType=content_type)

        await self._translated(self._threads.write(key, (data, content_type), put))

    async def head(self, key: str) -> ObjectInfo:
        name = self._name(key)
        head = await self._run(lambda: self._client.head_object(Bucket=self._bucket, Key=name))
        return ObjectInfo(head["ContentLength"], head["ContentType"], head["ETag"].strip('"'))

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        name, size = self._name(key), range_length(start, end)
        if size == 0:
            await self.head(key)
            return b""
        if size is None or size > CHUNK_BYTES:
            return b"".join([chunk async for chunk in self.stream(key, start, end)])

        return await self._run(lambda: self._read(name, start, end))

    async def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        name, size = self._name(key), range_length(start, end)
        if size == 0:
            await self.head(key)
            return
        body = await self._run(lambda: self._open(name, start, end))
        if body is None:
            return
        try:
            while chunk := await self._run(lambda: body.read(CHUNK_BYTES)):
                yield chunk
        finally:
            self._threads.close_soon(body)

    async def delete_prefix(self, prefix: str) -> int:
        name = self._prefix + check_prefix(prefix)
        count, token = 0, None
        while True:
            keys, token = await self._run(lambda: self._list_page(name, token))  # noqa: B023 - awaited here
            if keys:
                await self._translated(self._deletions.delete(keys))
            count += len(keys)
            if token is None:
                return count

    async def presigned_url(self, key: str, expires_s: int) -> str | None:
        params, valid_s = {"Bucket": self._bucket, "Key": self._name(key)}, min(expires_s, _MAX_PRESIGNED_S)
        url: str = await self._run(
            lambda: self._presigner.generate_presigned_url("get_object", Params=params, ExpiresIn=valid_s)
        )
        return url

    async def check(self, *, writes: bool = True) -> None:
        written, self._probe_written = self._probe_written, False
        try:
            await self._run(lambda: self._client.head_bucket(Bucket=self._bucket))
        except NotFound as error:
            raise self._no_bucket() from error
        if writes and not written:
            await self._check_bytes()
        self._probe_written = written or writes

    async def _check_bytes(self) -> None:
        """Write an object, read it whole and in part, and delete it; raise `StorageUnavailable` if it has changed."""
        if time.monotonic() >= self._mismatch_until_s:
            try:
                try:
                    found = await self._run(self._round_trip)
                except NotFound:  # another process, with the same name, has deleted it
                    self._probe = (self._probe + 1 + secrets.randbelow(_PROBES - 1)) % _PROBES
                    found = await self._run(self._round_trip)
            except NotFound as error:
                raise StorageUnavailable(
                    f"{self._location} has not kept an object that it was sent; see the server",
                    public="storage: does not keep what it is sent",
                ) from error
            self._mismatch = _mismatch(*found)
            self._mismatch_until_s = time.monotonic() + _MISMATCH_S if self._mismatch else 0.0
        if self._mismatch:
            raise StorageUnavailable(
                f"{self._location} {self._mismatch}; set FUSEQUEUE_S3_CHECKSUMS=when_required, or see the server and "
                "the proxies before it",
                public="storage: returns other bytes than it was sent",
            )

    def _round_trip(self) -> tuple[bytes, bytes]:
        """Return an object and a range of it as they are read after a write, and delete the object."""
        name = self._name(f"health/probe-{self._probe:03d}")
        self._client.put_object(Bucket=self._bucket, Key=name, Body=_PROBE_BYTES)
        try:
            return self._read(name, 0, None), self._read(name, *_PROBE_RANGE)
        finally:
            keys, _ = self._list_page(name, None)
            for error in self._delete_keys(keys).values() if keys else ():
                raise error

    async def close(self) -> None:
        self._threads.close()
        self._client.close()
        self._presigner.close()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _read(self, name: str, start: int, end: int | None) -> bytes:
        body = self._open(name, start, end)
        if body is None:
            return b""
        with closing(body):
            data: bytes = body.read()
            return data

    def _open(self, name: str, start: int, end: int | None) -> Any:
        """Return the stream of the body, or None if the range starts beyond the end."""
        headers = {"ChecksumMode": "ENABLED"} if self._validates else {}
        if start != 0 or end is not None:  # some servers return the checksum of the whole object
            headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        try:
            return self._client.get_object(Bucket=self._bucket, Key=name, **headers)["Body"]
        except ClientError as error:
            if error.response["Error"]["Code"] in {"InvalidRange", "416"}:
                return None
            raise

    def _list_page(self, name: str, token: str | None) -> tuple[list[str], str | None]:
        """Return one page of the objects at or below a name, and the token of the next page, None after the last."""
        after = {} if token is None else {"ContinuationToken": token}
        page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=name, MaxKeys=MOST_KEYS, **after)
        names = [entry["Key"] for entry in page.get("Contents", ())]
        keys = [found for found in names if found == name or found.startswith(f"{name}/")]
        return keys, page.get("NextContinuationToken")

    def _delete_keys(self, keys: list[str]) -> dict[str, Exception]:
        """Delete objects, and return the error of each that is left, or raise one that names none of them."""
        objects = [{"Key": key} for key in keys]
        response = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
        errors: dict[str, Exception] = {}
        for fault in response.get("Errors", ()):
            named = {"Code": fault.get("Code", "Unknown"), "Message": fault.get("Message", "")}
            if (key := fault.get("Key")) not in keys:
                raise _UnnamedFault({"Error": named}, "DeleteObjects")
            errors[key] = ClientError({"Error": named}, "DeleteObjects")
        return errors

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._translated(self._threads.run(work))

    async def _translated(self, call: Awaitable[T]) -> T:
        """Await a call and raise its errors as those of storage."""
        try:
            return await call
        except NoResponse as error:
            raise StorageUnavailable(
                f"{self._location} did not respond {error}; check the network and the server, "
                "or raise FUSEQUEUE_STORAGE_TIMEOUT_S",
                public=NO_RESPONSE,
            ) from error
        except ClientError as error:
            raise await self._response_error(error) from error
        except NoCredentialsError as error:
            raise StorageUnavailable(
                f"{self._location}: no credentials; set FUSEQUEUE_S3_ACCESS_KEY_ID and FUSEQUEUE_S3_SECRET_ACCESS_KEY",
                public=_ACCESS_DENIED,
            ) from error
        except FlexibleChecksumError as error:
            raise StorageRefused(  # it is damaged at each read
                f"{self._location} returned a damaged object: {error}; see the server and the proxies before it",
                public="storage: returned a damaged object",
            ) from error
        except BotoCoreError as error:
            raise StorageUnavailable(
                f"cannot reach {self._location}: {error}; check FUSEQUEUE_S3_ENDPOINT_URL and the server",
                public="storage: cannot be reached",
            ) from error

    async def _response_error(self, error: ClientError) -> NotFound | StorageUnavailable:
        code = error.response.get("Error", {}).get("Code", "")
        if code == "NoSuchBucket":
            return self._no_bucket()
        if code in _MISSING:
            # The response to HEAD has no body, so a missing bucket looks like a missing object.
            return self._no_bucket() if await self._bucket_is_missing() else NotFound("no such object in storage")
        if code in _DENIED:
            return StorageUnavailable(
                f"{self._location}: {code}; check FUSEQUEUE_S3_ACCESS_KEY_ID and its "
                "permission to list, read, write and delete",
                public=_ACCESS_DENIED,
            )
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _LASTING or (400 <= status < 500 and status not in _PASSING_STATUSES and code not in _PASSING):
            return StorageRefused(
                f"{self._location} refused {error.operation_name} with {code or status}: "
                f"{error.response.get('Error', {}).get('Message', '')[:200]}",
                public=f"storage: refuses the request with {code or status}",
            )
        return StorageUnavailable(
            f"{self._location} responded with {code or 'an error'}; see the server's log",
            public="storage: responds with an error",
        )

    async def _bucket_is_missing(self) -> bool:
        try:
            await self._threads.run(lambda: self._client.head_bucket(Bucket=self._bucket))
        except ClientError as error:
            return error.response.get("Error", {}).get("Code", "") in _MISSING | {"NoSuchBucket"}
        except (BotoCoreError, NoResponse):
            return False
        return False

    def _no_bucket(self) -> StorageUnavailable:
        return StorageUnavailable(
            f"{self._location} does not exist; create the bucket or set FUSEQUEUE_S3_BUCKET",
            public="storage: there is no bucket",
        )

    @property
    def _location(self) -> str:
        return f"bucket {self._bucket!r} at {self._client.meta.endpoint_url}"


class _UnnamedFault(ClientError):  # type: ignore[misc]
    """An object could not be deleted, and the server does not say which."""


def _is_fault_of_a_key(error: Exception) -> bool:
    """Return whether a request was refused as it is, or in a part: one with fewer keys can be accepted."""
    if isinstance(error, _UnnamedFault):
        return True
    if not isinstance(error, ClientError):
        return False
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return 400 <= status < 500 and status not in _PASSING_STATUSES


def _mismatch(whole: bytes, part: bytes) -> str:
    """Return how a probe differs from what was written, "" if it does not."""
    first, end = _PROBE_RANGE
    if whole != _PROBE_BYTES:
        return f"stored other bytes than it was sent: {whole[:16]!r}..., {len(whole)} instead of {len(_PROBE_BYTES)}"
    if part != _PROBE_BYTES[first:end]:
        return f"returned other bytes for a range of an object: {len(part)} instead of {end - first}"
    return ""
