"""The files of the page at `/`, and of the reference of the API at `/docs`.

All are read once; their URLs name their version, so that browsers keep them.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.responses import etag_matches
from shared.errors import NotFound

router = APIRouter(include_in_schema=False)

TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}
_FOREVER = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class Asset:
    """One file, compressed."""

    compressed: bytes
    content_type: str

    @classmethod
    def of(cls, name: str, body: bytes) -> Asset:
        """Return a file of a folder: `name` says if it is compressed there."""
        stored = name.endswith(".gz")
        compressed = body if stored else gzip.compress(body, mtime=0)
        return cls(compressed, TYPES[_served_name(name).rpartition(".")[2]])


@dataclass(frozen=True)
class PageFiles:
    """The document, and the other files by their paths below `/{page}/{version}/`."""

    document: Asset
    assets: Mapping[str, Asset]
    version: str


@functools.cache
def page() -> PageFiles:
    return _load("static", "page")


@functools.cache
def docs() -> PageFiles:
    return _load("docs", "docs")


def _load(source: str, path: str) -> PageFiles:
    """Return the page in the folder `source`; its version is a digest of its files."""
    bodies = dict(_files(resources.files(__package__) / source))
    digest = hashlib.sha256()
    for name in sorted(bodies):
        digest.update(name.encode() + b"\0" + bodies[name])
    version = digest.hexdigest()[:16]
    folder = f"{path}/{version}"
    # All modules are requested at once: a browser would find each only in the one that imports it.
    modules = (name for name in sorted(bodies) if name.endswith(".js"))
    preloads = "\n".join(f'<link rel="modulepreload" href="{folder}/{name}">' for name in modules)
    document = bodies.pop("index.html").decode().replace("{folder}", folder).replace("{preloads}", preloads)
    assets = {_served_name(name): Asset.of(name, body) for name, body in bodies.items()}
    return PageFiles(Asset.of("index.html", document.encode()), assets, version)


def _served_name(name: str) -> str:
    return name.removesuffix(".gz")


def _files(folder: Traversable, prefix: str = "") -> list[tuple[str, bytes]]:
    files: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            files += _files(entry, f"{prefix}{entry.name}/")
        elif _served_name(entry.name).rpartition(".")[2] in TYPES:
            files.append((prefix + entry.name, entry.read_bytes()))
    return files


@router.head("/")
@router.get("/")
async def get_page(request: Request) -> Response:
    """Return the page; it needs no key, and holds no data."""
    return _document(request, page())


@router.head("/docs")
@router.get("/docs")
async def get_docs(request: Request) -> Response:
    """Return the reference of the API; it needs no key."""
    return _document(request, docs())


@router.head("/page/{version}/{name:path}")
@router.get("/page/{version}/{name:path}")
async def get_page_asset(request: Request, version: str, name: str) -> Response:
    return _asset(request, page(), version, name)


@router.head("/docs/{version}/{name:path}")
@router.get("/docs/{version}/{name:path}")
async def get_docs_asset(request: Request, version: str, name: str) -> Response:
    return _asset(request, docs(), version, name)


def _document(request: Request, files: PageFiles) -> Response:
    tag = f'"{files.version}"'
    headers = {"ETag": f"W/{tag}", "Cache-Control": "no-cache"}  # weak: it is that of both encodings
    if etag_matches(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    return _response(request, files.document, headers)


def _asset(request: Request, files: PageFiles, version: str, name: str) -> Response:
    """Return a file of a page. Another version is that of a document from before an update: reload it."""
    asset = files.assets.get(name) if version == files.version else None
    if asset is None:
        raise NotFound("there is no such file of the page; load the page again", param="name")
    return _response(request, asset, {"Cache-Control": _FOREVER})


def _response(request: Request, asset: Asset, headers: dict[str, str]) -> Response:
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers = asset.compressed, {**headers, "Content-Encoding": "gzip"}
    else:
        body = gzip.decompress(asset.compressed)
    return Response(body, headers={**_HEADERS, **headers, "Content-Type": asset.content_type})
