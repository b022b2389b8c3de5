"""URLs in responses to clients behind a proxy."""

from __future__ import annotations

from collections.abc import Callable

import httpx
from harness.api_thread import ApiThread
from harness.http_server import BODY


def test_urls_in_responses_are_those_that_the_client_of_a_proxy_can_use(serve: Callable[..., ApiThread]) -> None:
    server = serve(auth="insecure-no-keys", trusted_proxies="127.0.0.0/8")
    forwarded = {
        "X-Forwarded-Proto": "https, http",
        "X-Forwarded-Host": "images.example",
        "X-Forwarded-Port": "8443",
        "X-Forwarded-Prefix": "/api",
        "X-Forwarded-For": "unknown",
    }
    response = httpx.post(server.url + "/v1/jobs", json=BODY, headers=forwarded, timeout=60)
    url = f"https://images.example:8443/api/v1/jobs/{response.json()['id']}"
    assert response.headers["location"] == url
    assert response.json()["urls"]["self"] == url
    listed = httpx.get(server.url + "/v1/jobs", headers=forwarded, timeout=60).json()["data"]
    assert [job["urls"]["self"] for job in listed] == [url]


def test_a_public_url_counts_more_than_a_proxy(serve: Callable[..., ApiThread]) -> None:
    server = serve(auth="insecure-no-keys", trusted_proxies="*", public_url="https://public.example/x/")
    forwarded = {"X-Forwarded-Host": "images.example", "X-Forwarded-Prefix": "/api"}
    response = httpx.post(server.url + "/v1/jobs", json=BODY, headers=forwarded, timeout=60)
    assert response.headers["location"].startswith("https://public.example/x/v1/jobs/")


ODD = ("", ",", "a b", "\xfc", "://", "[", "[:::]", "/..", "-1", "65536", "unknown", "9" * 5000, "{}", "%00", ";,=")


def test_no_value_of_a_proxy_is_an_error(serve: Callable[..., ApiThread]) -> None:
    server = serve(auth="insecure-no-keys", trusted_proxies="127.0.0.1")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for value in ODD:
            for name in ("For", "Proto", "Host", "Port", "Prefix", "Other", ""):
                headers = [(f"X-Forwarded-{name}".encode(), value.encode("latin-1"))]
                response = client.post("/v1/jobs", json=BODY, headers=headers)
                assert response.status_code == 202, (name, value)
                named = value if name == "Host" and value.isalnum() and value.isascii() else f"127.0.0.1:{server.port}"
                assert response.headers["location"] == f"http://{named}/v1/jobs/{response.json()['id']}", (name, value)
