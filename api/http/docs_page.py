"""`/docs`: the OpenAPI document as one HTML page, with an index, anchors and a command for each operation."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from starlette.responses import HTMLResponse

_REF = "#/components/schemas/"
_BASE_URL = "http://127.0.0.1:8000"

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h2{margin-top:2.5rem;border-bottom:1px solid #ccc}h3{font:600 1rem ui-monospace,monospace;margin-top:2rem}
pre{background:#f4f4f4;padding:.7rem;overflow-x:auto}code,pre{font:13px ui-monospace,monospace}
table{border-collapse:collapse;width:100%}td{border-top:1px solid #ddd;padding:.2rem .6rem;vertical-align:top}
td:first-child{white-space:nowrap;font-family:ui-monospace,monospace}
"""
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


def render(document: Mapping[str, Any]) -> HTMLResponse:
    """Return an OpenAPI document as one HTML page without scripts or external resources."""
    info = document["info"]
    html = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<style>{_STYLE}</style><h1>{escape(info['title'])}</h1><p>{escape(info.get('summary', ''))}</p>",
        f"<p>{escape(info.get('description', ''))}</p><p>For programs: <a href=/openapi.json>/openapi.json</a></p>",
    ]
    by_tag: dict[str, list[Operation]] = {}
    for operation in _operations(document):
        by_tag.setdefault(operation.tag, []).append(operation)
    html += ["<h2 id=index>Index</h2>", *_index(by_tag)]
    for tag, operations in by_tag.items():
        html.append(f'<h2 id="{_anchor(tag)}">{escape(tag)}</h2>')
        html += [line for operation in operations for line in _section(operation)]
    html += ["<h2 id=objects>Objects</h2>", *_schemas(document)]
    return HTMLResponse("\n".join(html), headers={"Content-Security-Policy": _CONTENT_POLICY})


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    about: Mapping[str, Any]

    @property
    def tag(self) -> str:
        return str(next(iter(self.about.get("tags", ())), "other"))

    @property
    def title(self) -> str:
        return f"{self.method.upper()} {self.path}"

    @property
    def bodies(self) -> Mapping[str, Any]:
        """Its request bodies by their media types."""
        content: Mapping[str, Any] = self.about.get("requestBody", {}).get("content", {})
        return content


def _operations(document: Mapping[str, Any]) -> Iterator[Operation]:
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            yield Operation(method, path, about)


def _anchor(text: str) -> str:
    return escape(re.sub(r"[^a-z0-9]+", "-", text.lower()))


def _index(by_tag: Mapping[str, Sequence[Operation]]) -> Iterator[str]:
    for tag, operations in by_tag.items():
        links = " ".join(
            f'<li><a href="#{escape(one.about["operationId"])}">{escape(one.title)}</a></li>' for one in operations
        )
        yield f'<p><a href="#{_anchor(tag)}">{escape(tag)}</a></p><ul>{links}</ul>'
    yield "<p><a href=#objects>Objects</a></p>"


def _section(operation: Operation) -> Iterator[str]:
    about, name = operation.about, escape(operation.about["operationId"])
    yield f'<h3 id="{name}"><a href="#{name}">{escape(operation.title)}</a></h3>'
    yield f"<p>{escape(about.get('description', ''))}</p><pre>{escape(curl(operation))}</pre>"
    yield _table(
        (f"{param['name']} ({param['in']})", escape(param.get("description") or ""))
        for param in about.get("parameters", ())
    )
    for content_type, body in operation.bodies.items():
        yield f"<p>Body: <code>{escape(content_type)}</code> {_type(body.get('schema', {}))}</p>"
        yield from _examples(body)
    yield _table((status, _response(response)) for status, response in about["responses"].items())


def curl(operation: Operation) -> str:
    """Return a command that calls an operation; `{id}` and the like are to be filled in."""
    answers = {
        kind
        for status, response in operation.about["responses"].items()
        if status.startswith("2")
        for kind in response.get("content", {})
    }
    words = ["curl -sN" if answers == {"text/event-stream"} else "curl -s"]
    if operation.method != ("post" if operation.bodies else "get"):
        words.append(f"-X {operation.method.upper()}")
    query = operation.about.get("x-example-query", "")
    words.append(shlex.quote(f"{_BASE_URL}{operation.path}{query}"))
    if operation.about.get("security"):
        words.append('-H "Authorization: Bearer $FUSEQUEUE_API_KEY"')
    for content_type, body in operation.bodies.items():
        words += _curl_body(content_type, body)
        break
    if answers and all(kind.startswith(("image/", "video/")) for kind in answers):
        words.append("-o result")
    return " ".join(words)


def _curl_body(content_type: str, body: Mapping[str, Any]) -> Iterator[str]:
    schema = body.get("schema", {})
    if content_type == "multipart/form-data":
        for name in schema.get("required", ()):
            field = schema["properties"].get(name, {})
            value = "@file" if field.get("format") == "binary" else str(_sample(field))
            yield f"-F {shlex.quote(f'{name}={value}')}"
        return
    if content_type == "*/*":
        yield "--data-binary @file"
        return
    yield f"-H {shlex.quote(f'Content-Type: {content_type}')}"
    if content_type != "application/json":
        yield "--data-binary @lines.jsonl"
        return
    examples = [example["value"] for example in body.get("examples", {}).values()]
    value = body.get("example") or next(iter(examples), None) or _sample(schema)
    yield f"-d {shlex.quote(json.dumps(value))}"


def _sample(schema: Mapping[str, Any]) -> Any:
    """Return a value of a schema: its example, or one with the required fields."""
    for name in ("examples", "enum"):
        if schema.get(name):
            return schema[name][0]
    if "const" in schema or "default" in schema:
        return schema.get("const", schema.get("default"))
    fields = schema.get("properties", {})
    if fields:
        required = schema.get("required") or list(fields)[:1]
        return {name: _sample(fields.get(name, {})) for name in required}
    return {"integer": 1, "number": 1.0, "boolean": True, "array": []}.get(schema.get("type", ""), "...")


def _schemas(document: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in sorted(document["components"]["schemas"].items()):
        if name in ("HTTPValidationError", "ValidationError"):
            continue
        yield f"<h3 id={escape(name)}>{escape(name)}</h3><p>{escape(schema.get('description', ''))}</p>"
        if "enum" in schema:
            yield f"<p>{escape(', '.join(map(str, schema['enum'])))}</p>"
        fields = schema.get("properties", {}).items()
        yield _table((name, f"{_type(field)} {escape(field.get('description', ''))}") for name, field in fields)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{html}</td></tr>" for name, html in rows)
    return f"<table>{cells}</table>" if cells else ""


def _response(response: Mapping[str, Any]) -> str:
    types = [_type(content.get("schema", {})) for content in response.get("content", {}).values()]
    return f"{escape(response.get('description', ''))} {' '.join(types)}"


def _examples(body: Mapping[str, Any]) -> Iterator[str]:
    if "example" in body:
        yield f"<pre>{escape(str(body['example']))}</pre>"
    for name, example in body.get("examples", {}).items():
        yield f"<p>{escape(name)}:</p><pre>{escape(json.dumps(example['value'], indent=2))}</pre>"


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema's type as HTML, with links to the objects of this page."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REF))
        return f"<a href=#{name}>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [f"{name} {schema[name]}" for name in ("minimum", "maximum", "maxLength", "pattern") if name in schema]
    return escape(" ".join([str(schema.get("type", schema.get("const", ""))), *bounds]))
