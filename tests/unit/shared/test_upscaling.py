"""Sides of upscaled images and videos."""

from __future__ import annotations

import pytest

from shared.config.upscaling import rounded_side, source_side, upscaled_side


@pytest.mark.parametrize(
    ("side", "factor", "cell", "result"),
    [
        (480, 2, 16, 960),
        (490, 2, 16, 960),  # cut to whole values of latents
        (480, 4, 16, 1920),
        (480, 2.25, 16, 1088),  # 30 values become 33.75, rounded
        (854, 2.25, 16, 1920),
        (64, 2.25, 16, 128),  # 4.5 values, rounded to the even number as the pipeline does
        (12, 2.25, 16, 0),
    ],
)
def test_a_result_has_whole_values_of_latents(side: int, factor: float, cell: int, result: int) -> None:
    assert upscaled_side(side, factor, cell) == result


@pytest.mark.parametrize(
    ("side", "factor", "source", "made"),
    [
        (960, 2, 480, 960),
        (1000, 4, 240, 960),
        (1088, 2.25, 480, 1088),
        (1920, 2.25, 848, 1920),
        (160, 2.25, 64, 128),  # of no source: 4 values become 4, and 5 become 6
        (31, 2.25, 0, 0),
    ],
)
def test_a_side_that_no_source_makes_is_rounded_down(side: int, factor: float, source: int, made: int) -> None:
    assert (source_side(side, factor, 16), rounded_side(side, factor, 16)) == (source, made)


@pytest.mark.parametrize("factor", [2, 2.25, 4])
def test_the_source_of_each_result_makes_it(factor: float) -> None:
    for side in range(16, 2000, 16):
        result = upscaled_side(side, factor, 16)
        assert upscaled_side(source_side(result, factor, 16), factor, 16) == result
