"""Models files, data URLs and image URLs: any text is accepted or refused with a reason, never another error."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import itertools
import socket
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.jobs.input_store import _from_data_url
from shared.config import models_file
from shared.config.settings import Settings
from shared.errors import ConfigurationError, FetchRefused, InputRejected
from shared.inputs.fetch_guard import FetchGuard, FetchRules

MODELS = (Path(__file__).resolve().parents[3] / "models.toml").read_text("utf-8")
RULES = FetchRules.for_inputs(Settings())
near = settings(max_examples=80, deadline=None, derandomize=True)
URL_PARTS = (
    ("https://", "http://", "HTTPS://", "https:/", "file://", "//", ""),
    ("", "user@", "a:b@", "%40"),
    (
        "127.0.0.1",
        "localhost.",
        "[::1]",
        "0x7f.1",
        "2130706433",
        "169.254.169.254",
        "[::ffff:10.0.0.1]",
        "1.1.1.1",
        "a.b",
    ),
    ("", ":443", ":8443", ":22", ":0", ":99999", ":a"),
    ("", "/a.png", "/a#@b", "?x=\\", "/\r\nHost: b"),
)
urls = st.tuples(*(st.sampled_from(part) | st.text(max_size=8) for part in URL_PARTS)).map("".join)


def check(url: str) -> None:
    """Assert that a URL is refused, or has a public host and an allowed port."""
    with contextlib.suppress(FetchRefused):
        target = FetchGuard(RULES).check_url(url)
        assert target.port in RULES.ports
        assert all(ipaddress.ip_address(address).is_global for address in target.addresses)
        assert target.addresses or not _is_address(target.host)


def test_no_combination_of_odd_parts_is_a_url_of_a_private_host_or_another_port() -> None:
    for parts in itertools.product(*URL_PARTS):
        check("".join(parts))


@near
@given(url=urls | st.text(max_size=40))
def test_any_url_is_refused_or_has_a_public_host_and_an_allowed_port(url: str) -> None:
    check(url)


def _is_address(host: str) -> bool:
    """Return whether the system takes `host` for an IPv4 address, in any notation."""
    with contextlib.suppress(OSError):
        return bool(socket.inet_aton(host))
    return False


@near
@given(data=st.binary(max_size=100), kind=st.sampled_from(("image/png", "", "image/webp;x=y")), escape=st.booleans())
def test_a_data_url_gives_its_bytes(data: bytes, kind: str, escape: bool) -> None:
    payload = base64.b64encode(data).decode()
    payload = payload.replace("+", "%2B").replace("=", "%3D") if escape else payload
    assert _from_data_url(f"data:{kind};base64,{payload}", 100, "image") == data


@near
@given(text=st.text(max_size=60) | st.from_regex(r"(?:image/\w{0,4})?;?(?:base64)?,[\w+/=%]{0,30}", fullmatch=True))
def test_any_data_url_is_bytes_or_rejected(text: str) -> None:
    with contextlib.suppress(InputRejected):
        assert len(_from_data_url(f"data:{text}", 16, "image")) <= 18  # 16 bytes and the rest of a group of three


@settings(parent=near, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, len(MODELS)),
    cut=st.integers(0, 40),
    inserted=st.text(max_size=12) | st.sampled_from(("[[model]]\n", "id = 7\n", '"', "= [", "9" * 30, "x = nan\n")),
)
def test_a_damaged_models_file_is_read_or_refused_by_name(tmp_path: Path, at: int, cut: int, inserted: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(MODELS[:at] + inserted + MODELS[at + cut :], "utf-8")
    with contextlib.suppress(ConfigurationError):
        assert len(models_file.load(path)) > 0
