"""Lines of a backfill that name others by their keys, and files by their paths."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from harness.backfill import FakeService, input_id, resume, rows

from cli.backfill.ledger import Corrections, EntryState, Ledger
from cli.backfill.links import LinkError
from cli.backfill.pipeline import CHUNK_LINES, EveryLineRefused
from fusequeue import Unauthorized

pytestmark = pytest.mark.usefixtures("no_pauses")

LONG = {"code": "invalid_request", "message": "prompt: too long", "status": 422}
CHAIN = [
    {"prompt": "still", "key": "a"},
    {"prompt": "video", "key": "b", "image": {"job": "a", "artifact": 1}},
    {"prompt": "larger", "images": ["in_1", {"job": "b"}], "after": ["a", "job_7"]},
]


def begin(ledger: Ledger, *bodies: dict[str, Any]) -> Corrections | None:
    return ledger.begin(enumerate(bodies, 1))


def numbers(ledger: Ledger, state: EntryState) -> list[int]:
    return [entry.number for entry in ledger.entries(state)]


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ([{"after": ["b"]}, {"key": "b"}], r"^1: after.0: no line before this one has the key 'b'"),
        ([{"key": "a", "after": ["a"]}], "^1: after.0: no line before"),
        ([{"key": "a"}, {"image": {"job": "b"}}], "^2: image: no line before this one has the key 'b'"),
        ([{"controls": [{"id": "c", "image": {"job": 7}}]}], "^1: controls.0.image: no line before .* 7"),
        ([{"key": "a"}, {"key": "a"}], "^2: key: line 1 has it too: a"),
        ([{"key": ""}], "^1: key: '' is not 1 to 64 letters"),
        ([{"key": "job_7"}], "^1: key: 'job_7' is not .* no id of a job"),
        ([{"key": 7}], "^1: key: 7 is not"),
    ],
)
def test_a_wrong_key_is_found_before_anything_is_stored(
    ledger: Ledger, bodies: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(LinkError, match=message):
        begin(ledger, *bodies)
    assert sum(ledger.counts().values()) == 0


async def test_a_line_is_submitted_with_the_jobs_that_it_names_when_they_are_saved(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    begin(ledger, *CHAIN)
    service.sends_images.clear()
    running = asyncio.create_task(resume(service, ledger, tmp_path))
    while not numbers(ledger, EntryState.SUBMITTED):
        await asyncio.sleep(0.01)
    assert (service.prompts, numbers(ledger, EntryState.WAITING)) == (["still"], [2, 3])
    service.sends_images.set()
    await running
    assert service.prompts == ["still", "video", "larger"]
    assert service.bodies["video"]["image"] == {"job": "job_0", "artifact": 1}
    assert service.bodies["larger"]["images"] == ["in_1", {"job": "job_1"}]
    assert service.bodies["larger"]["after"] == ["job_7"], "of the lines that it names, it has waited for all"
    assert not any("key" in body for body in service.bodies.values())


async def test_a_line_takes_the_job_of_the_attempt_that_has_succeeded(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    service.failing["still"] = 2
    begin(ledger, *CHAIN)
    await resume(service, ledger, tmp_path, attempts=3)
    assert service.prompts == ["still"] * 3 + ["video", "larger"]
    assert service.bodies["video"]["image"]["job"] == "job_2"


async def test_with_a_line_that_fails_those_fail_that_need_it(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    service.refused = {"still": (LONG, -1)}
    anyway = {"prompt": "anyway", "after": ["a", "b"], "on_parent_failure": "run"}
    in_need = {"prompt": "in need", "image": {"job": "a"}, "after": ["a"], "on_parent_failure": "run"}
    begin(ledger, *CHAIN, anyway, in_need, {"prompt": "other"})
    await resume(service, ledger, tmp_path)
    manifest = rows(ledger, tmp_path)
    assert {prompt: row["state"] for prompt, row in manifest.items()} == {
        **dict.fromkeys(("still", "video", "larger", "in need"), "failed"),
        **dict.fromkeys(("anyway", "other"), "done"),
    }
    assert manifest["larger"]["error"] in ("line 1, which it names, has failed", "line 2, which it names, has failed")
    assert set(service.prompts) == {"still", "anyway", "other"}
    service.refused = {}
    assert ledger.retry_failed() == 4
    assert numbers(ledger, EntryState.WAITING) == [2, 3, 5]
    await resume(service, ledger, tmp_path)
    assert ledger.counts()[EntryState.DONE] == 6


def test_keys_hold_after_a_kill_and_far_apart(tmp_path: Path) -> None:
    between = [{"prompt": str(at)} for at in range(CHUNK_LINES)]
    bodies = [CHAIN[0], *between, CHAIN[1]]
    last = len(bodies)
    with closing(Ledger(tmp_path)) as ledger:
        begin(ledger, *bodies)
        ledger.submitted([(1, "job_1", None)])
    with closing(Ledger(tmp_path)) as ledger:
        assert begin(ledger, *bodies) is None
        assert numbers(ledger, EntryState.WAITING) == [last]
        ledger.done(1, ["a.png"])
    with closing(Ledger(tmp_path)) as ledger:
        begin(ledger, *bodies)
        assert (last in numbers(ledger, EntryState.NEW), ledger.parent_jobs(last)) == (True, {"a": "job_1"})


def test_with_a_corrected_line_those_that_name_it_are_made_again(ledger: Ledger) -> None:
    """Wherever they stand now; others keep their results."""
    others = [{"prompt": "other", "key": "c"}, {"prompt": "child", "after": ["c"]}, {"prompt": "third", "after": ["c"]}]
    begin(ledger, *CHAIN, *others)
    ledger.submitted([(number, f"job_{number}", None) for number in range(1, 6)])
    for number in range(1, 6):
        ledger.done(number, ["x.png"])
    corrected = {"prompt": "another still", "key": "a"}
    assert begin(ledger, *others, corrected, *CHAIN[1:]) == Corrections(kept=3, added=3, removed=3)
    assert (numbers(ledger, EntryState.DONE), numbers(ledger, EntryState.NEW)) == ([1, 2], [3, 4])
    assert numbers(ledger, EntryState.WAITING) == [5, 6]


async def test_files_are_uploaded_once_per_content(service: FakeService, ledger: Ledger, tmp_path: Path) -> None:
    """Paths are relative to the file of prompts; ids, URLs and jobs are no paths."""
    (tmp_path / "stills").mkdir()
    for name, content in (("stills/a.png", b"a"), ("b.png", b"b"), ("in_1", b"c")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "copy.png").write_bytes(b"a")
    same = [{"prompt": str(at), "image": "stills/a.png"} for at in range(20)]
    named = {"image": "./in_1", "mask": str(tmp_path / "copy.png"), "images": ["b.png", "in_1", "https://a.test/b.png"]}
    begin(ledger, *same, {"prompt": "all", **named, "controls": [{"id": "c", "image": "b.png"}]})
    out = tmp_path / "out"
    out.mkdir()
    await resume(service, ledger, out, files=tmp_path)
    assert sorted(service.uploads) == [b"a", b"b", b"c"]
    assert {service.bodies[str(at)]["image"] for at in range(20)} == {input_id(b"a")}
    body = service.bodies["all"]
    assert (body["image"], body["mask"]) == (input_id(b"c"), input_id(b"a"))
    assert body["images"] == [input_id(b"b"), "in_1", "https://a.test/b.png"]
    assert body["controls"] == [{"id": "c", "image": input_id(b"b")}]


async def test_a_file_that_cannot_be_used_fails_its_line_only(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    (tmp_path / "odd.png").write_bytes(service.odd)
    os.mkfifo(tmp_path / "pipe")
    images: dict[str, Any] = {
        "none": "none.png",
        "folder": ".",
        "pipe": "pipe",
        "odd": "odd.png",
        "null": "a\0",
        "7": 7,
    }
    others = {"prompt": "list", "images": "none.png"}, {"prompt": "nested", "controls": [{"id": "c", "image": "x"}]}
    begin(ledger, *({"prompt": name, "image": image} for name, image in images.items()), *others, {"prompt": "good"})
    await resume(service, ledger, tmp_path, files=tmp_path)
    errors = {prompt: row["error"] for prompt, row in rows(ledger, tmp_path).items()}
    assert errors == {
        "none": "image: the file 'none.png' cannot be read: No such file or directory (invalid_input_image)",
        "folder": "image: the file '.' cannot be read: it is no file (invalid_input_image)",
        "pipe": "image: the file 'pipe' cannot be read: it is no file (invalid_input_image)",
        "odd": "image: a fault (invalid_input_image)",
        "null": "image: the file 'a\\x00' cannot be read: embedded null byte (invalid_input_image)",
        "7": "image: 7 is no path, id or URL, and no object that names a job (invalid_input_image)",
        "list": "images: 'none.png' is not a list (invalid_input_image)",
        "nested": "controls.0.image: the file 'x' cannot be read: No such file or directory (invalid_input_image)",
        "good": None,
    }
    assert service.prompts == ["good"]


async def test_a_file_that_all_lines_name_and_that_is_missing_ends_the_run(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    begin(ledger, *({"prompt": str(at), "image": "none.png"} for at in range(CHUNK_LINES + 1)))
    with pytest.raises(EveryLineRefused, match=r"first 249 of 251 lines are refused: image: the file 'none.png'"):
        await resume(service, ledger, tmp_path, files=tmp_path)
    assert (service.prompts, ledger.is_untouched()) == ([], True)


async def test_an_upload_that_the_key_does_not_allow_ends_the_run(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    service.refused_upload = 403
    begin(ledger, {"prompt": "a", "image": "a.png"}, {"prompt": "b"})
    with pytest.raises(Unauthorized):
        await resume(service, ledger, tmp_path, files=tmp_path)
    assert ledger.is_untouched()


async def test_an_upload_that_the_service_has_no_room_for_is_repeated(
    service: FakeService, ledger: Ledger, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    service.limited["/v1/inputs"] = 2
    begin(ledger, *({"prompt": str(at), "image": "a.png"} for at in range(9)))
    refusals = await resume(service, ledger, tmp_path, files=tmp_path)
    assert ({refusal.code for refusal in refusals}, service.uploads) == ({"rate_limited"}, [b"a"])
    assert ledger.counts()[EntryState.DONE] == 9
