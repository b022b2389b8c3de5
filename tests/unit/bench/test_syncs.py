"""The pretended device counts what a real one would be asked to do, and the table shows it per noise scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from bench.engine.syncs import table
from bench.engine.syncs.pretended_device import DEVICE, PretendedDevice


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    with torch.no_grad(), PretendedDevice() as pretended:
        yield pretended


NOTHING: dict[str, int] = {}


@pytest.mark.parametrize(
    ("use", "waits", "launches"),
    [
        (lambda numbers: numbers * 2, NOTHING, 1),
        (lambda numbers: numbers[1:], NOTHING, 0),
        (lambda numbers: numbers * torch.tensor(2.0), NOTHING, 1),
        (lambda numbers: numbers.sum().item(), {"read of a value": 1}, 2),
        (lambda numbers: numbers[0] if numbers[0] > 1 else None, {"read of a value": 1}, 2),
        (lambda numbers: torch.arange(9)[numbers[0].long()], {"read of a value": 1}, 2),
        (lambda numbers: numbers.nonzero(), {"nonzero": 1}, 1),
        (lambda numbers: numbers[numbers > 1], {"index by a mask": 1}, 2),
        (lambda numbers: numbers[torch.tensor([0, 1])], {"index by an index that is elsewhere": 1}, 1),
        (lambda numbers: numbers.cpu(), {"copy to the host": 1}, 1),
        (lambda numbers: numbers.tolist(), {"copy to the host": 1}, 1),
        (lambda numbers: torch.zeros(3).to(numbers.device), {"copy to the device": 1}, 1),
        (lambda numbers: torch.zeros(3).to(numbers.device, non_blocking=True), NOTHING, 1),
        (lambda numbers: torch.tensor([1.0], device=numbers.device), {"copy to the device": 1}, 1),
        (lambda numbers: torch.ones(2, device=numbers.device), NOTHING, 1),
        (lambda numbers: torch.zeros(3) + 1, NOTHING, 0),
    ],
)
def test_waits_and_launches_are_counted(
    use: Callable[[torch.Tensor], object], waits: dict[str, int], launches: int, device: PretendedDevice
) -> None:
    numbers = torch.arange(3.0).to(DEVICE)
    device.reset()
    use(numbers)
    assert (dict(device.waits), device.launches) == (waits, launches)


def test_values_are_those_of_the_cpu_and_changes_in_place_are_kept(device: PretendedDevice) -> None:
    numbers = torch.zeros(4, device=DEVICE)
    numbers[1:].add_(torch.tensor([1.0, 2.0, 3.0]).to(DEVICE))
    assert numbers.device == DEVICE
    assert numbers.tolist() == [0, 1, 2, 3]


def test_tensors_of_two_devices_do_not_mix(device: PretendedDevice) -> None:
    for operation in (lambda one, other: one + other, lambda one, other: torch.cat([one, other])):
        with pytest.raises(RuntimeError, match="same device"):
            operation(torch.zeros(2, device=DEVICE), torch.zeros(2))


def test_the_table_has_a_row_for_each_noise_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    table.main(["--shapes", "flux", "--rows", "2"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| flux")]
    assert [row[1] + "Scheduler" for row in rows] == list(table.NOISE_SCHEDULERS["flux"])
    assert all(row[2:4] == ["0", "0"] and int(row[4]) > 0 for row in rows)
