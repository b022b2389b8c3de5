"""The engine as a library: prompts in, images out, in this process."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.http_server import ROOT
from harness.scorers import save_scorer
from harness.videos import a_plain_video
from harness.waiting import wait_until
from PIL import Image
from tiny import registry
from typer.testing import CliRunner

import fusequeue
from cli.main import app
from library import AsyncEngine, Engine, GenerationFailed, Result
from shared.errors import ConfigurationError, InvalidRequest, ModelUnavailable
from worker.engine.scheduling.batch_scheduler import BatchScheduler

DEMO = ROOT / "demo" / "model"
CIRCLE = "a red circle on a blue ground, left"
PROMPTS = (CIRCLE, "a green square on a white ground, top", "a yellow triangle on a black ground, right")
FIELDS: dict[str, Any] = {"width": 64, "height": 64, "steps": 6, "seed": 7}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(DEMO, max_batch=4, device="cpu") as started:
        yield started


def pixels(image: Any) -> np.ndarray:
    return np.asarray(image, dtype=np.int16)


def difference(first: Any, second: Any) -> int:
    return int(np.abs(pixels(first) - pixels(second)).max())


def test_images_are_in_the_order_of_the_prompts_and_equal_solo_ones(engine: Engine) -> None:
    images = engine.generate(PROMPTS, progress=False, **FIELDS)
    assert [image.size for image in images] == [(64, 64)] * 3
    for prompt, image in zip(PROMPTS, images, strict=True):
        (solo,) = engine.generate(prompt, progress=False, **FIELDS)
        assert difference(image, solo) <= 2
        assert all(difference(image, other) > 20 for other in images if other is not image)


def test_the_random_numbers_of_the_program_are_those_without_an_engine(engine: Engine) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    engine.generate(CIRCLE, progress=False, **FIELDS)
    assert torch.equal(torch.rand(4), expected)


def test_reproducible_images_are_bit_identical(engine: Engine) -> None:
    together = engine.generate(PROMPTS, progress=False, reproducible=True, **FIELDS)
    (alone,) = engine.generate(CIRCLE, progress=False, reproducible=True, **FIELDS)
    assert difference(together[0], alone) == 0


def test_the_best_candidates_of_an_item_are_returned(tmp_path: Path) -> None:
    best_of = {"candidates": 6, "keep": 2}
    with Engine(DEMO, max_batch=8, device="cpu", scorer=str(save_scorer(tmp_path))) as rated:
        (result,) = rated.stream([CIRCLE], best_of=best_of, **FIELDS)
        assert result.error is None
        assert (len(result.images), len(result.batching.dropped)) == (2, 4)
        candidates, scores = zip(*((output.candidate, output.score) for output in result.outputs), strict=True)
        assert scores[0] >= scores[1]
        (alone,) = rated.generate(CIRCLE, progress=False, **{**FIELDS, "seed": FIELDS["seed"] + candidates[0]})
        assert difference(result.images[0], alone) <= 2


def test_items_with_other_steps_share_forwards(engine: Engine) -> None:
    items = [{"prompt": prompt, "steps": steps} for prompt, steps in zip(PROMPTS, (4, 9, 12), strict=True)]
    results = {result.index: result for result in engine.stream(items, seed=1)}
    assert [results[at].job.steps for at in range(3)] == [4, 9, 12]
    assert max(result.batching.mean_rows for result in results.values()) > 2
    assert all(result.error is None and result.device_seconds > 0 for result in results.values())


def test_a_stream_reads_prompts_as_items_end_and_cancels_the_rest(engine: Engine) -> None:
    read = itertools.count()
    results = []
    stream = engine.stream(({"prompt": CIRCLE, "seed": number} for number in read), n=2, **FIELDS | {"seed": None})
    for result in stream:
        results.append(result)
        if len(results) == 6:
            break
    stream.close()
    assert len({result.job.seed for result in results}) == 6
    assert all(len(result.images) == 2 for result in results)
    assert next(read) <= 6 + 2 * 4 // 2 + 1, "two batches ahead at most"
    (image,) = engine.generate(CIRCLE, progress=False, **FIELDS)
    assert image.size == (64, 64)


def test_an_item_fails_alone(engine: Engine) -> None:
    items = [CIRCLE, {"prompt": CIRCLE, "steps": 100_000}, {"prompt": CIRCLE, "colour": "red"}]
    with pytest.raises(GenerationFailed, match="2 of 3 failed; item 1: steps must be 1 to 1000, not 100000") as raised:
        engine.generate(items, progress=False, **{**FIELDS, "steps": 4})
    first, second, third = raised.value.results
    assert first.error is None
    assert difference(first.images[0], engine.generate(CIRCLE, progress=False, **{**FIELDS, "steps": 4})[0]) <= 2
    assert isinstance(second.error, InvalidRequest)
    assert (third.error.param, third.images) == ("colour", [])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"steps": "many"}, "steps"),
        ({"colour": "red"}, "colour"),
        ({"webhook": "https://example.org"}, "webhook"),
        ({"image": 7}, "image"),
        ({"image": "no/such.png"}, "image"),
        ({"image": b"<html>"}, "image"),
        ({"model": "sdxl"}, "model"),
    ],
)
def test_a_fault_of_all_items_is_raised_before_the_first(engine: Engine, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        engine.generate(PROMPTS, progress=False, **fields)
    assert raised.value.param == param


def test_an_image_is_given_in_any_form(engine: Engine, tmp_path: Path) -> None:
    (source,) = engine.generate(CIRCLE, progress=False, **FIELDS)
    source.save(tmp_path / "a.png")
    forms = (source, tmp_path / "a.png", str(tmp_path / "a.png"), (tmp_path / "a.png").read_bytes(), np.asarray(source))
    changed = [engine.generate(PROMPTS[1], image=form, strength=0.5, progress=False, **FIELDS)[0] for form in forms]
    assert all(difference(image, changed[0]) <= 2 for image in changed)
    mask = Image.new("L", source.size)
    mask.paste(255, (32, 0, 64, 64))
    (painted,) = engine.generate(PROMPTS[1], image=source, mask=mask, progress=False, **FIELDS)
    assert difference(painted.crop((0, 0, 32, 64)), source.crop((0, 0, 32, 64))) == 0
    assert difference(painted, source) > 20


def test_a_video_is_given_as_a_path_or_bytes(tmp_path: Path) -> None:
    registry.save_tiny("wan-2.1-t2v", tmp_path / "wan")
    (tmp_path / "a.mp4").write_bytes(a_plain_video("green", 5))
    fields: dict[str, Any] = {**FIELDS, "strength": 0.5, "steps": 2, "progress": False}
    with Engine(tmp_path / "wan", tasks=("text_to_video", "video_to_video"), device="cpu") as engine:
        forms = (tmp_path / "a.mp4", str(tmp_path / "a.mp4"), (tmp_path / "a.mp4").read_bytes())
        videos = [engine.generate(CIRCLE, video=form, **fields)[0] for form in forms]
        with pytest.raises(InvalidRequest, match="video: it must be a path or bytes, not Image"):
            engine.generate(CIRCLE, video=Image.new("RGB", (64, 64)), **fields)
        (other,) = engine.generate(CIRCLE, video=a_plain_video("red", 5), **fields)
    assert [(len(video.frames), video.job.fps) for video in videos] == [(5, 8)] * 3
    assert all(difference(video.frames[0], videos[0].frames[0]) <= 2 for video in videos)
    assert difference(other.frames[0], videos[0].frames[0]) > 2


def test_progress_and_previews_are_passed_on(engine: Engine) -> None:
    steps, previews = [], []
    results = list(
        engine.stream(
            [CIRCLE],
            previews=2,
            on_progress=lambda index, step, total: steps.append((index, step, total)),
            on_preview=lambda index, image: previews.append((index, image.size)),
            **FIELDS,
        )
    )
    assert results[0].error is None
    assert steps[-1] == (0, 6, 6)
    assert len(previews) == 2


def test_results_are_saved_in_the_format_of_the_job(engine: Engine, tmp_path: Path) -> None:
    (result,) = engine.stream([CIRCLE], n=2, output_format="webp", **FIELDS)
    paths = result.save(tmp_path / "new")
    assert [path.name for path in paths] == ["00000-0.webp", "00000-1.webp"]
    assert [path.name for path in (tmp_path / "new").iterdir() if path.name[0] == "."] == []
    paths[1].write_bytes(b"mine")
    paths[0].unlink()
    with pytest.raises(FileExistsError, match=r"00000-1\.webp exists; .* overwrite=True"):
        result.save(tmp_path / "new")
    assert (paths[1].read_bytes(), paths[0].exists()) == (b"mine", False)
    assert result.save(tmp_path / "new", overwrite=True) == paths
    with Image.open(paths[1]) as image:
        assert image.size == (64, 64)
    assert result._repr_png_().startswith(b"\x89PNG")
    assert repr(result) == "<Result 0: model, seed 7, 2 outputs>"


async def test_the_asynchronous_engine_leaves_the_loop_to_others() -> None:
    async def prompts() -> AsyncIterator[str]:
        for prompt in PROMPTS:
            await asyncio.sleep(0)
            yield prompt

    async with AsyncEngine(DEMO, max_batch=4, device="cpu") as engine:
        images = await engine.generate(PROMPTS, progress=False, **FIELDS)
        streamed: dict[int, Result] = {result.index: result async for result in engine.stream(prompts(), **FIELDS)}
        assert [difference(streamed[at].images[0], image) <= 2 for at, image in enumerate(images)] == [True] * 3
        with pytest.raises(GenerationFailed, match="1 of 2 failed"):
            await engine.generate([CIRCLE, {"prompt": "", "n": 0}], **FIELDS)


def test_a_closed_engine_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    engine = Engine(DEMO, device="cpu")
    engine.generate(CIRCLE, image=Image.new("RGB", (64, 64)), progress=False, **FIELDS)
    engine.close()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    engine.close()
    assert left == set()
    with pytest.raises(ConfigurationError, match="the engine is closed"):
        next(engine.stream([CIRCLE]))


def test_an_engine_that_is_interrupted_while_it_loads_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in a notebook, where nothing has the engine that could be closed."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr("worker.engine.engine.Engine.warm_up", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Engine(DEMO, device="cpu")
    wait_until(lambda: set(threading.enumerate()) <= before, "its threads have ended")


def test_a_process_with_an_engine_prints_no_warnings_of_libraries() -> None:
    """Such as torchao's, which diffusers and transformers import in each."""
    script = "from fusequeue import Engine; from diffusers import StableDiffusionPipeline"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_items_end_with_an_engine_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(DEMO, device="cpu")

    def fail(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(BatchScheduler, "admit", fail)
    with pytest.raises(GenerationFailed, match="the engine ended"):
        engine.generate(CIRCLE, progress=False, **FIELDS)
    engine.close()


def test_an_entry_of_a_models_file_has_its_defaults(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f'[[model]]\nid = "mine"\nsource = "{DEMO}"\ndefaults = {{ width = 64, height = 64, steps = 3 }}\n')
    with Engine("mine", models_file=file, device="cpu") as engine:
        (result,) = engine.stream([CIRCLE])
        assert (engine.models, result.job.steps, result.images[0].size) == (["mine"], 3, (64, 64))


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("nothing", "'nothing' is no folder.* and no id of the hub"),
        (ROOT / "docs", "it has no model_index.json, nor modular_model_index.json"),
    ],
)
def test_what_is_no_model_is_refused_with_what_could_be(model: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        Engine(model, models_file=tmp_path / "none.toml")


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model").symlink_to(DEMO)
        shutil.copytree(DEMO, tmp_path / folder / "copy")
    with pytest.raises(ConfigurationError, match=r"two models have one name: 'copy' .*rename a folder, or use a mod"):
        Engine(tmp_path / "a" / "copy", tmp_path / "b" / "copy", device="cpu")
    file = tmp_path / "models.toml"
    file.write_text(
        f'[[model]]\nid = "one"\naliases = ["both"]\nsource = "{DEMO}"\n[[model]]\nid = "copy"\nsource = "{DEMO}"\n'
    )
    with pytest.raises(ConfigurationError, match="two models have one name: 'copy'"):
        Engine("one", "copy", tmp_path / "a" / "copy", models_file=file, device="cpu")
    with Engine(tmp_path / "a" / "model", tmp_path / "b" / "model", device="cpu") as engine:
        assert engine.models == ["model"], "the same folder is one model"


def test_a_model_that_cannot_be_loaded_is_an_error_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]}')
    before = set(threading.enumerate())
    with pytest.raises(ModelUnavailable, match=r"no folder vae|cannot be loaded"):
        Engine(tmp_path, device="cpu")
    wait_until(lambda: set(threading.enumerate()) <= before, "its threads have ended")


def test_the_client_package_has_both_engines() -> None:
    assert (fusequeue.Engine, fusequeue.AsyncEngine) == (Engine, AsyncEngine)


def test_the_command_saves_images_and_fails_for_a_prompt_that_fails(tmp_path: Path) -> None:
    arguments = ["generate", "--model", str(DEMO), "--out", str(tmp_path), "--size", "64x64", "--steps", "3"]
    ran = CliRunner().invoke(app, [*arguments, "--seed", "3", CIRCLE, "-"], input=f"{PROMPTS[1]}\n\n")
    assert ran.exit_code == 0, ran.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000-0.png", "00001-0.png"]
    first = (tmp_path / "00000-0.png").read_bytes()
    (tmp_path / "00007-1.webp").touch()
    again = CliRunner().invoke(app, [*arguments, "--seed", "4", CIRCLE])
    assert (again.exit_code, (tmp_path / "00008-0.png").is_file()) == (0, True), again.output
    assert (tmp_path / "00000-0.png").read_bytes() == first
    lacking = CliRunner().invoke(app, [*arguments, "--device", "cuda:99", CIRCLE])
    assert (lacking.exit_code, "device: 'cuda:99'" in lacking.output) == (2, True)
    refused = CliRunner().invoke(app, [*arguments[:-1], "100000", CIRCLE])
    assert (refused.exit_code, "steps must be 1 to 1000" in refused.output) == (2, True)
