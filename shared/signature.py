"""Signatures: jobs with equal ones are claimed together. Also the fields that a model can mix within a signature."""

import hashlib
import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from cachetools import LRUCache, cached

from shared.architectures.registry import ADAPTERS_PER_ROW, CONTROLS_PER_ROW, LIST_DENOISERS
from shared.config.model_index import read_index
from shared.job import Job, matching
from shared.job_fields import MUST_MATCH

REFINER_PREFIX = "refiner_"
"""Of the names of a refiner's modules, which are beside those of the model's own pipeline."""

# Names of the pipeline modules that are called at least once per step, and of one that stands for a denoiser in
# pipelines without steps, which call it once.
DENOISERS = (
    *("transformer", "transformer_2", "unconditional_transformer", "unet", "unet_2", "prior", "prior_prior"),
    "latent_upsampler",
    f"{REFINER_PREFIX}unet",
)

Mixable = Literal["adapters", "controls", "size"]

# The fields of `Job` that each mixable field covers.
FIELDS: Mapping[str, frozenset[str]] = {
    "adapters": frozenset({"adapters"}),
    "controls": frozenset({"control_ids"}),
    "size": frozenset({"width", "height"}),
}

MAX_KNOWN = 1024

_MATCHING_FIELDS = frozenset(name for name in Job.model_fields if matching(name) is MUST_MATCH)


# Of most submits, the signature is known: it takes a tenth of the time that building a job takes otherwise.
@cached(LRUCache(MAX_KNOWN), key=attrgetter(*sorted(_MATCHING_FIELDS)), lock=Lock())
def signature(job: Job) -> str:
    """Return `model:widthxheightxframes:digest`; the digest is that of all fields that must match and are not mixed.

    With mixed sizes, `~sidexside` of the size class replaces the size. The signature only routes jobs: tensor shapes
    decide which calls are fused.
    """
    values = json.dumps(_values(job), sort_keys=True, separators=(",", ":"))
    return f"{job.model}:{shape(job)}x{job.frames}:{hashlib.sha256(values.encode()).hexdigest()[:12]}"


def mismatched_fields(one: Job, other: Job) -> tuple[str, ...]:
    """Return the fields that keep two jobs out of one batch: only `model` if that differs; `shape` is the size."""
    if one.model != other.model:
        return ("model",)
    left, right = _values(one), _values(other)
    names = (left.keys() | right.keys()) - {"width", "height"}
    return tuple(sorted(name for name in names if left.get(name) != right.get(name)))


def _values(job: Job) -> dict[str, Any]:
    mixed = frozenset[str]().union(*(FIELDS[field] for field in job.mixed_fields))
    # Without defaults, so that a new field does not change the signatures of jobs without it.
    values = job.model_dump(mode="json", include=set(_MATCHING_FIELDS - mixed), exclude_defaults=True)
    return values | {"shape": shape(job)}


def shape(job: Job) -> str:
    """Return `widthxheight`, or `~sidexside` of the size class if the model mixes sizes; of a sound its seconds."""
    if job.duration_s is not None:
        return f"{job.duration_s:g}s"
    if "size" in job.mixed_fields:
        side = size_class(job.width, job.height)
        return f"~{side}x{side}"
    return f"{job.width}x{job.height}"


def size_class(width: int, height: int) -> int:
    """Return the side of the square that represents all sizes with about this many pixels.

    Images are padded to the longest of their forward, so each costs as much as the largest. Pixel counts of a class
    differ by a factor below 1.42, so its learned figures (seconds, memory, efficient rows) hold for all its sizes.
    """
    # Half an octave around powers of two: round(2 * log2(pixels)), in integers so that all processes agree.
    steps = ((2 * (width * height) ** 4).bit_length() - 1) // 2
    return round(2 ** (steps / 4))


def mixable_fields(denoisers: Mapping[str, str], *, has_controls: bool = False) -> tuple[Mixable, ...]:
    """Return the fields that a model with these denoisers (name to class) can mix."""
    classes_of: dict[Mixable, frozenset[str]] = {"adapters": ADAPTERS_PER_ROW, "size": LIST_DENOISERS}
    if has_controls:
        classes_of["controls"] = CONTROLS_PER_ROW
    return tuple(field for field, classes in classes_of.items() if denoisers and classes.issuperset(denoisers.values()))


def denoisers_of(folder: Path) -> dict[str, str] | None:
    """Return name and class of a pipeline's denoisers, or None if its index cannot be read."""
    try:
        index = read_index(folder)
        return {name: str(index[name][1]) for name in DENOISERS if name in index and index[name][1]}
    except (OSError, ValueError, TypeError, LookupError):
        return None  # loading the model reports the error
