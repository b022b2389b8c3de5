"""References to artifacts of jobs, by which a request names what another job makes."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from shared.job_fields import JobId, first_reason

MAX_ARTIFACT = 9_999
"""Above every number of results; the URLs of artifacts have at most as many digits."""

EXAMPLE = '{"job": "job_...", "artifact": 0}'


class ArtifactRef(BaseModel):
    """An artifact of a job, by its index."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: Annotated[JobId, Field(description="The job that makes it.")]
    artifact: Annotated[int, Field(strict=True, ge=0, le=MAX_ARTIFACT, description="Its index.")] = 0


def _read_source(value: Any) -> Any:
    """Return a text, or the reference of an object; the error is one, not that of each form."""
    if isinstance(value, str | ArtifactRef):
        return value
    if not isinstance(value, dict):
        raise PydanticCustomError("input_source", "it must be a text, or an object such as {form}", {"form": EXAMPLE})
    try:
        return ArtifactRef.model_validate(value)
    except ValidationError as error:
        raise PydanticCustomError("input_source", "{reason}", {"reason": first_reason(error)}) from None


InputSource = Annotated[str | ArtifactRef, BeforeValidator(_read_source)]
"""How a request names an input image, video or sound."""
