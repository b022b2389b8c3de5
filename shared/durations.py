"""Durations as people write them in commands and headers."""

import re

_DURATION = re.compile(r"(?=.)(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")
_SECONDS = (86_400, 3600, 60, 1)


def duration_s(text: str) -> int | None:
    """Return the seconds of a duration such as `90d`, `1h30m` or `45s`; None of any other text."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    return sum(int(count) * seconds for count, seconds in zip(match.groups("0"), _SECONDS, strict=True))
