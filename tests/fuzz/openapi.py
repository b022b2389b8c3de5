"""Requests made from the OpenAPI description, with the keys of two tenants, with fewer scopes, and without a key.

Every response must have a documented status, content type and schema; none is an internal error, and none shows one
tenant what belongs to the other.
"""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import schemathesis
from attack.stack import Keys, authorization
from hypothesis import strategies as st
from PIL import Image
from schemathesis.engine import events, from_schema
from schemathesis.engine.recorder import ScenarioRecorder
from tiny.safetensors_file import demo_lora

CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
    "negative_data_rejection",
    "use_after_free",
    "ensure_resource_availability",
)
EXPECTED_5XX = frozenset(("wait_timeout", "deadline_exceeded"))
"""Codes of a synchronous call with a job that did not end in time."""

RESULT_PER_LINE = "POST /v1/jobs:bulk"
"""An invalid line is no invalid request: its error is in a response with 200."""

Ids = Mapping[str, Sequence[str]]
REQUEST_TIMEOUT_S = 20.0
MAX_PROBLEMS = 20
REUSED_ID_SHARE = 4  # one of so many generated path parameters is replaced by the id of an object that exists


@schemathesis.serializer("application/x-ndjson")
def as_lines(context: Any, value: Any) -> bytes:
    """Return a generated body of a bulk request: a text as it is, another value as one line."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else json.dumps(value).encode()


@dataclass(frozen=True)
class Identity:
    """Who sends the requests of one part of a run, and the share of the time."""

    name: str
    key: str | None
    share: float

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else authorization(self.key)


@dataclass
class Objects:
    """Objects of one tenant: ids by the name of the path parameter, and `secrets`, which only the tenant may read."""

    ids: dict[str, list[str]] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)


def identities(owner: Keys, other: Keys) -> tuple[Identity, ...]:
    return (
        Identity("owner", owner.both, 0.4),
        Identity("other tenant", other.both, 0.3),
        Identity("read only", other.read, 0.1),
        Identity("write only", other.write, 0.1),
        Identity("no key", None, 0.1),
    )


def run(url: str, owner: Keys, other: Keys, foreign: Objects, *, seed: int, seconds: float) -> dict[str, Any]:
    """Send generated requests as each identity for its share of `seconds`; `foreign` belongs to the owner."""
    document = described(url)
    statuses: Counter[str] = Counter()
    reached: set[str] = set()
    problems: dict[str, str] = {}
    for number, identity in enumerate(identities(owner, other)):
        # What belongs to the owner must stay out of sight of the others, who know its ids.
        hidden = () if identity.name == "owner" else foreign.secrets
        for event in outcomes(document, url, identity, foreign.ids, seed + number, identity.share * seconds):
            if isinstance(event, events.NonFatalError):
                kind = f"{event.label}: {type(event.value).__name__}"
                problems.setdefault(kind, f"{kind} ({identity.name}): {str(event.value)[:500]}")
                continue
            reached |= {node.value.operation.label for node in event.recorder.cases.values()}
            for status, found in examined(event.recorder, hidden):
                statuses[status] += 1
                for kind, detail in found.items():
                    problems.setdefault(kind, f"{kind} ({identity.name}): {detail}")
    return {
        "requests": statuses.total(),
        "operations": f"{len(reached)} of {sum(map(len, document['paths'].values()))}",
        "statuses": dict(sorted(statuses.items())),
        "problems": list(problems.values())[:MAX_PROBLEMS],
    }


def described(url: str) -> dict[str, Any]:
    """Return the OpenAPI document without its `default` responses, which would document every status."""
    document: dict[str, Any] = httpx.get(f"{url}/openapi.json", timeout=30, trust_env=False).raise_for_status().json()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("default", None)
    return document


def outcomes(
    document: Mapping[str, Any],
    url: str,
    identity: Identity,
    ids: Mapping[str, Sequence[str]],
    seed: int,
    seconds: float,
) -> Iterator[events.ScenarioFinished | events.NonFatalError]:
    """Yield the finished scenarios of one identity, and the errors of requests without a response."""
    schema = schemathesis.openapi.from_dict(document, config=_config(url, identity, seed, seconds))

    @schema.hook
    def flatmap_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> Any:
        return st.integers(1, REUSED_ID_SHARE).flatmap(
            lambda roll: st.just(path_parameters) if roll > 1 else _with_ids(path_parameters or {}, ids)
        )

    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished | events.NonFatalError):
            yield event
        elif isinstance(event, events.FatalError):
            raise event.exception


def _with_ids(parameters: dict[str, Any], ids: Ids) -> Any:
    known = {name: st.sampled_from(ids[name]) for name in parameters if ids.get(name)}
    return st.fixed_dictionaries({name: known.get(name, st.just(value)) for name, value in parameters.items()})


def _config(url: str, identity: Identity, seed: int, seconds: float) -> schemathesis.Config:
    return schemathesis.Config.from_dict(
        {
            "seed": seed,
            "max-time": max(1, round(seconds)),
            "suppress-health-check": ["all"],
            "base-url": url,
            "headers": identity.headers,
            "continue-on-failure": True,
            "request-timeout": REQUEST_TIMEOUT_S,
            "request-retries": 0,
            "max-redirects": 0,
            "generation": {"database": "none", "no-shrink": True},
            "checks": {"enabled": False, **{name: {"enabled": True} for name in CHECKS}},
        }
    )


def examined(recorder: ScenarioRecorder, hidden: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the status of each response, and what is wrong with it: the kind of the fault, and details."""
    for case_id, interaction in recorder.interactions.items():
        response, request = interaction.response, interaction.request
        operation = f"{request.method} {recorder.cases[case_id].value.operation.path}"
        if response is None:
            yield "none", {f"{operation}: no response": f"{request.uri[:200]} {request.headers} {request.body!r:.2000}"}
            continue
        found = {}
        for check in recorder.checks.get(case_id, ()):
            if check.failure_info is not None and (operation, check.name) != (
                RESULT_PER_LINE,
                "negative_data_rejection",
            ):
                failure = check.failure_info.failure
                kind = f"{operation}: {response.status_code}: {failure.title}"
                found[kind] = f"{' '.join(failure.message.split())[:250]}; {request.uri[:200]}"
        sent = f"{request.uri} {request.headers} {request.body!r}"
        text = (response.content or b"").decode("utf-8", "replace") + str(response.headers)
        shown = [secret for secret in hidden if secret in text and secret not in sent]
        if shown:
            found[f"{operation}: shows what belongs to another tenant"] = f"{shown}; {request.uri[:200]}"
        if response.status_code >= 500 and _code(text) not in EXPECTED_5XX:
            found[f"{operation}: {response.status_code}"] = f"{text[:200]}; {sent[:300]}"
        yield str(response.status_code), found


def _code(text: str) -> str | None:
    try:
        body, _ = json.JSONDecoder().raw_decode(text)
        return str(body["code"])
    except (ValueError, TypeError, KeyError):
        return None


async def plant(url: str, keys: Keys, rng: random.Random) -> Objects:
    """Create one object of each kind for a tenant."""
    text = f"secret-{rng.randbytes(8).hex()}"
    async with httpx.AsyncClient(base_url=url, headers=keys.headers, timeout=60, trust_env=False) as client:

        async def sent(method: str, path: str, **options: Any) -> dict[str, Any]:
            return dict((await client.request(method, path, **options)).raise_for_status().json())

        body = {"model": "alpha", "prompt": text, "metadata": {"note": text}, "group": text}
        job = await sent("POST", "/v1/jobs", json=body)
        await sent("GET", f"/v1/jobs/{job['id']}", params={"wait": 30})
        image = await sent("POST", "/v1/inputs", files={"file": ("a.png", _noise(rng), "image/png")})
        line = {"custom_id": text, "method": "POST", "url": "/v1/jobs", "body": {"model": "alpha", "prompt": text}}
        lora = {"file": ("a.safetensors", demo_lora(rng.randrange(2**32)))}
        adapter = await sent("POST", "/v1/adapters", files=lora, data={"model": "alpha", "name": text})
        upload = {"file": ("lines.jsonl", json.dumps(line).encode() + b"\n", "application/jsonl")}
        file = await sent("POST", "/v1/files", files=upload, data={"purpose": "batch"})
        batch = await sent("POST", "/v1/batches", json={"input_file_id": file["id"], "endpoint": "/v1/jobs"})
        hook = await sent("POST", "/v1/webhooks", json={"url": "https://127.0.0.1/hook", "description": text})
    number = job["id"].removeprefix("job_")
    ids = {
        "job_id": [job["id"]],
        "index": ["0"],
        "file_id": [file["id"]],
        "batch_id": [batch["id"]],
        "group": [text],
        "endpoint_id": [hook["id"]],
        "adapter_id": [adapter["id"]],
        "prediction_id": [number, job["id"]],
        "video_id": [f"video_{number}"],
    }
    # The number of a job is part of its other ids.
    planted = [one["id"] for one in (file, batch, hook, image, adapter)]
    return Objects(ids, [text, number, *planted, hook["secret"]])


def _noise(rng: random.Random) -> bytes:
    """Return an image that no other tenant has: equal images have equal ids."""
    file = io.BytesIO()
    Image.frombytes("RGB", (16, 16), rng.randbytes(768)).save(file, "PNG")
    return file.getvalue()
