"""Request bodies of OpenAI's SDKs: multipart forms as JSON, list parameters, and their OpenAPI description."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile

from api.context import RequestContext
from api.http.lists import MAX_LIMIT, Limit, Order, known_parameters
from api.http.middleware import UPLOAD_TYPES
from api.http.openapi import problems
from api.jobs.request import JobRequest
from api.protocols.openai.server_fields import ALIASES
from shared.errors import InvalidRequest

OVERHEAD_BYTES = 1024 * 1024
"""Allowance of a multipart body for prompt and part headers, next to its files."""

MAX_FIELDS = 128
PLACEHOLDER = "in_" + 32 * "0"
"""Input id of an image that is not stored yet."""

_NAME = re.compile(r"(\w{1,64})((?:\[[^\[\]]{0,64}\])*)")
_PART = re.compile(r"\[([^\[\]]*)\]")
_LISTED = re.compile(r"\[\d{0,3}\]$")
_NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
# Clients in Python write a value as `str` does.
_CONSTANTS = {"true": True, "false": False, "True": True, "False": False, "None": None}
_NO_FILES: Mapping[str, str] = {}


class Form:
    """A form: `values` as JSON, `files` with their names, of lists without `[]` or `[0]`, and `digested`, the parts of
    its digest."""

    def __init__(self, form: FormData, numeric: Collection[str]) -> None:
        texts = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
        self.files = [
            (_LISTED.sub("", name), value)
            for name, value in form.multi_items()
            # A browser sends a file field in which nothing was chosen as an empty file without a name.
            if isinstance(value, UploadFile) and (value.filename or value.size)
        ]
        self.values = parse_form(texts, numeric)
        self.digested = [part.encode("utf-8", "surrogatepass") for item in texts for part in item]

    async def store(self, file: UploadFile, name: str, context: RequestContext) -> str:
        """Store an uploaded image, and return its input id."""
        image = await context.store_upload(file, name)
        self.digested += [name.encode(), image.id.encode()]  # the id is a digest of the file
        return image.id


def numeric_fields(*models: type[BaseModel]) -> frozenset[str]:
    """Return the names and aliases of the fields that are numbers or booleans, also those of other servers and those of
    objects in the fields."""
    names: set[str] = set()
    for model in models:
        for name, field in model.model_fields.items():
            kinds = list(_types(field.annotation))
            names |= numeric_fields(*(kind for kind in kinds if issubclass(kind, BaseModel)))
            if {int, float, bool} & set(kinds):
                choices = getattr(field.validation_alias, "choices", ())
                names |= {name, *(choice for choice in choices if isinstance(choice, str))}
    return frozenset(names | {alias for alias, name in ALIASES.items() if name in names})


def _types(annotation: Any) -> Iterator[type]:
    """Yield the types that an annotation names."""
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def parse_form(items: Iterable[tuple[str, str]], numeric: Collection[str]) -> dict[str, Any]:
    """Return `steps=8`, `tags[]=a`, `metadata[order]=1` and `loras[][id]=a` as the equivalent JSON object.

    Fields in `numeric` become numbers where possible; other values are left to the validation of the body. Raises
    `InvalidRequest` for a field name that cannot be nested.
    """
    body: dict[str, Any] = {}
    for key, text in items:
        match = _NAME.fullmatch(key)
        parts = _PART.findall(match[2]) if match else []
        if match is None or len(parts) > 3:
            raise InvalidRequest(f"unknown field: {key[:64]}", param=key)
        path = [match[1], *parts]
        leaf = next(part for part in reversed(path) if part)
        is_number = leaf in numeric and match[1] != "metadata"
        _insert(body, path, _number(text) if is_number else text, key)
    return body


def _number(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _insert(body: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    """Insert `value` at `path`; an empty part is a list, whose objects are filled in order."""
    name, rest = path[0], path[1:]
    if not rest:
        if name in body:
            raise InvalidRequest(f"repeated field: {key[:64]}", param=key)
        body[name] = value
    elif rest[0]:
        _insert(_container(body, name, dict, key), rest, value, key)
    elif rest == [""]:
        _container(body, name, list, key).append(value)
    else:
        items = _container(body, name, list, key)
        # `a[][id]=1&a[][id]=2&a[][scale]=3`: the first object without this field.
        item = next((item for item in items if isinstance(item, dict) and rest[1] not in item), None)
        if item is None:
            items.append(item := {})
        _insert(item, rest[1:], value, key)


def _container(body: dict[str, Any], name: str, kind: type, key: str) -> Any:
    value = body.setdefault(name, kind())
    if not isinstance(value, kind):
        raise InvalidRequest(f"field is both a value and a list or object: {key[:64]}", param=key)
    return value


def generation_body(
    fields: type[BaseModel],
    *,
    files: Mapping[str, str] = _NO_FILES,
    required: Collection[str] = (),
    forms: Collection[str] = (),
    example: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the OpenAPI of a body with `fields` and those of a job, as JSON and in the media types `forms`.

    `files` are the descriptions of images by the names of their fields, and `required` the fields that a form needs.
    """
    own: dict[str, Any] = {}
    for name, field in fields.model_fields.items():
        facts = {"default": field.default, "description": field.description}
        own[name] = {key: value for key, value in facts.items() if value is not None}
    job = JobRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    needed = [name for name in job["required"] if name != "model"]  # default: the first model
    of_job = job["properties"]
    images = {name: of_job["image"] for name in files if name not in of_job}
    properties = {**of_job, **images, **own}
    schema = {"type": "object", "required": needed, "properties": properties, "additionalProperties": False}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    uploads = {name: {"type": "string", "format": "binary", "description": text} for name, text in files.items()}
    texts = {"prompt": {"type": "string"}, "model": {"type": "string"}, **own}
    for media_type in forms:
        parts = {**uploads, **texts} if media_type in UPLOAD_TYPES else texts
        content[media_type] = {"schema": {"type": "object", "required": [*required], "properties": parts}}
    if example is not None:
        content["application/json"]["example"] = example
    return {"requestBody": {"required": True, "content": content}}


def openai_problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI of errors, as `problems`; those that are 422 elsewhere are 400."""
    responses = problems(*statuses, 400, 422)
    invalid = responses.pop(422)
    responses[400]["description"] += f"; {invalid['description']}"
    return responses


class ListParams(BaseModel):
    """Query parameters of a list."""

    after: str | None = Field(None, max_length=128, description="`last_id` of the previous page.")
    limit: Limit = 20
    order: Order = "desc"

    @property
    def rows(self) -> int:
        return min(self.limit, MAX_LIMIT)


LIST_PARAMETERS = known_parameters(*ListParams.model_fields)


def list_page(rows: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return a page of a list as OpenAI's SDKs read it."""
    return {
        "object": "list",
        "data": list(rows),
        "first_id": rows[0]["id"] if rows else None,
        "last_id": rows[-1]["id"] if rows else None,
        "has_more": has_more,
    }
