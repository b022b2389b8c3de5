"""Errors of a model's code: which fail a job, and after which the device is lost."""

from __future__ import annotations

import pytest
import torch

from shared.errors import InferenceFailed, JobError, OutOfMemory
from worker.engine.errors import as_job_error


def of_device(code: int) -> torch.AcceleratorError:
    """Return an error as torch raises it for a code of CUDA."""
    error = torch.AcceleratorError("injected")
    error.error_code = code  # type: ignore[attr-defined]  # set by torch's C++ code
    return error


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1, InferenceFailed),  # invalid value
        (2, OutOfMemory),
        (9, InferenceFailed),  # invalid configuration
        (701, InferenceFailed),  # too many resources for a launch
        (801, InferenceFailed),  # not supported
    ],
)
def test_a_device_that_can_still_be_used_fails_only_the_job(code: int, expected: type[JobError]) -> None:
    assert type(as_job_error(of_device(code))) is expected


@pytest.mark.parametrize("code", [700, 702, 710, 719, 999])
def test_any_other_code_is_a_lost_device(code: int) -> None:
    """Illegal addresses, timeouts, asserts and failed launches, and unknown codes."""
    error = of_device(code)
    with pytest.raises(torch.AcceleratorError) as raised:
        as_job_error(error)
    assert raised.value is error
