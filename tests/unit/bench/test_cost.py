import itertools

import pytest

from bench.cost import figures_of, part_of, requests, table


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("/venv/bin/python -m worker.engine.process 7", "engine"),
        ("/venv/bin/python -P -m worker --metrics-port 9100", "worker"),
        ("/venv/bin/python -P -m worker", "worker"),
        ("/venv/bin/python -P -m worker.chores", "chores"),
        ("/venv/bin/python -P -m api --port 8000", "api"),
        ("/usr/bin/redis-server 127.0.0.1:6379", "redis"),
        ("/venv/bin/python -m cli.main up --data-dir data", "supervisor"),
        ("/venv/bin/python -P -m shared.runtime.parent_process 12 15", "others"),
    ],
)
def test_a_process_belongs_to_the_part_of_its_command(command: str, part: str) -> None:
    assert part_of(command) == part


def test_figures_are_medians_and_exclude_the_model() -> None:
    turns = [
        ({"api": 4.0, "engine": 60.0}, 40.0),
        ({"api": 6.0, "engine": 70.0}, 50.0),
        ({"api": 5.0, "engine": 90.0, "redis": 1.0}, 60.0),
    ]
    figures = figures_of(turns)
    assert figures == {
        "api": 5.0,
        "engine": 70.0,
        "redis": 0.0,
        "model": 50.0,
        "engine, less model": 20.0,
        "service, less model": 26.0,
    }
    assert "| engine, less model | 20.0 |" in table({"8 clients": figures})


def test_no_prompt_repeats_within_or_between_turns() -> None:
    texts = [body["prompt"] for turn in (1, 2) for body in itertools.islice(requests(turn), 50)]
    assert len(set(texts)) == len(texts)
