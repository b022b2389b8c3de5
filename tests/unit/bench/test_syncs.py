"""The table of waits for the device, per noise scheduler."""

from __future__ import annotations

import pytest

from bench.engine.syncs import table


@pytest.mark.slow
def test_the_table_has_a_row_for_each_noise_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    table.main(["--shapes", "flux", "--rows", "2"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| flux")]
    assert [row[1] + "Scheduler" for row in rows] == list(table.NOISE_SCHEDULERS["flux"])
    assert all(row[2:4] == ["0", "0"] and int(row[4]) > 0 for row in rows)
