"""Training images of the demo model, and the checker."""

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from demo.checker import Reading, matches, read
from demo.drawings import (
    COLOURS,
    PLACES,
    SHAPES,
    SQUARE_SIZE,
    WIDE_SIZE,
    Prompt,
    all_prompts,
    draw,
    draw_batch,
    parse,
    split_prompts,
)

SIZES = [SQUARE_SIZE, WIDE_SIZE]
RED_CIRCLE = Prompt("red", "circle", "blue", "left")


def jpeg(image: Image.Image) -> Image.Image:
    """Return the image after lossy compression."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return Image.open(io.BytesIO(file.getvalue()))


def noisy(image: Image.Image) -> Image.Image:
    """Return the image with mild, constant noise."""
    pixels = np.asarray(image)
    noise = np.random.default_rng(0).normal(0, 10, pixels.shape)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def blurred(image: Image.Image) -> Image.Image:
    """Return the image with edges a pixel wide."""
    return image.filter(ImageFilter.GaussianBlur(0.8))


@pytest.mark.parametrize(
    ("prompt", "caption"),
    [
        (RED_CIRCLE, "a red circle on a blue ground, left"),
        (Prompt("orange", "cross", "white", "top"), "an orange cross on a white ground, top"),
        (Prompt("white", "cross", "orange", None), "a white cross on an orange ground"),
    ],
)
def test_caption(prompt: Prompt, caption: str) -> None:
    """A caption contains the whole prompt and is parsed back to it."""
    assert prompt.caption() == caption
    assert parse(caption) == prompt


@pytest.mark.parametrize(
    "text", ["", "a cat", "a red circle", "a red star on a blue ground", "a red circle on a blue ground, far"]
)
def test_parse_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="not a caption"):
        parse(text)


def test_prompts_cover_the_vocabulary_once() -> None:
    """Each colour occurs on every other ground, in each shape and place, exactly once."""
    prompts = all_prompts()
    assert len(set(prompts)) == len(prompts) == 8 * 7 * len(SHAPES) * len(PLACES)
    assert all(prompt.colour != prompt.ground for prompt in prompts)


def test_held_out_prompts_are_never_trained_on() -> None:
    """The split is constant, holds out a tenth of the prompts, and has every word on both sides."""
    training, held_out = split_prompts()
    assert (training, held_out) == split_prompts()
    assert sorted([*training, *held_out], key=Prompt.caption) == sorted(all_prompts(), key=Prompt.caption)
    assert len(held_out) == 112
    for side in (training, held_out):
        assert {prompt.colour for prompt in side} == {prompt.ground for prompt in side} == set(COLOURS)
        assert {prompt.shape for prompt in side} == set(SHAPES)
        assert {prompt.place for prompt in side} == set(PLACES)


@pytest.mark.parametrize("size", SIZES)
def test_drawing_depends_only_on_prompt_size_and_seed(size: tuple[int, int]) -> None:
    """Another seed moves the shape."""
    assert draw(RED_CIRCLE, size, 3).tobytes() == draw(RED_CIRCLE, size, 3).tobytes()
    assert draw(RED_CIRCLE, size, 3).tobytes() != draw(RED_CIRCLE, size, 4).tobytes()
    assert draw(RED_CIRCLE, size, 3).size == size


def test_batch_has_images_in_order() -> None:
    """The n-th image of a batch has the n-th seed."""
    prompts = [RED_CIRCLE, replace(RED_CIRCLE, shape="cross")]
    batch = draw_batch(prompts, WIDE_SIZE, 7)
    assert batch.shape == (2, 64, 96, 3)
    assert np.array_equal(batch[1], np.asarray(draw(prompts[1], WIDE_SIZE, 8)))


@pytest.mark.parametrize("size", SIZES)
def test_checker_reads_every_prompt(size: tuple[int, int]) -> None:
    assert [p for n, p in enumerate(all_prompts()) if not matches(draw(p, size, n), p)] == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("degrade", [jpeg, noisy, blurred])
def test_checker_reads_degraded_images(size: tuple[int, int], degrade: Callable[[Image.Image], Image.Image]) -> None:
    """JPEG compression, mild noise and mild blur."""
    # Every eleventh prompt still covers each colour, shape, ground and place.
    prompts = all_prompts()[::11]
    assert [p for n, p in enumerate(prompts) if not matches(degrade(draw(p, size, n)), p)] == []


@pytest.mark.parametrize(
    "other",
    [
        replace(RED_CIRCLE, colour="orange"),
        replace(RED_CIRCLE, shape="square"),
        replace(RED_CIRCLE, ground="purple"),
        replace(RED_CIRCLE, place="center"),
        Prompt("blue", "circle", "red", "left"),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_checker_rejects_one_wrong_attribute(size: tuple[int, int], other: Prompt) -> None:
    assert not matches(draw(other, size, 0), RED_CIRCLE)


def test_any_place_matches_a_caption_without_one() -> None:
    assert all(
        matches(draw(replace(RED_CIRCLE, place=place), SQUARE_SIZE, 0), "a red circle on a blue ground")
        for place in PLACES
    )


def _two_shapes() -> Image.Image:
    left, right = draw(RED_CIRCLE, WIDE_SIZE, 0), draw(replace(RED_CIRCLE, place="right"), WIDE_SIZE, 0)
    left.paste(right.crop((48, 0, 96, 64)), (48, 0))
    return left


def _two_colours() -> Image.Image:
    image = draw(RED_CIRCLE, SQUARE_SIZE, 0)
    image.paste(draw(replace(RED_CIRCLE, colour="green"), SQUARE_SIZE, 0).crop((0, 0, 64, 32)), (0, 0))
    return image


@pytest.mark.parametrize(
    ("image", "reading"),
    [
        (Image.new("RGB", (64, 64), COLOURS["red"]), Reading(None, None, "red", None)),
        (Image.new("RGB", (64, 64), (128, 128, 128)), Reading(None, None, None, None)),
        (_two_shapes(), Reading("red", None, "blue", "center")),
        (_two_colours(), Reading(None, "circle", "blue", "left")),
    ],
    ids=["plain", "grey", "two shapes", "two colours"],
)
def test_checker_returns_none_for_unknown_attributes(image: Image.Image, reading: Reading) -> None:
    """Attributes outside the vocabulary are None rather than the nearest guess."""
    assert read(image) == reading


def test_checker_rejects_noise() -> None:
    """The output of an untrained model matches nothing."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert read(pixels).shape is None
