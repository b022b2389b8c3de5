"""Models that need a package which is not installed: named with what to do, not with the text of a library."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from harness.engine import DIFFUSERS_AND_NUMPY, a_spec

from shared.errors import LoadPostponed, ModelUnavailable
from worker.engine.checks.memory_fit import check_packages
from worker.engine.pipelines.loading import load, load_error
from worker.engine.weights import missing_packages
from worker.engine.weights.missing_packages import lacking_package, missing_package

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

# The first lines of what the libraries say.
TRANSFORMERS = (
    "\nX requires the Torchvision library but it was not found in your environment. Check out the instructions"
)
DIFFUSERS = "Make sure to install scipy if you want to use beta sigmas."
FALLBACK = "`tiktoken` is required to read a `tiktoken` file. Install it with `pip install tiktoken`."


@pytest.mark.parametrize(
    ("error", "installed", "package"),
    [
        (ImportError(TRANSFORMERS), "", "torchvision"),
        (ImportError(TRANSFORMERS), "torchvision", None),
        (ImportError(DIFFUSERS), "", "scipy"),
        (ValueError(FALLBACK), "sentencepiece protobuf", None),
        (ValueError("update Transformers with `pip install --upgrade transformers`"), "", None),
        (ImportError("update it with `pip install --upgrade transformers`"), "transformers", None),
        (ImportError("run `pip install -U bitsandbytes`"), "", "bitsandbytes"),
        (ImportError("run `pip install git+https://example.org/x`"), "", None),
        (ImportError("run `pip install https://example.org/x.whl`"), "", None),
        (ImportError("run pip install -r requirements.txt"), "", None),
        (ImportError("run pip install the latest version"), "", None),
        (ImportError("X requires the Soxr library. `pip install transformers[audio]`"), "transformers", "soxr"),
        (ImportError("X requires the PyAV library. You can install it with:\n```\npip install decord\n"), "", "decord"),
        (ImportError("X requires the OpenCV library: `pip\ninstall opencv-python`."), "", "opencv-python"),
        (ImportError("Make sure to install the latest version"), "", None),
        (ValueError(FALLBACK), "protobuf", "sentencepiece"),
        (ValueError(FALLBACK), "sentencepiece", "protobuf"),
        (ModuleNotFoundError("No module named 'cv2.aruco'", name="cv2.aruco"), "", "cv2"),
        (ValueError("its weights are not there"), "", None),
    ],
)
def test_the_package_is_read_from_what_the_libraries_say(
    error: Exception, installed: str, package: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another error was raised from theirs; one that is installed has another fault."""
    monkeypatch.setattr(missing_packages, "_is_installed", lambda name: name in installed.split())
    outer = RuntimeError("it cannot be imported")
    outer.__cause__ = error
    for one in (error, outer):
        found = lacking_package(one)
        assert (found is None) if package is None else (found or "").startswith(f"it needs {package}, which is not")


@pytest.mark.parametrize(
    ("named", "found", "hint"),
    [
        ("OpenCV", "", "pip install opencv-python"),
        ("OpenCV", "cv2", None),  # of opencv-python-headless
        ("PIL", "pillow", None),
        ("jinja", "", "pip install jinja2"),
        ("jinja", "jinja2", None),
        ("PyTorch", "torch", None),
        ("PyAV", "", "pip install av"),
    ],
)
def test_a_package_is_looked_for_and_installed_by_its_own_name(
    named: str, found: str, hint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_packages, "_is_found", lambda name: name in found.split())
    lacking = lacking_package(ImportError(f"X requires the {named} library but it was not found"))
    assert (lacking and lacking.partition("; ")[2]) == hint


def test_a_module_of_a_package_that_is_not_there_is_not_installed() -> None:
    assert "needs no_such.module" in (lacking_package(ImportError("pip install no_such.module")) or "")


def test_what_passes_decides_over_a_package_among_the_causes() -> None:
    error = ConnectionError("reset by peer")
    error.__context__ = ModuleNotFoundError("No module named 'no_such'", name="no_such")
    assert isinstance(load_error(a_spec("x"), error), LoadPostponed)


@pytest.mark.parametrize(("part", "load_parts"), [("CLIPTextModel", True), ("CLIPTokenizer", False)])
def test_parts_with_weights_and_with_only_their_classes_to_check_all_parts_are_not_loaded(
    part: str, load_parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights can be pickles, and a start does not wait for the tokenizers of models without room."""
    (tmp_path / "part").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps({"part": ["transformers", part]}))
    loaded = Mock(side_effect=ImportError("pip install no_such"))
    monkeypatch.setattr(getattr(transformers, part), "from_pretrained", loaded)
    assert missing_package(a_spec(tmp_path), tmp_path, load_parts=load_parts) is None
    assert not loaded.called


@pytest.fixture
def musical(tmp_path: Path) -> Path:
    """A model folder with a part whose package is never installed here."""
    (tmp_path / "tokenizer").mkdir()
    index = {"_class_name": "FluxPipeline", "tokenizer": ["transformers", "Pop2PianoTokenizer"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_damaged_part_does_not_hide_what_another_lacks(musical: Path) -> None:
    (musical / "a_scheduler").mkdir()
    index = json.loads((musical / "model_index.json").read_text())
    parts = {"_class_name": "FluxPipeline", "a_scheduler": ["diffusers", "DDIMScheduler"]}
    (musical / "model_index.json").write_text(json.dumps(parts | index))
    assert (missing_package(a_spec(musical), musical) or "").startswith("it needs pretty_midi")


def test_a_load_and_the_doctor_name_the_missing_package(musical: Path) -> None:
    sentence = "it needs pretty_midi, which is not installed"
    verdict = check_packages(a_spec(musical), musical)
    assert verdict == ("failed", sentence, "pip install pretty_midi")
    with pytest.raises(ModelUnavailable, match=f"cannot be loaded from .*: {sentence}; pip install pretty_midi"):
        load(a_spec(musical), musical, torch.device("cpu"))


def test_a_tokenizer_with_only_a_sentencepiece_model_needs_nothing_more(tmp_path: Path) -> None:
    """That of T5 in many folders: the packages that convert it are dependencies of a worker."""
    import sentencepiece
    from transformers import T5Tokenizer

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    letters = random.Random(0)
    words = ("".join(letters.choices("abcdefghij", k=5)) for _ in range(500))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=words,
        model_prefix=str(folder / "spiece"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 0}))
    (tmp_path / "model_index.json").write_text(json.dumps({"tokenizer": ["transformers", "T5Tokenizer"]}))
    assert missing_package(a_spec(tmp_path), tmp_path) is None
    tokenizer = T5Tokenizer.from_pretrained(folder)
    assert tokenizer("abc").input_ids != tokenizer("jih").input_ids


GUARDED = """
def is_torchvision_available():
    return False


if is_torchvision_available():
    from torchvision import io, transforms as t


class APipeline:
    def __init__(self):
        self.transform = t.Compose([])
"""


def test_a_name_that_a_module_imports_only_with_a_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `NameError`, as of OmniGen in diffusers."""
    (tmp_path / "guarded_pipeline.py").write_text(GUARDED)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("guarded_pipeline")
    with pytest.raises(NameError) as caught:
        module.APipeline()
    monkeypatch.setattr(missing_packages, "_is_installed", lambda _name: False)
    hint = "it needs torchvision, which is not installed; pip install 'fusequeue-server[vision]'"
    assert lacking_package(caught.value) == hint
    assert lacking_package(NameError("name 'x' is not defined", name="x")) is None
