"""What the scripts of Python clients share: the service, a log of their calls, and checks of what they get."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

URL = os.environ["FUSEQUEUE_URL"]
HTTPS_URL = os.environ["FUSEQUEUE_HTTPS_URL"]
KEY = os.environ["FUSEQUEUE_API_KEY"]
MODEL, VIDEO_MODEL = "demo", "film"
PROMPT = "a red circle on a blue ground, left"
TIMEOUT_S = 60.0

_calls: list[tuple[str, Callable[[], object]]] = []

warnings.simplefilter("ignore")  # such as of the SDKs that OpenAI's video service has closed


def call(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a function as a call of the client: `main` runs them in this order."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        _calls.append((name, function))
        return function

    return register


def main() -> None:
    """Run all calls, print a line of JSON about them, and exit with 1 if one has failed."""
    rows: list[dict[str, Any]] = []
    for name, function in _calls:
        started = time.monotonic()
        error = None
        try:
            function()
        except Exception as caught:
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"[:1000]
        rows.append({"call": name, "seconds": round(time.monotonic() - started, 2), "error": error})
    print(json.dumps({"calls": rows}), flush=True)
    sys.stdout.flush()
    os._exit(any(row["error"] for row in rows))  # no client's thread keeps the process


def request(method: str, path: str, body: object = None) -> Any:
    """Send a request of the native API and return its JSON."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(URL + path, data, headers, method=method)
    with urllib.request.urlopen(sent, timeout=TIMEOUT_S) as response:
        return json.loads(response.read() or b"null")


def same(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{found!r} is not {wanted!r}")


def check_image(data: bytes | Image.Image, size: tuple[int, int] = (64, 64), format: str = "PNG") -> Image.Image:
    """Check that an image opens with this size and format, and is not of one colour; return it."""
    image = data if isinstance(data, Image.Image) else Image.open(io.BytesIO(data))
    image.load()
    same((image.size, image.format), (size, format))
    extremes = image.convert("L").getextrema()
    assert extremes[0] != extremes[1], "the image has one colour"
    return image


def check_video(data: bytes) -> None:
    """Check that data begin as an MP4 and have more than its index."""
    same(data[4:8], b"ftyp")
    assert b"moov" in data, "the MP4 has no index"
    assert b"mdat" in data, "the MP4 has no frames"


def png(colour: str = "white", size: tuple[int, int] = (64, 64)) -> bytes:
    """Return a PNG of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """Check that the block raises `error` with a message that has all words."""
    try:
        yield
    except error as caught:
        text = f"{caught} {getattr(caught, 'body', '')}"
        missing = [word for word in words if word not in text]
        assert not missing, f"{missing} missing in {text}"
        return
    raise AssertionError(f"no {error.__name__}")
