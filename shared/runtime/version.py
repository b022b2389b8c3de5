"""The version that the distribution was installed with."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("fusequeue")
except PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = "0"
