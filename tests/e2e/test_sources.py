"""A pipeline of jobs that are submitted together, each of which starts from the result of the one before."""

from __future__ import annotations

from collections.abc import Callable

from e2e.conftest import Stack


def test_jobs_of_a_pipeline_make_what_they_make_one_after_the_other(make_stack: Callable[..., Stack]) -> None:
    """The workers are killed in the middle, and another one goes on."""
    stack = make_stack(lease_ms="2000").start(workers=0)
    first = stack.submit(prompt="a red circle on a blue ground, left", seed=1, steps=4, n=2, reproducible=True)
    second = {"prompt": "a green cross", "seed": 2, "steps": 4, "strength": 0.5, "reproducible": True}
    third = {**second, "prompt": "a blue square", "seed": 3}
    waiting = stack.submit(**second, image={"job": first, "artifact": 1})
    last = stack.submit(**third, image=waiting)
    killed = stack.worker()
    stack.read(f"/v1/jobs/{first}", wait="10")
    killed.kill()
    stack.worker()
    made = stack.finish(last)
    assert made["status"] == "succeeded", made["error"]
    urls = [artifact["url"] for artifact in stack.job(first)["artifacts"]]
    again = stack.submit(**second, image=urls[1])
    stack.finish(again)
    expected = stack.finish(stack.submit(**third, image=again))

    def data(job: dict[str, object]) -> bytes:
        return stack.client.get(str(job["artifacts"][0]["url"])).content  # type: ignore[index]

    assert data(made) == data(expected)
    assert data(stack.job(waiting)) != data(made)
