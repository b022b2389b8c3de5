"""Which failures of a step count against its batch, and how often it is tried."""

from __future__ import annotations

import pytest

from api.protocols.openai.batches.batch_failures import LASTING_TRIES, retry_ms, step_failure
from api.protocols.openai.batches.batch_files import TRIES
from shared.errors import (
    Conflict,
    NotFound,
    Overloaded,
    RedisFull,
    RedisUnavailable,
    ScriptFailed,
    StorageRefused,
    StorageUnavailable,
)


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (RedisUnavailable("down"), None),
        (RedisFull("full"), None),
        (Overloaded("no room"), None),
        (ScriptFailed("a fault"), TRIES),
        (StorageUnavailable("bucket 'private' responded with 500"), TRIES),
        (StorageRefused("bucket 'private' refused it"), LASTING_TRIES),
        (NotFound("no such object in storage"), TRIES),
        (Conflict("odd"), TRIES),
        (TimeoutError(), TRIES),
    ],
)
def test_outages_do_not_count_and_lasting_failures_count_more(error: Exception, tries: int | None) -> None:
    failure = step_failure(error)
    assert (failure and failure.tries) == tries
    assert failure is None or "private" not in failure.reason


def test_tries_are_spread_over_a_quarter_of_an_hour() -> None:
    """Longer than a restart of the storage takes; none is later than a minute."""
    waits = [retry_ms(failures) for failures in range(1, TRIES)]
    assert 15 * 60_000 <= sum(waits) <= 20 * 60_000
    assert max(waits) < 60_000
