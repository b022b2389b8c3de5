"""Decisions about the links of jobs to those that they wait for."""

from __future__ import annotations

import pytest

from shared.queue.maintenance.parent_links import ended_parents, is_link_lost


@pytest.mark.parametrize(
    ("links", "is_telling", "lost"),
    [
        ((("queued", "1", None),), False, False),
        ((("running", None, None),), False, True),
        ((("running", None, "1"),), True, True),
        ((("queued", "1", None), ("queued", None, None)), True, True),
        ((("failed", None, "1"),), True, False),
        ((("succeeded", None, None),), True, True),
        ((("succeeded", "1", None),), False, True),
        (((None, None, None),), True, False),
        (((None, "1", None),), False, True),
        (((None, None, None), ("queued", None, None)), True, False),
    ],
    ids=[
        "it waits",
        "it does not wait",
        "it is told of an earlier end",
        "it waits for one of two",
        "it is yet to be told",
        "others are yet to be told",
        "it waits for one that has ended",
        "whether it is told of one that is gone is unknown",
        "one is gone",
        "one of two is gone",
    ],
)
def test_when_a_link_is_lost(links: tuple[tuple[str | None, ...], ...], is_telling: bool, lost: bool) -> None:
    assert is_link_lost(int(is_telling), *(value for link in links for value in link)) is lost


def test_which_parents_have_ended() -> None:
    replies = (0, "queued", None, None, "failed", None, None, None, None, None)
    assert ended_parents(("a", "b", "c"), replies) == "b=failed c=gone"
