"""The events to which webhook endpoints can subscribe: those of jobs, and those of protocols."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from api.protocols.chore_parts import CHORE_PARTS
from shared.webhooks import EVENTS

ENDPOINT_EVENTS: Mapping[str, str] = {
    **{name: state.value for name, state in EVENTS.items()},
    **{name: name for part in CHORE_PARTS for name in part.events},
}
"""Names of events as clients write them, and as the queue does."""

_NAMES = {written: name for name, written in ENDPOINT_EVENTS.items()}


def event_names(written: tuple[str, ...]) -> list[str]:
    """Return the names of events as clients write them."""
    return [_NAMES.get(name, name) for name in written]


def _known(name: str) -> str:
    if name not in ENDPOINT_EVENTS:
        raise PydanticCustomError("event", "it must be one of {names}", {"names": ", ".join(ENDPOINT_EVENTS)})
    return name


EndpointEventName = Annotated[
    str, AfterValidator(_known), Field(json_schema_extra={"enum": [str(name) for name in ENDPOINT_EVENTS]})
]
