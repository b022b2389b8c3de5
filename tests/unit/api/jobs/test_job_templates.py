"""Jobs that are copies of an earlier one: they equal the jobs that the whole way through the checks builds."""

from __future__ import annotations

from typing import Any

import pytest
from harness.http_server import ROOT
from hypothesis import given
from hypothesis import strategies as st

from api.jobs.job_builder import JobTemplates, make_submission
from api.jobs.request import JobRequest, parse
from api.jobs.resolve import resolve_for_model
from shared.config import models_file
from shared.config.adapters import Adapter
from shared.errors import InvalidRequest
from shared.queue import Submission

CATALOG = models_file.load(ROOT / "models.toml")
AT_MS = 1_800_000_000_000
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "width": st.sampled_from([32, 64]),
    "height": st.sampled_from([32, 64]),
    "n": st.integers(1, 2),
    "steps": st.integers(1, 3),
    "guidance_scale": st.sampled_from([0, 1.5, 4]),
    "step_cache": st.sampled_from(["off", "light", {"every": 3}]),
    "reproducible": st.booleans(),
    "output_format": st.sampled_from(["png", "webp", "mp4"]),
    "output_quality": st.integers(80, 81),
    "embed_parameters": st.booleans(),
    "on_deadline": st.sampled_from(["expire", "run"]),
}
OWN: dict[str, st.SearchStrategy[Any]] = {
    "negative_prompt": st.text("ab", max_size=9),
    "prompt_2": st.text("ab", min_size=1, max_size=9),
    "seed": st.integers(0, 9),
    "priority": st.sampled_from(["interactive", "bulk"]),
    "deadline_s": st.sampled_from([1, 2.5]),
    "metadata": st.dictionaries(st.sampled_from(["a", "b"]), st.text("xy")),
    "batch_id": st.sampled_from(["b1", "b2"]),
}
BODIES = st.fixed_dictionaries(
    {"model": st.just("demo"), "prompt": st.text("ab", min_size=1, max_size=9)}, optional=SHARED | OWN
)


def built(request: JobRequest, tenant: str = "default") -> Submission:
    """Return the submission of a request, or raise the fault of it."""
    return make_submission(resolve_for_model(request, CATALOG.get(request.model), tenant, AT_MS), CATALOG)


def comparable(submission: Submission, request: JobRequest) -> tuple[Any, ...]:
    """Return all of a submission but what differs between two of one request."""
    chosen = {"id", "created_at_ms"} | ({"seed"} if request.seed is None else set())
    return submission.job.model_dump(exclude=chosen), submission.signature, submission.max_batch, submission.window_ms


@given(st.lists(BODIES, min_size=2, max_size=6))
def test_a_copy_equals_the_job_that_the_checks_build(bodies: list[dict[str, Any]]) -> None:
    templates = JobTemplates(CATALOG)
    for request in map(parse, [*bodies, *bodies]):
        copied = templates.submission(request, "default", 0)
        try:
            whole = built(request)
        except InvalidRequest:
            assert copied is None
            continue
        if copied is not None:
            assert comparable(copied, request) == comparable(whole, request)
        templates.keep(request, whole)
        assert templates.submission(request, "default", 0) is not None


def test_a_copy_has_an_id_a_tenant_and_previews_of_its_own() -> None:
    templates, request = JobTemplates(CATALOG), parse({"model": "demo", "prompt": "a"})
    first = built(request)
    templates.keep(request, first)
    copied = templates.submission(request, "another", 3)
    assert copied is not None
    assert (copied.job.tenant, copied.job.previews) == ("another", 3)
    assert len({first.job.id, copied.job.id}) == len({first.job.seed, copied.job.seed}) == 2


@pytest.mark.parametrize(
    "changes",
    [
        *({"image": "job_1"}, {"image": ""}, {"images": ["job_1"]}, {"mask": "job_1"}, {"last_image": ""}),
        {"controls": [{"id": "c", "image": "job_1"}]},
        {"output": {"bucket": "mine"}},
        {"webhook": "https://example.com"},
        {"webhook_events": ["job.failed"]},
        {"steps": 3},
        {"batch_id": "batch_" + 26 * "0"},
        {"prompt": 5000 * "a"},
        {"seed": 2**63 - 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_request_with_other_fields_or_faults_has_no_copy(changes: dict[str, Any]) -> None:
    templates, body = JobTemplates(CATALOG), {"model": "demo", "prompt": "a", "steps": 2}
    templates.keep(parse(body), built(parse(body)))
    changed = parse(body | changes)
    assert templates.submission(changed, "default", 0) is None


def test_uploaded_adapters_are_looked_up_for_each_job() -> None:
    templates, request = JobTemplates(CATALOG), parse({"model": "demo", "prompt": "a"})
    whole = built(request)
    uploaded = whole.job.model_copy(update={"adapters": (Adapter(id="adapter_" + 26 * "0"),)})
    templates.keep(request, Submission(uploaded, whole.signature, whole.window_ms, whole.max_batch))
    assert templates.submission(request, "default", 0) is None
