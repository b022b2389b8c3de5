"""Models that need a package which is not installed: named with what to do, not with the text of a library."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from harness.engine import DIFFUSERS_AND_NUMPY, a_spec

from shared.errors import ModelUnavailable
from worker.engine.memory_fit import check_packages
from worker.engine.pipelines.loading import load
from worker.engine.pipelines.weights import missing_packages
from worker.engine.pipelines.weights.missing_packages import lacking_package, missing_package

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
        (ImportError("run `pip install -U bitsandbytes`"), "", None),
        (ImportError("run `pip install git+https://example.org/x`"), "", None),
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
