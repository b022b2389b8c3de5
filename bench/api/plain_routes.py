"""`python -m bench.api.plain_routes PORT`: FastAPI routes of the same bodies that do nothing, run by uvicorn."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI
from starlette.responses import Response

from api.jobs.request import JobRequest

app = FastAPI()
_ANSWER = b'{"id":"job_00000000000000000000000000","status":"queued","progress":{"step":0,"total":8,"percent":0}}'


@app.get("/readyz")
async def readyz() -> dict[str, str]:
    return {"status": "ready"}


@app.post("/v1/jobs", status_code=202)
async def submit_job(body: JobRequest) -> Response:
    """Validate the body."""
    return Response(_ANSWER, 202, media_type="application/json")


@app.get("/v1/jobs/{job_id}")
async def get_job(job_id: str) -> Response:
    return Response(_ANSWER, media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
