"""Checks of the models of a deployment, without loading them; `fusequeue doctor` and `up` show the findings."""

from collections.abc import Collection, Iterator
from pathlib import Path

from cli.findings import FAILED, OK, WARNING, Finding
from shared.config import models_file
from shared.config.candidates import ScorerSpec
from shared.config.checkpoints import checkpoint_fault, vae_fault
from shared.config.model_index import CLASSIC, MODULAR, index_file, missing_folders, parts_without_weights
from shared.config.model_spec import ModelSpec
from shared.config.refiners import RefinerSpec
from shared.config.shape_folder import is_shape_folder
from shared.errors import FusequeueError


def model_findings(models: Path, batch_rules: Path | None = None) -> Iterator[Finding]:
    """Check a models file, and the folders and files that it names."""
    try:
        catalog = models_file.load(models, batch_rules)
    except FusequeueError as error:
        yield Finding("models file", FAILED, error.message, "correct the file, or set FUSEQUEUE_MODELS to another")
        return
    yield Finding("models file", OK, f"{models}: {', '.join(spec.id for spec in catalog)}")
    for spec in catalog:
        yield _source(spec)
        yield from _files(spec)
        if spec.refiner is not None:
            yield _source_of(f"refiner of {spec.id}", spec.refiner, ("vae", "text_encoder_2", "tokenizer_2"))
        if spec.scorer is not None:
            yield _scorer(f"scorer of {spec.id}", spec.scorer)


def _files(spec: ModelSpec) -> Iterator[Finding]:
    """Check the files that replace weights of the source, as far as their headers say what is wrong."""
    checks = {"checkpoint": (spec.checkpoint, checkpoint_fault), "vae": (spec.vae, vae_fault)}
    for key, (path, check) in checks.items():
        if path is not None:
            fault = check(Path(path), Path(spec.source) if spec.is_folder else None)
            seen, _, remedy = (fault or "").partition("; ")
            verdict = OK if fault is None else FAILED
            found = path if fault is None else f"{path}: {seen}"
            yield Finding(f"{key} of {spec.id}", verdict, found, remedy or (fault and f"correct `{key}`") or "")


def _scorer(name: str, spec: ScorerSpec) -> Finding:
    if not spec.is_folder:
        return _on_hub(name, spec)
    needed = (Path(spec.source) / "config.json", *([] if spec.head is None else [Path(spec.head)]))
    missing = next((path for path in needed if not path.is_file()), None)
    if missing is not None:
        return Finding(name, FAILED, f"{missing}: no such file", "set `source` to a CLIP model, and `head` to its file")
    return Finding(name, OK, spec.source)


def _source(spec: ModelSpec) -> Finding:
    replaced = {"vae"} if spec.vae else set()
    unwanted = set() if spec.safety_checker else {"safety_checker"}
    return _source_of(f"model {spec.id}", spec, replaced | unwanted, has_checkpoint=spec.checkpoint is not None)


def _on_hub(name: str, spec: ModelSpec | RefinerSpec | ScorerSpec) -> Finding:
    if spec.source.startswith((".", "/")) or spec.source.count("/") != 1:
        return Finding(name, FAILED, f"{spec.source}: no such folder, and not a hub id", "set `source` to a folder")
    if spec.revision:
        return Finding(name, OK, f"{spec.source} of the hub at {spec.revision}")
    remedy = "pin a `revision`, so that every worker loads the same weights"
    return Finding(name, WARNING, f"{spec.source} of the hub", remedy)


def _source_of(
    name: str, spec: ModelSpec | RefinerSpec, left_out: Collection[str], *, has_checkpoint: bool = False
) -> Finding:
    """Check a source, without the parts of its index that are not loaded from it."""
    if not spec.is_folder:
        return _on_hub(name, spec)
    folder = Path(spec.source)
    if index_file(folder) is None and not is_shape_folder(folder):
        return Finding(
            name, FAILED, f"{folder} has no {CLASSIC}, nor {MODULAR}", "set `source` to a folder of save_pretrained"
        )
    no_index = has_checkpoint or is_shape_folder(folder)
    missing = [] if no_index else [one for one in missing_folders(folder) if one not in left_out]
    if missing:
        lacks = f"{folder} has no folder {' and '.join(missing)}, which its index lists"
        return Finding(name, FAILED, lacks, "copy or download the whole model again")
    empty = [] if no_index else [one for one in parts_without_weights(folder) if one not in left_out]
    if not has_checkpoint and not next(folder.rglob("*.safetensors"), None):
        return Finding(name, FAILED, f"{folder} has no safetensors", "save it again with safe_serialization=True")
    if empty:
        lacks = f"{folder} has no safetensors in {' and '.join(empty)}"
        return Finding(name, FAILED, lacks, "download it again, or save it with safe_serialization=True")
    return Finding(name, OK, str(folder))
