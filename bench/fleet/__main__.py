"""`python -m bench.fleet`: scaling policies compared, or with `--replays` what makes a fleet too large."""

from __future__ import annotations

import argparse

from bench.fleet.policy_comparison import print_comparisons
from bench.fleet.replay_report import print_replays


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replays", action="store_true", help="replay cases instead of comparing policies")
    options = parser.parse_args(argv)
    if options.replays:
        print_replays(options.seed)
    else:
        print_comparisons(options.seed)


if __name__ == "__main__":
    main()
