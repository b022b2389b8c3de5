"""Names of files of results, from the prompts of their jobs."""

import re
import unicodedata

SLUG_CHARS = 48


def slug(prompt: str) -> str:
    """Return the first words of a prompt as a part of a file name; empty if it has no letters or digits of ASCII."""
    ascii_prompt = unicodedata.normalize("NFKD", prompt.casefold()).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", ascii_prompt)[:SLUG_CHARS].strip("-")
