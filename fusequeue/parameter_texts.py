"""The parameters of jobs in the texts that `help()` and notebooks show."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from fusequeue import job_fields, params

F = TypeVar("F", bound=Callable[..., Any])


def with_parameters(method: F) -> F:
    """Append the parameters of a job to the docstring of a method that takes them."""
    method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\nParameters of a job:\n\n{_parameters()}"
    return method


@cache
def _parameters() -> str:
    """Return each parameter with its type and text, as the source has them: typed dictionaries keep no texts."""
    fields = [
        field
        for module, name in ((job_fields, "SentFields"), (params, "JobParams"), (params, "SubmitParams"))
        for field in _fields(module, name)
    ]
    return "\n".join(fields)


def _fields(module: Any, name: str) -> list[str]:
    try:
        source = inspect.getsource(module)
    except OSError:  # installed without its source
        return []
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name).body
    return [
        _line(node, following)
        for node, following in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign)
    ]


def _line(field: ast.AnnAssign, following: ast.stmt | None) -> str:
    """Return a field, and the text that follows it."""
    text = ""
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        text = " ".join(str(following.value.value).split())
    head = f"{ast.unparse(field.target)}: {ast.unparse(field.annotation).removesuffix(' | None')}"
    return head if not text else f"{head}\n{textwrap.fill(text, 100, initial_indent='    ', subsequent_indent='    ')}"
