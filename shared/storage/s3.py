"""Storage in an S3 bucket, of AWS or another server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from shared.config.settings import Settings
from shared.errors import ConfigurationError, NotFound, StorageRefused, StorageUnavailable
from shared.storage import CHUNK_BYTES, NO_RESPONSE, ObjectInfo, check_key, check_prefix, range_length
from shared.storage.threads import NoResponse, StorageThreads

T = TypeVar("T")

_THREADS = 16
_ATTEMPTS = 3
_MAX_CONNECT_S = 5.0
_PAGE_KEYS = 1000  # the most that S3 lists or deletes per request
_MAX_PRESIGNED_S = 604_800  # of a signature of version 4
_PROBE = "health/probe"
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

    def __init__(self, client: Any, presigner: Any, *, bucket: str, prefix: str, timeout_s: float) -> None:
        self._client = client
        self._presigner = presigner
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._probe_written = False
        self._threads = StorageThreads(_THREADS, "s3-storage", timeout_s)

    @classmethod
    def connect(cls, settings: Settings) -> S3Storage:
        """Create the clients, or raise `ConfigurationError`; makes no request yet."""
        assert settings.s3_bucket is not None
        if (settings.s3_access_key_id is None) != (settings.s3_secret_access_key is None):
            raise ConfigurationError(
                "one of FUSEQUEUE_S3_ACCESS_KEY_ID and FUSEQUEUE_S3_SECRET_ACCESS_KEY is missing: set both, or none"
            )
        session = boto3.session.Session()
        public = settings.s3_public_endpoint_url
        try:
            client = _client(session, settings, settings.s3_endpoint_url)
            presigner = client if public is None else _client(session, settings, public)
        except ValueError as error:
            raise ConfigurationError(f"FUSEQUEUE_S3_ENDPOINT_URL or its public one: {error}") from error
        return cls(
            client,
            presigner,
            bucket=settings.s3_bucket,
            prefix=settings.s3_prefix,
            timeout_s=settings.storage_timeout_s,
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

        def read() -> bytes:
            body = self._open(name, start, end)
            if body is None:
                return b""
            with closing(body):
                data: bytes = body.read()
                return data

        return await self._run(read)

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
            deleted, token = await self._run(lambda: self._delete_page(name, token))  # noqa: B023 - awaited here
            count += deleted
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

        def probe() -> None:
            self._client.head_bucket(Bucket=self._bucket)
            if written or not writes:
                return
            name = self._prefix + _PROBE
            self._client.put_object(Bucket=self._bucket, Key=name, Body=b"")
            self._client.delete_object(Bucket=self._bucket, Key=name)

        try:
            await self._run(probe)
        except NotFound as error:
            raise self._no_bucket() from error
        self._probe_written = written or writes

    async def close(self) -> None:
        self._threads.close()
        self._client.close()
        self._presigner.close()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _open(self, name: str, start: int, end: int | None) -> Any:
        """Return the stream of the body, or None if the range starts beyond the end."""
        headers = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        try:
            return self._client.get_object(Bucket=self._bucket, Key=name, **headers)["Body"]
        except ClientError as error:
            if error.response["Error"]["Code"] in {"InvalidRange", "416"}:
                return None
            raise

    def _delete_page(self, name: str, token: str | None) -> tuple[int, str | None]:
        """Delete one page of objects; returns their number and the token of the next page, None after the last."""
        after = {} if token is None else {"ContinuationToken": token}
        page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=name, MaxKeys=_PAGE_KEYS, **after)
        names = [entry["Key"] for entry in page.get("Contents", ())]
        keys = [{"Key": found} for found in names if found == name or found.startswith(f"{name}/")]
        if keys:
            response = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            for fault in response.get("Errors", ()):
                raise ClientError({"Error": {"Code": fault["Code"], "Message": fault["Message"]}}, "DeleteObjects")
        return len(keys), page.get("NextContinuationToken")

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


def _client(session: boto3.session.Session, settings: Settings, endpoint_url: str | None) -> Any:
    secret = settings.s3_secret_access_key
    return session.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=settings.s3_region,
        aws_access_key_id=settings.s3_access_key_id,
        aws_secret_access_key=None if secret is None else secret.get_secret_value(),
        config=Config(
            connect_timeout=min(_MAX_CONNECT_S, settings.storage_timeout_s),
            read_timeout=settings.storage_timeout_s / 2,  # leaves time for a second attempt
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            max_pool_connections=_THREADS,
            signature_version="s3v4",
            # Bucket names as host names need DNS entries, which only AWS is sure to have.
            s3={"addressing_style": "auto" if endpoint_url is None else "path"},
            request_checksum_calculation="when_supported",
            response_checksum_validation="when_supported",
        ),
    )
