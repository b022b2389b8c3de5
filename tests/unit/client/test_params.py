"""The client's types, compared with what the service accepts and returns."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import fusequeue
from api import client_types
from api.jobs import job_object as native
from api.jobs.request import JobRequest
from api.protocols.openai.batch_routes import BatchRequest
from api.protocols.openai.objects import BatchObject
from api.routes.adapters import AdapterUpload, UploadedAdapterObject
from api.routes.groups import GroupJobs, GroupObject
from api.routes.job_lists import JobFilters as ServiceFilters
from api.routes.models import ModelObject
from api.routes.operators.dead_letters import DeadLetterObject
from api.routes.operators.dead_letters import LetterFilters as ServiceLetterFilters
from api.routes.operators.keys import KeyObject, KeyRequest, NewKeyObject
from api.routes.operators.operations import ScaleObject
from api.routes.operators.tenants import (
    OwnTenantLimits,
    TenantLimitsChange,
    TenantLimitsObject,
    TenantObject,
    TenantUseObject,
)
from api.routes.webhooks import DeliveryObject, EndpointChange, EndpointObject, EndpointRequest
from fusequeue import job_fields, params, service
from fusequeue.resources.batches import BatchEndpoint, BatchState
from shared.config import (
    adapters,
    candidates,
    controls,
    destinations,
    request_limits,
    scheduler_choices,
    step_schedules,
)
from shared.queue import records

UNTYPED = {"object", "created", "owned_by", "completion_window", "urls", "beat_at_ms"}  # no use to a script


def values(literal: Any) -> set[str]:
    """Return the values of a Literal, also of a union of them."""
    found: set[str] = set()
    for part in get_args(literal):
        found |= {part} if isinstance(part, str) else values(part)
    return found


@pytest.mark.parametrize(
    ("mine", "accepted"),
    [
        (params.JobParams, JobRequest),
        (params.AdapterParams, adapters.AdapterChoice),
        (params.ControlParams, controls.ControlChoice),
        (params.OutputParams, destinations.DestinationChoice),
        (params.StepScheduleParams, step_schedules.StepSchedule),
        (params.BestOfParams, candidates.BestOf),
        (params.SchedulerParams, scheduler_choices.SchedulerChoice),
        (params.SchedulerOptionsParams, scheduler_choices.SchedulerOptions),
        (fusequeue.JobFilters, ServiceFilters),
        (fusequeue.LetterFilters, ServiceLetterFilters),
        (fusequeue.LimitChanges, TenantLimitsChange),
    ],
    ids=lambda kind: kind.__name__,
)
def test_the_arguments_are_the_fields_that_the_service_accepts(mine: type, accepted: type[BaseModel]) -> None:
    names = set(mine.__annotations__)
    if mine is params.JobParams:
        names |= {"model", "prompt"}  # arguments of their own
    if mine is fusequeue.JobFilters:
        names = names - {"metadata"} | {"status"}  # `metadata.KEY=VALUE`, and an argument of its own
    assert names == accepted.model_fields.keys()


def test_the_generated_fields_and_values_are_current() -> None:
    written = Path(job_fields.__file__).read_text("utf-8")
    assert written == f"{client_types.source()}\n", "run python -m api.client_types > fusequeue/job_fields.py"


@pytest.mark.parametrize(
    ("mine", "returned"),
    [
        (fusequeue.Job, native.JobObject),
        (fusequeue.Artifact, native.ArtifactObject),
        (fusequeue.Model, ModelObject),
        (fusequeue.Defaults, request_limits.Defaults),
        (fusequeue.Limits, request_limits.Limits),
        (fusequeue.Batch, BatchObject),
        (fusequeue.Group, GroupObject),
        (fusequeue.GroupJobs, GroupJobs),
        (fusequeue.WebhookEndpoint, EndpointObject),
        (fusequeue.WebhookDelivery, DeliveryObject),
        (fusequeue.UploadedAdapter, UploadedAdapterObject),
        (fusequeue.Scale, ScaleObject),
        (fusequeue.DeadLetter, DeadLetterObject),
        (fusequeue.ApiKey, KeyObject),
        (fusequeue.NewApiKey, NewKeyObject),
        (fusequeue.Tenant, TenantObject),
        (fusequeue.TenantLimits, TenantLimitsObject),
        (fusequeue.TenantUse, TenantUseObject),
        (fusequeue.OwnTenantLimits, OwnTenantLimits),
        (service.QueueDepth, records.QueueDepth),
        (service.WorkerInfo, records.WorkerInfo),
    ],
    ids=lambda kind: kind.__name__,
)
def test_the_fields_are_those_that_the_service_returns(mine: type[BaseModel], returned: Any) -> None:
    """Other fields are there when a program runs, but a type checker does not know them."""
    names = set(getattr(returned, "model_fields", None) or returned.__dataclass_fields__)
    assert mine.model_fields.keys() == names - UNTYPED


def test_an_endpoint_is_created_and_changed_by_all_its_fields() -> None:
    create = inspect.signature(fusequeue.AsyncWebhooks.create).parameters.keys()
    assert create - {"self"} == EndpointRequest.model_fields.keys()
    update = inspect.signature(fusequeue.AsyncWebhooks.update).parameters.keys()
    assert update - {"self", "endpoint"} == EndpointChange.model_fields.keys()


def test_a_key_is_created_with_all_its_fields_and_scopes() -> None:
    create = inspect.signature(fusequeue.AsyncKeys.create).parameters.keys()
    assert create - {"self"} == KeyRequest.model_fields.keys()
    assert values(fusequeue.KeyScope) == values(get_args(KeyRequest.model_fields["scopes"].annotation)[0])


def test_an_adapter_is_uploaded_with_all_its_fields() -> None:
    assert fusequeue.AdapterOptions.__annotations__.keys() | {"model"} == AdapterUpload.model_fields.keys()


def test_a_batch_can_be_of_every_endpoint_and_in_every_state() -> None:
    assert values(BatchState) == values(BatchObject.model_fields["status"].annotation)
    assert values(BatchEndpoint) == values(BatchRequest.model_fields["endpoint"].annotation)


def test_everything_public_is_documented() -> None:
    undocumented = []
    for name in fusequeue.__all__:
        public = getattr(fusequeue, name)
        if not inspect.isclass(public):
            continue  # an alias of a type
        undocumented += [] if public.__doc__ else [name]
        own = [kind for kind in public.__mro__ if kind.__module__.startswith("fusequeue")]
        for member, value in (item for kind in own for item in vars(kind).items()):
            is_method = inspect.isfunction(value) or isinstance(value, property)
            if not member.startswith("_") and is_method and not value.__doc__:
                undocumented.append(f"{name}.{member}")
    assert undocumented == []
