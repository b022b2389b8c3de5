"""`not_before` of a job for later: when it is due, as a time or as a delay from its submit."""

from datetime import datetime
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

MAX_WAIT_S = 30 * 86_400
"""From the submit of a job for later to when it is due."""


def due_ms(start: str | float, submitted_at_ms: int) -> int:
    """Return when a job is due, in ms since the epoch."""
    return _time_ms(start) if isinstance(start, str) else submitted_at_ms + round(1000 * start)


def _time_ms(text: str) -> int:
    """Return an ISO 8601 time with its zone in ms since the epoch; raises `ValueError`."""
    moment = datetime.fromisoformat(text)
    if "T" not in text or moment.tzinfo is None:
        raise ValueError("without a time of day, or without its zone")
    return round(1000 * moment.timestamp())


def _time(text: str) -> str:
    _time_ms(text)
    return text


def _in_one_form(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Refuse what is neither a time nor a delay with one error, not with that of each form."""
    try:
        return validate(value)
    except ValidationError:
        message = (
            "it must be an ISO 8601 time with its zone, such as 2026-01-31T22:00:00Z, or a number of seconds from 0 to "
            "{most} ({days} days)"
        )
        limits = {"most": MAX_WAIT_S, "days": MAX_WAIT_S // 86_400}
        raise PydanticCustomError("start_time", message, limits) from None


Time: TypeAlias = Annotated[str, Field(max_length=40), AfterValidator(_time)]
Delay: TypeAlias = Annotated[float, Field(strict=True, ge=0, le=MAX_WAIT_S)]
StartTime: TypeAlias = Annotated[Time | Delay, WrapValidator(_in_one_form)]
