"""One program per peer. Each runs with the Python of its peer, in which this project's packages are visible too."""
