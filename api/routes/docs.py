"""The documentation of all paths."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from api.http.openapi_page import rendered

router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def documentation(request: Request) -> HTMLResponse:
    """Return the page for people; programs read `/openapi.json`."""
    return rendered(request.app.openapi())
