"""Delays between attempts."""

MOST_DOUBLINGS = 64


def backoff_s(failures: int, first_s: float, max_s: float) -> float:
    """Return the delay after the last of `failures` failures in a row: it doubles with each, up to `max_s`.

    Callers that many processes run at once multiply it by a random number.
    """
    return min(max_s, first_s * 2.0 ** min(max(1, failures) - 1, MOST_DOUBLINGS))
