"""Errors inside the engine: of fused forwards, of a lost device, and those of a model's or pipeline's own code."""

import torch

from shared.errors import InferenceFailed, JobError, OutOfMemory

# CUDA's error codes after which the device can still be used: an invalid value, no memory, an invalid configuration,
# too many resources for a kernel, and what the device does not support.
USABLE_AFTER = frozenset({1, 2, 9, 701, 801})
OUT_OF_MEMORY_CODE = 2


class StackingError(Exception):
    """The calls, or their output, do not have the form that the rules state."""


class RankLost(Exception):
    """A rank has ended, or the ranks no longer run the same forward: the engine's process must end."""


def as_job_error(error: BaseException) -> JobError:
    """Return what a model's or pipeline's code raised as the error of its job; raises it if a device is lost.

    Such code can raise anything. Also `SystemExit` and `KeyboardInterrupt` concern only its own model: signals reach
    neither the engine's threads nor its process.
    """
    if is_device_lost(error):
        raise error
    if isinstance(error, JobError):
        error.__traceback__ = error.__context__ = None  # its frames hold activations
        return error
    message = f"{type(error).__name__}: {text_of(error)}"[:500]
    return OutOfMemory(message) if is_out_of_memory(error) else InferenceFailed(message)


def is_device_lost(error: BaseException) -> bool:
    """Return whether the device, or that of a rank, is lost for the whole process."""
    if isinstance(error, torch.AcceleratorError):
        return _error_code(error) not in USABLE_AFTER
    return isinstance(error, RankLost)


def text_of(error: BaseException) -> str:
    """Return the message of an error as text that can be encoded; empty if it has none."""
    try:
        text = str(error)
    except BaseException:  # a model can bring its own class
        return ""
    return text.encode("utf-8", "replace").decode()


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _error_code(error) == OUT_OF_MEMORY_CODE:
        return True
    message = text_of(error)
    return "can't allocate memory" in message or "_ALLOC_FAILED" in message


def _error_code(error: BaseException) -> int | None:
    """Return the code of an error of the device; None for any other error."""
    return getattr(error, "error_code", None) if isinstance(error, torch.AcceleratorError) else None
