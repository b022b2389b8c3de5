"""Ids sort in the order in which a process makes them."""

from __future__ import annotations

from shared.runtime.clock import id_time_ms, new_id, now_ms


def test_ids_of_one_millisecond_sort_in_the_order_of_their_calls() -> None:
    at_ms = now_ms()
    ids = [new_id("job", at_ms) for _ in range(2_000)]
    assert ids == sorted(set(ids))
    assert {id_time_ms(job_id) for job_id in ids} == {at_ms}
