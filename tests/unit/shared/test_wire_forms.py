"""Recorded wire forms of a job and of its results: programs of two versions read each other's records."""

from __future__ import annotations

import json
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, Field, ValidationError

from shared.job import JOB_FORM, Job, decode, encode, is_newer
from shared.job_record import Artifact, BatchingStats, Failure, Timings

RECORDED: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("wire_forms.json").read_text())
"""Of each model, as JSON: `least`, written with its required fields only, and `most`, with every field."""

RESULTS = (Artifact, Failure, BatchingStats, Timings)
REMEDY = "leave a new field out at its default (exclude_if), or raise JOB_FORM and read the form before it too"


def models_in(annotation: Any) -> set[type[BaseModel]]:
    """Return the models in a type, and those of their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        parts = [models_in(field.annotation) for field in annotation.model_fields.values()]
        return {annotation}.union(*parts)
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, dict):
        return set[type[BaseModel]]().union(*map(models_in, get_args(annotation)))
    return set()


OF_JOB = {model.__name__: model for model in models_in(Job)}
OF_RESULTS = {model.__name__: model for root in RESULTS for model in models_in(root)}
MODELS = OF_JOB | OF_RESULTS


def written(model: type[BaseModel], fields: dict[str, Any]) -> Any:
    """Return what a program of this version writes of a record that it has read."""
    record = model.model_validate_json(json.dumps(fields))
    if isinstance(record, Job):
        return json.loads(encode(record))
    return json.loads(record.model_dump_json(by_alias=True, exclude_defaults=model.__name__ in OF_JOB))


def test_every_model_has_its_recorded_form() -> None:
    assert RECORDED.keys() == MODELS.keys()
    assert RECORDED["Job"]["least"]["schema_version"] == JOB_FORM, "record the new form"


@pytest.mark.parametrize("name", sorted(OF_JOB))
def test_a_job_is_written_without_its_defaults(name: str) -> None:
    """Older programs refuse fields that they do not know, and read the others with their own defaults: a field whose
    default has changed would be written, and left out at the new one."""
    model, least = OF_JOB[name], RECORDED[name]["least"]
    required = {field.alias or one for one, field in model.model_fields.items() if field.is_required()}
    form = {"schema_version"} if model is Job else set()
    assert written(model, least) == {one: least[one] for one in required | form}, "raise JOB_FORM for another default"


@pytest.mark.parametrize("name", sorted(OF_RESULTS))
def test_a_result_with_the_required_fields_has_no_new_field(name: str) -> None:
    """A field that is always written makes older programs refuse every record."""
    least = RECORDED[name]["least"]
    assert written(OF_RESULTS[name], least) == least, REMEDY


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_record_with_every_field_is_read_and_written_unchanged(name: str) -> None:
    """A field that is removed, renamed or has another type makes this program refuse older records."""
    model, most = MODELS[name], RECORDED[name]["most"]
    assert model.model_validate(written(model, most)) == model.model_validate(most)
    known = {field.alias or one for one, field in model.model_fields.items()}
    assert most.keys() == known, "record the new field in wire_forms.json"


def test_a_field_written_like_its_neighbours_is_found() -> None:
    """The mistake that these tests are for; a job does not have it."""

    class Extended(Failure):
        detail: str = ""
        hint: Annotated[str | None, Field(exclude_if=lambda hint: hint is None)] = None

    class ExtendedJob(Job):
        sharpness: float = 0.0

    least = RECORDED["Failure"]["least"]
    assert written(Extended, least).keys() - least.keys() == {"detail"}
    assert "sharpness" not in written(ExtendedJob, RECORDED["Job"]["least"])


NEWER = [
    ("a later form", {"schema_version": JOB_FORM + 1}, True),
    ("a later form without what this one requires", {"schema_version": JOB_FORM + 1, "prompt": None}, True),
    ("an unknown field", {"sharpness": 0.5}, True),
    ("an unknown field of a part", {"webhook": {"url": "https://a", "states": ["failed"], "retries": 3}}, True),
    ("an unknown value", {"task": "text_to_sound"}, True),
    ("a value beyond a bound", {"clip_skip": 99, "metadata": {str(at): "" for at in range(40)}}, True),
    ("an unknown value and an unknown field", {"output_format": "avif", "sharpness": 0.5}, True),
    ("an unknown field of a record that is no job", {"sharpness": 0.5, "prompt": None}, False),
    ("an earlier form", {"schema_version": JOB_FORM - 1, "sharpness": 0.5}, False),
    ("no number as its form", {"schema_version": str(JOB_FORM + 1)}, False),
    ("a field of another type", {"steps": "many"}, False),
]


@pytest.mark.parametrize(("case", "change", "newer"), NEWER, ids=[row[0] for row in NEWER])
def test_which_unreadable_jobs_are_of_a_later_program(case: str, change: dict[str, Any], newer: bool) -> None:
    """Those are left for a later program, whose job is valid; what no program has written fails."""
    wire = json.dumps(RECORDED["Job"]["least"] | change)
    with pytest.raises(ValidationError):
        decode(wire)
    assert is_newer(wire) is newer, case


@pytest.mark.parametrize("wire", ["", "{", "[]", "3", "null", "\ud800", "[" * 100_000])
def test_what_is_no_record_is_not_of_a_later_program(wire: str) -> None:
    assert not is_newer(wire)


def test_a_readable_job_is_not_newer() -> None:
    assert not is_newer(encode(decode(json.dumps(RECORDED["Job"]["most"]))))
