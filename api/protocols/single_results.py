"""Requests of protocols whose responses have one video or sound."""

from api.jobs.request import JobRequest
from shared.errors import InvalidRequest
from shared.tasks import Medium, Task


def check_single(request: JobRequest, task: Task) -> None:
    """Raise `InvalidRequest` for several results of a task whose responses have the first one."""
    if request.n > 1 and task.medium is not Medium.IMAGE:
        message = f"n: a response of this protocol has one {task.medium.value}; send {request.n} requests"
        raise InvalidRequest(message, param="n")
