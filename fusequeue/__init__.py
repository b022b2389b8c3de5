"""The Python client of fusequeue.

from fusequeue import Client

with Client() as client:
    client.run("demo", "a red circle on a blue ground, left", seed=7, folder="images")
"""

from importlib import import_module
from typing import Any

from fusequeue.aio import AsyncClient
from fusequeue.errors import (
    Busy,
    ClientError,
    FieldError,
    Invalid,
    InvalidArgument,
    InvalidDelivery,
    JobFailed,
    JobsFailed,
    NotFound,
    RefusedError,
    Unauthorized,
    UnexpectedResponse,
    Unreachable,
    WaitTimeout,
)
from fusequeue.job_fields import (
    DeliveryState,
    EndpointEventName,
    JobEventName,
    JobPhase,
    JobState,
    OnDeadlineName,
    PriorityName,
    TaskName,
)
from fusequeue.job_handle import AsyncJobHandle, JobHandle, OnProgress
from fusequeue.mapping import Prompt
from fusequeue.params import (
    AdapterParams,
    ControlParams,
    ImageFile,
    ImageSource,
    JobParams,
    OutputParams,
    SchedulerOptionsParams,
    SchedulerParams,
    StepScheduleParams,
    SubmitParams,
)
from fusequeue.resources.adapters import AdapterOptions, AsyncAdapters, UploadedAdapter
from fusequeue.resources.batches import (
    AsyncBatches,
    Batch,
    BatchEndpoint,
    BatchError,
    BatchErrors,
    BatchFailure,
    BatchResponse,
    BatchResult,
    BatchState,
    BatchTimeout,
    RequestCounts,
)
from fusequeue.resources.groups import Group, GroupJobs
from fusequeue.resources.matching import AsyncMatching, Changes, JobFilters, LetterFilters
from fusequeue.resources.operations import (
    AsyncOperations,
    CostCurve,
    CostPoint,
    ModelOnWorker,
    ModelOrder,
    OperatorAction,
    Pause,
)
from fusequeue.resources.usage import UsageJobs, UsageRow
from fusequeue.resources.webhooks import (
    AsyncWebhooks,
    DeliveryAttempt,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookSecret,
)
from fusequeue.response_types import (
    Artifact,
    BatchingStats,
    Event,
    Failure,
    FieldWarning,
    InputImage,
    InputVideo,
    Job,
    JobAdapter,
    JobControl,
    JobOutput,
    JobSchedulerOptions,
    JobStepCache,
    LineFailure,
    LineResult,
    Metrics,
    Progress,
    QueuePosition,
    Result,
)
from fusequeue.service import (
    AdapterInfo,
    ControlInfo,
    DeadLetter,
    Defaults,
    Limits,
    MemoryState,
    Model,
    ModelInput,
    ModelWorkers,
    QueueDepth,
    RefinerInfo,
    Scale,
    StepCacheInfo,
    UnavailableModel,
    WorkerInfo,
)
from fusequeue.sync import Client, SyncAdapters, SyncBatches, SyncMatching, SyncOperations, SyncWebhooks
from fusequeue.webhooks import WebhookEvent

__all__ = [
    "AdapterInfo",
    "AdapterOptions",
    "AdapterParams",
    "Artifact",
    "AsyncAdapters",
    "AsyncBatches",
    "AsyncClient",
    "AsyncJobHandle",
    "AsyncMatching",
    "AsyncOperations",
    "AsyncWebhooks",
    "Batch",
    "BatchEndpoint",
    "BatchError",
    "BatchErrors",
    "BatchFailure",
    "BatchResponse",
    "BatchResult",
    "BatchState",
    "BatchTimeout",
    "BatchingStats",
    "Busy",
    "Changes",
    "Client",
    "ClientError",
    "ControlInfo",
    "ControlParams",
    "CostCurve",
    "CostPoint",
    "DeadLetter",
    "Defaults",
    "DeliveryAttempt",
    "DeliveryState",
    "EndpointEventName",
    "Event",
    "Failure",
    "FieldError",
    "FieldWarning",
    "Group",
    "GroupJobs",
    "ImageFile",
    "ImageSource",
    "InputImage",
    "InputVideo",
    "Invalid",
    "InvalidArgument",
    "InvalidDelivery",
    "Job",
    "JobAdapter",
    "JobControl",
    "JobEventName",
    "JobFailed",
    "JobFilters",
    "JobHandle",
    "JobOutput",
    "JobParams",
    "JobPhase",
    "JobSchedulerOptions",
    "JobState",
    "JobStepCache",
    "JobsFailed",
    "LetterFilters",
    "Limits",
    "LineFailure",
    "LineResult",
    "MemoryState",
    "Metrics",
    "Model",
    "ModelInput",
    "ModelOnWorker",
    "ModelOrder",
    "ModelWorkers",
    "NotFound",
    "OnDeadlineName",
    "OnProgress",
    "OperatorAction",
    "OutputParams",
    "Pause",
    "PriorityName",
    "Progress",
    "Prompt",
    "QueueDepth",
    "QueuePosition",
    "RefinerInfo",
    "RefusedError",
    "RequestCounts",
    "Result",
    "Scale",
    "SchedulerOptionsParams",
    "SchedulerParams",
    "StepCacheInfo",
    "StepScheduleParams",
    "SubmitParams",
    "SyncAdapters",
    "SyncBatches",
    "SyncMatching",
    "SyncOperations",
    "SyncWebhooks",
    "TaskName",
    "Unauthorized",
    "UnavailableModel",
    "UnexpectedResponse",
    "Unreachable",
    "UploadedAdapter",
    "UsageJobs",
    "UsageRow",
    "WaitTimeout",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WebhookEvent",
    "WebhookSecret",
    "WorkerInfo",
]


def __getattr__(name: str) -> Any:
    """Return `Engine` or `AsyncEngine`, which are in the package of the service: they need torch."""
    if name not in ("AsyncEngine", "Engine"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("library"), name)
    except ModuleNotFoundError as error:
        remedy = "pip install 'fusequeue-server[worker]', in a checkout pip install ./fusequeue '.[worker]'"
        raise ImportError(f"{name} needs {error.name}, which is not installed: {remedy}") from error
