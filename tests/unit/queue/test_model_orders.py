"""Model orders: which of them a worker follows, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from shared.errors import Conflict
from shared.queue import Queue, WorkerInfo
from shared.queue.maintenance import model_orders
from shared.queue.maintenance.model_orders import ModelAction, ModelOrder, pins_in_the_way, pins_too_large
from worker.engine.protocol import MemoryOrder, MemoryOrders
from worker.model_availability import memory_orders

LOAD, UNLOAD, PIN = ModelAction.LOAD, ModelAction.UNLOAD, ModelAction.PIN
WORKER = WorkerInfo("w1", ("one", "two"), worker_pool="big")


def order(
    action: ModelAction, at: int, model: str = "one", pool: str | None = None, worker: str | None = None
) -> ModelOrder:
    return ModelOrder(f"order{at}", model, action, at, pool, worker)


def followed(at: int, model: str = "one", *, unload: bool = False) -> MemoryOrder:
    return MemoryOrder(model, unload, (at, f"order{at}"))


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([], MemoryOrders()),
        ([order(LOAD, 1)], MemoryOrders(last=(followed(1),))),
        ([order(LOAD, 1), order(UNLOAD, 2, pool="big")], MemoryOrders(last=(followed(2, unload=True),))),
        ([order(LOAD, 3), order(UNLOAD, 2, worker="w1")], MemoryOrders(last=(followed(3),))),
        ([order(LOAD, 1, pool="small"), order(PIN, 2, worker="w2")], MemoryOrders()),
        ([order(LOAD, 1, model="other")], MemoryOrders()),  # not in its models file
        ([order(PIN, 2, "two"), order(PIN, 1, pool="big")], MemoryOrders(pinned=("one", "two"))),
        ([order(PIN, 1), order(UNLOAD, 2, worker="w1")], MemoryOrders(("one",), (followed(2, unload=True),))),
    ],
)
def test_a_worker_follows_the_last_order_for_each_model_and_all_pins(
    orders: Sequence[ModelOrder], expected: MemoryOrders
) -> None:
    """Of those for itself, its worker pool and all workers."""
    assert memory_orders(orders, WORKER) == expected


@pytest.mark.parametrize(
    ("pin", "new", "in_the_way"),
    [
        (order(PIN, 1), order(UNLOAD, 2), True),
        (order(PIN, 1), order(UNLOAD, 2, worker="w1"), True),
        (order(PIN, 1, pool="big"), order(UNLOAD, 2), True),
        (order(PIN, 1, pool="big"), order(UNLOAD, 2, pool="big"), True),
        (order(PIN, 1, pool="big"), order(UNLOAD, 2, pool="small"), False),
        (order(PIN, 1, pool="big"), order(UNLOAD, 2, worker="w1"), True),
        (order(PIN, 1, pool="small"), order(UNLOAD, 2, worker="w1"), False),
        (order(PIN, 1, worker="w1"), order(UNLOAD, 2, pool="big"), True),
        (order(PIN, 1, worker="w1"), order(UNLOAD, 2, worker="w1"), True),
        (order(PIN, 1, worker="w2"), order(UNLOAD, 2, worker="w1"), False),
        (order(PIN, 1, "two"), order(UNLOAD, 2), False),
        (order(LOAD, 1), order(UNLOAD, 2), False),
    ],
)
def test_a_pin_is_in_the_way_of_orders_for_the_same_workers(pin: ModelOrder, new: ModelOrder, in_the_way: bool) -> None:
    assert bool(pins_in_the_way([pin], new, [WORKER])) is in_the_way


@pytest.mark.parametrize(
    ("sizes", "pins", "new", "refused"),
    [
        ({"one": 60, "two": 50}, [order(PIN, 1, "two")], order(PIN, 2), True),
        ({"one": 50, "two": 50}, [order(PIN, 1, "two")], order(PIN, 2), False),
        ({"one": 60}, [order(PIN, 1, "two")], order(PIN, 2), False),  # the worker says so later
        ({"one": 101}, [], order(PIN, 2), False),  # one above the budget has the device to itself
        ({"one": 60, "two": 50}, [order(PIN, 1, "two", pool="small")], order(PIN, 2), False),
        ({"one": 60, "two": 50}, [order(PIN, 1, "two")], order(PIN, 2, pool="small"), False),
    ],
)
def test_pins_that_do_not_fit_together_are_refused(
    sizes: Mapping[str, int], pins: Sequence[ModelOrder], new: ModelOrder, refused: bool
) -> None:
    worker = WorkerInfo("w1", ("one", "two"), worker_pool="big", models_limit_bytes=100, model_bytes=dict(sizes))
    reason = pins_too_large(pins, new, [worker])
    assert (reason is not None) is refused
    assert reason is None or ("worker w1" in reason and "unpin one" in reason)


async def test_orders_are_bounded_and_those_for_ended_workers_forgotten(
    fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_orders, "MAX_ORDERS", 2)
    await fake_queue.workers.heartbeat(WORKER)
    await fake_queue.model_orders.put(order(PIN, 1, worker="w1"))
    await fake_queue.model_orders.put(order(PIN, 2, worker="ended"))
    await fake_queue.model_orders.put(order(LOAD, 3))
    with pytest.raises(Conflict, match="at most 2"):
        await fake_queue.model_orders.put(order(LOAD, 4, model="two"))
    await fake_queue.model_orders.put(order(UNLOAD, 5))
    assert [one.id for one in await fake_queue.model_orders.all()] == ["order1", "order5"]
