"""PEFT's values by layer in a file's metadata, such as `alpha_pattern`: layers by the ends of their names."""

import re
from collections.abc import Mapping
from typing import Any

from shared.errors import AdapterUnavailable

_NAME = re.compile(r"\^?(?:\w|\\?\.)+\$?")


def value_of(settings: Mapping[str, Any], name: str, path: str, default: Any) -> Any:
    """Return the value of the layer `path` in the mapping called `name`, or the default.

    PEFT takes the keys for regular expressions, and writes names. Those of files that anyone uploads could keep an
    expression busy for hours, which would hold the whole process: other expressions raise `AdapterUnavailable`.
    """
    values = settings.get(name) or {}
    if not isinstance(values, Mapping):
        raise AdapterUnavailable(f"its {name} is no mapping of layers")
    for key, value in values.items():
        if not _NAME.fullmatch(key):
            raise AdapterUnavailable(f"its {name} has {key[:80]!r}, which is no name of a layer")
        end = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if path == end or (path.endswith(f".{end}") and not key.startswith("^")):
            return value
    return default
