"""The buckets that jobs can name as their destination: S3 buckets of the operator, with the service's credentials."""

from __future__ import annotations

from shared.config.settings import Settings
from shared.errors import NotFound
from shared.storage import Storage


class OutputBuckets:
    """The buckets of `FUSEQUEUE_OUTPUT_BUCKETS`. Makes no request yet."""

    def __init__(self, settings: Settings) -> None:
        self._opened: dict[str, Storage] = {}
        if settings.output_buckets:
            from shared.storage.s3 import S3Storage  # imports boto3

            for bucket in {entry.bucket for entry in settings.output_buckets}:
                own = settings.model_copy(update={"s3_bucket": bucket, "s3_prefix": ""})
                self._opened[bucket] = S3Storage.connect(own)

    def find(self, bucket: str) -> Storage:
        """Return an allowed bucket; raises `NotFound` for one that is no longer allowed."""
        if bucket not in self._opened:
            raise NotFound(f"bucket {bucket!r} is not in FUSEQUEUE_OUTPUT_BUCKETS", public="no such object in storage")
        return self._opened[bucket]

    async def close(self) -> None:
        """Release threads and connections."""
        for storage in self._opened.values():
            await storage.close()
