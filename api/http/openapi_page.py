"""The API's documentation as one page of HTML: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from starlette.responses import HTMLResponse

_REF = "#/components/schemas/"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h2{margin-top:2.5rem;border-bottom:1px solid #ccc}h3{font:600 1rem ui-monospace,monospace;margin-top:2rem}
pre{background:#f4f4f4;padding:.7rem;overflow-x:auto}code,pre{font:13px ui-monospace,monospace}
table{border-collapse:collapse;width:100%}td{border-top:1px solid #ddd;padding:.2rem .6rem;vertical-align:top}
td:first-child{white-space:nowrap;font-family:ui-monospace,monospace}
"""
_SECURITY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


def rendered(page: Mapping[str, Any]) -> HTMLResponse:
    """Return the OpenAPI document `page` for people to read."""
    info = page["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<style>{_STYLE}</style><h1>{escape(info['title'])}</h1><p>{escape(info.get('summary', ''))}</p>",
        f"<p>{escape(info.get('description', ''))}</p><p>For programs: <a href=/openapi.json>/openapi.json</a></p>",
    ]
    parts += ["<h2>Paths</h2>", *_operations(page), "<h2>Objects</h2>", *_schemas(page)]
    return HTMLResponse("\n".join(parts), headers={"Content-Security-Policy": _SECURITY})


def _operations(page: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in page["paths"].items():
        for method, operation in operations.items():
            yield f"<h3>{method.upper()} {escape(path)}</h3><p>{escape(operation.get('description', ''))}</p>"
            yield _table((_named(one), escape(one.get("description") or "")) for one in operation.get("parameters", ()))
            for content_type, body in operation.get("requestBody", {}).get("content", {}).items():
                yield f"<p>Body: <code>{escape(content_type)}</code> {_kind(body.get('schema', {}))}</p>"
                yield from _examples(body)
            yield _table((status, _answer(answer)) for status, answer in operation["responses"].items())


def _schemas(page: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in sorted(page["components"]["schemas"].items()):
        if name in ("HTTPValidationError", "ValidationError"):
            continue
        yield f"<h3 id={escape(name)}>{escape(name)}</h3><p>{escape(schema.get('description', ''))}</p>"
        if "enum" in schema:
            yield f"<p>{escape(', '.join(map(str, schema['enum'])))}</p>"
        rows = schema.get("properties", {}).items()
        yield _table((field, f"{_kind(one)} {escape(one.get('description', ''))}") for field, one in rows)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{told}</td></tr>" for name, told in rows)
    return f"<table>{cells}</table>" if cells else ""


def _named(parameter: Mapping[str, Any]) -> str:
    return f"{parameter['name']} ({parameter['in']})"


def _answer(answer: Mapping[str, Any]) -> str:
    kinds = [_kind(one.get("schema", {})) for one in answer.get("content", {}).values()]
    return f"{escape(answer.get('description', ''))} {' '.join(kinds)}"


def _examples(body: Mapping[str, Any]) -> Iterator[str]:
    if "example" in body:
        yield f"<pre>{escape(str(body['example']))}</pre>"
    for name, example in body.get("examples", {}).items():
        yield f"<p>{escape(name)}:</p><pre>{escape(json.dumps(example['value'], indent=2))}</pre>"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a schema's type in a few words, with links to the objects of this page."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REF))
        return f"<a href=#{name}>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{word} {schema[word]}" for word in ("minimum", "maximum", "maxLength", "pattern") if word in schema]
    return escape(" ".join([str(schema.get("type", schema.get("const", ""))), *bounds]))
