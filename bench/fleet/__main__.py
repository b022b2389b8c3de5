"""`python -m bench.fleet`: scaling policies compared, or with `--replays` what makes a fleet too large."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.fleet import replay_report
from bench.fleet.policy_comparison import print_comparisons


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replays", action="store_true", help="replay cases instead of comparing policies")
    parser.add_argument("--record", type=Path, help="write the figures of the replays to a JSON file")
    parser.add_argument("--before", type=Path, help="figures of earlier code, to be shown beside them")
    parser.add_argument("--plot", type=Path, help="write a plot of the replays to an SVG file")
    options = parser.parse_args(argv)
    if not options.replays:
        return print_comparisons(options.seed)
    records = {"before": replay_report.read(options.before)} if options.before else {}
    records["now"] = replay_report.measure_all(options.seed)
    if options.record:
        replay_report.write(options.record, records["now"])
    replay_report.print_table(records)
    if options.plot:
        options.plot.write_text(replay_report.plot(records), "utf-8")
    return None


if __name__ == "__main__":
    main()
