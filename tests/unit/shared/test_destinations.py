"""Where a job's artifacts go: what requests can say, and which buckets and prefixes a tenant can use."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from api.jobs.request import parse
from api.jobs.resolve import resolve
from api.protocols.openai.batches.batch_lines import line_request
from shared.config import settings
from shared.config.catalog import Catalog
from shared.config.destinations import Destination, DestinationChoice, OutputBucket, resolve_destination
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import ConfigurationError, InvalidRequest
from shared.job import decode, encode

URL = "https://bucket.example/a.png?X-Amz-Signature=secret"
SPEC = ModelSpec(id="demo", source="d", max_batch=8)


def check(output: dict[str, Any], n: int = 1, tenant: str = "acme", **configured: Any) -> None:
    services: Any = SimpleNamespace(catalog=Catalog((SPEC,)), settings=Settings(**configured))
    resolve(parse({"model": "demo", "prompt": "x", "n": n, "output": output}), services, tenant)


@pytest.mark.parametrize(
    ("output", "n", "param", "message"),
    [
        ({}, 1, "output", "send one of put_url, put_urls and bucket"),
        ({"put_url": URL, "bucket": "renders"}, 1, "output", "send one of"),
        ({"put_url": URL, "prefix": "a"}, 1, "output", "prefix needs a bucket"),
        ({"put_url": URL, "key": "a"}, 1, "output.key", "there is no such field"),
        ({"put_url": URL}, 2, "output", "1 PUT URLs for 2 outputs"),
        ({"put_urls": [URL, URL]}, 2, "output", "two outputs have the same PUT URL"),
        ({"put_url": "http://bucket.example/a"}, 1, "output.put_url", "must start with https://"),
        ({"put_url": "https://bucket.example:22/a"}, 1, "output.put_url", "port not allowed: 22"),
        ({"put_url": "https://10.1.2.3/a"}, 1, "output.put_url", "a private address"),
        ({"put_url": "https://169.254.169.254/a"}, 1, "output.put_url", "a link-local address"),
        ({"put_url": "https://me:secret@bucket.example/a"}, 1, "output.put_url", "a user or password"),
        ({"put_urls": [URL, "https://127.0.0.1/a"]}, 2, "output.put_urls.1", "a loopback address"),
        ({"bucket": "renders"}, 1, "output.bucket", "not allowed: 'renders'"),
    ],
)
def test_a_destination_that_cannot_be_used_is_refused_at_submit(
    output: dict[str, Any], n: int, param: str, message: str
) -> None:
    """The error names the field, and never shows a signature."""
    with pytest.raises(InvalidRequest, match=message) as refused:
        check(output, n)
    assert refused.value.param == param
    assert "secret" not in refused.value.message


def test_every_output_has_its_url() -> None:
    urls = [f"https://bucket.example/{index}.png" for index in range(4)]
    check({"put_urls": urls}, n=4)
    check({"put_url": "https://10.1.2.3:9000/a"}, output_allow_networks="10.0.0.0/8", output_ports="9000")


@pytest.mark.parametrize(
    ("allowed", "tenant", "prefix", "result"),
    [
        ("renders", "acme", None, "acme"),
        ("renders", "acme", "acme/today/", "acme/today"),
        ("renders", "acme", "other", InvalidRequest),
        ("renders", "acme", "acme-2", InvalidRequest),
        ("renders", "acme", "acme/../other", InvalidRequest),
        ("renders", "acme", "acme//x", InvalidRequest),
        ("renders/jobs", "acme", None, "jobs/acme"),
        ("renders/jobs", "acme", "acme", InvalidRequest),
        ("acme=renders", "acme", None, ""),
        ("acme=renders", "acme", "any/where", "any/where"),
        ("acme=renders/a", "acme", "a/b", "a/b"),
        ("acme=renders/a", "acme", "b", InvalidRequest),
        ("acme=renders", "other", None, InvalidRequest),
        ("acme=renders/a,acme=renders/b", "acme", "b/x", "b/x"),
        ("others", "acme", None, InvalidRequest),
        ("", "acme", None, InvalidRequest),
    ],
)
def test_a_tenant_writes_only_below_its_prefix(allowed: str, tenant: str, prefix: str | None, result: Any) -> None:
    buckets = Settings(output_buckets=allowed).output_buckets
    choice = DestinationChoice(bucket="renders", prefix=prefix)
    if isinstance(result, str):
        assert resolve_destination(choice, tenant, buckets) == Destination(bucket="renders", prefix=result)
    else:
        with pytest.raises(result, match=r"not allowed|invalid"):
            resolve_destination(choice, tenant, buckets)


@pytest.mark.parametrize("entry", ["Bad", "a", "=renders", "UP=renders", "renders/../x", "renders//x", "a=b=renders"])
def test_an_invalid_bucket_stops_the_program(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEQUEUE_OUTPUT_BUCKETS", f"fine,{entry}")
    with pytest.raises(ConfigurationError, match="FUSEQUEUE_OUTPUT_BUCKETS"):
        settings.load()


def test_the_services_own_bucket_is_no_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant named `jobs` could replace results of others there."""
    monkeypatch.setenv("FUSEQUEUE_S3_BUCKET", "images")
    monkeypatch.setenv("FUSEQUEUE_OUTPUT_BUCKETS", "acme=images/acme")
    with pytest.raises(ConfigurationError, match="results of all tenants"):
        settings.load()


def test_buckets_are_read_from_the_settings() -> None:
    assert Settings(output_buckets="renders, acme=own/a/b/").output_buckets == (
        OutputBucket("renders"),
        OutputBucket("own", "a/b", "acme"),
    )


def test_a_job_without_a_destination_keeps_its_wire_format(make_job: Any) -> None:
    """Programs that do not know the field can read it."""
    assert "output" not in json.loads(encode(make_job()))
    job = make_job(output=Destination(put_urls=(URL,)))
    assert decode(encode(job)) == job
    assert "secret" not in repr(job)


@pytest.mark.parametrize("endpoint", ["/v1/images/generations", "/v1/images/edits"])
def test_protocols_that_return_results_take_no_destination(endpoint: str) -> None:
    """A line of their batches neither; one of jobs takes it."""
    body = {
        "model": "demo",
        "prompt": "x",
        "image": "in_0123456789abcdef0123456789abcdef",
        "output": {"bucket": "renders"},
    }
    with pytest.raises(InvalidRequest, match="use POST /v1/jobs") as refused:
        line_request(endpoint, body, Catalog((SPEC,)))
    assert refused.value.param == "output"
    assert line_request("/v1/jobs", body, Catalog((SPEC,))).output == DestinationChoice(bucket="renders")
