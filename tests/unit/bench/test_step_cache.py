"""Figures of the benchmark of step caching."""

from PIL import Image

from bench.step_cache import CachedTurn, body, figures_of
from demo.checker import matches
from demo.drawings import SQUARE_SIZE, draw, parse


def image_of(number: int) -> Image.Image:
    return draw(parse(str(body(number, 50, "off")["prompt"])), SQUARE_SIZE, seed=number)


def test_the_figures_compare_images_of_the_same_job() -> None:
    """Only jobs that both ways finished; the gain is that within each turn."""
    red = Image.new("RGB", SQUARE_SIZE, "red")
    off = [CachedTurn(rate, {at: image_of(at) for at in range(4)}, 0, 8.0) for rate in (1.0, 2.0, 4.0)]
    fast = [CachedTurn(rate, {0: image_of(0), 1: red, 9: image_of(9)}, 28, 8.0) for rate in (2.0, 4.0, 6.0)]
    figures = figures_of({"medium": fast, "off": off}, "medium")
    assert (figures["gain"], figures["skipped_steps"]) == (2.0, 28)
    assert figures["prompts_right"] == {"off": 1.0, "medium": 0.667}
    assert figures["psnr_db"]["least"] < 20 < figures["psnr_db"]["median"]


def test_jobs_repeat_the_held_out_prompts_with_new_seeds() -> None:
    assert matches(image_of(3), str(body(3, 50, "off")["prompt"]))
    assert body(3, 50, "off")["seed"] != body(59, 50, "off")["seed"]
