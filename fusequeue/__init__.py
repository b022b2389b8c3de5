"""The Python client of fusequeue.

from fusequeue import Client

with Client() as client:
    job = client.submit("demo", "a red circle on a blue ground, left", seed=7)
    client.download(client.wait(job.id).require_success(), Path("images"))
"""

from fusequeue.aio import AsyncClient, ImageSource
from fusequeue.errors import (
    Busy,
    ClientError,
    Invalid,
    JobFailed,
    NotFound,
    RefusedError,
    Unauthorized,
    Unreachable,
    WaitTimeout,
)
from fusequeue.resources import (
    Artifact,
    BatchingStats,
    DeadLetter,
    Event,
    Failure,
    Job,
    LineResult,
    Metrics,
    Progress,
    QueuePosition,
    Scale,
)
from fusequeue.sync import Client

__all__ = [
    "Artifact",
    "AsyncClient",
    "BatchingStats",
    "Busy",
    "Client",
    "ClientError",
    "DeadLetter",
    "Event",
    "Failure",
    "ImageSource",
    "Invalid",
    "Job",
    "JobFailed",
    "LineResult",
    "Metrics",
    "NotFound",
    "Progress",
    "QueuePosition",
    "RefusedError",
    "Scale",
    "Unauthorized",
    "Unreachable",
    "WaitTimeout",
]
