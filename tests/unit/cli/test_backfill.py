"""Prompt files and the ledger of a backfill."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cli.backfill.command import group_prefix, progress_line
from cli.backfill.ledger import NAME, Corrections, EntryState, Ledger, LedgerError
from cli.backfill.prompts import PromptsError, file_name, read
from shared.job_fields import GROUP_NAME

LINES = [(1, {"prompt": "a"}), (2, {"prompt": "b"}), (4, {"prompt": "c"})]


@pytest.mark.parametrize(
    ("name", "content", "bodies"),
    [
        ("p.txt", b"a\n\n  b  \r\n", [(1, {"prompt": "a"}), (3, {"prompt": "b"})]),
        ("p.txt", b"\xef\xbb\xbfa\n", [(1, {"prompt": "a"})]),  # a byte order mark
        ("p.jsonl", b'{"prompt": "a", "seed": 3}\n\n', [(1, {"prompt": "a", "seed": 3})]),
        ("p.csv", b"prompt,steps,scheduler\n7,20,\n", [(2, {"prompt": "7", "steps": 20})]),  # a prompt stays text
        (
            "p.csv",
            b'prompt,key,after\na,1,\nb,2,1\nc,,"[""1"",""2""]"\n',
            [
                (2, {"prompt": "a", "key": "1"}),
                (3, {"prompt": "b", "key": "2", "after": ["1"]}),
                (4, {"prompt": "c", "after": ["1", "2"]}),
            ],
        ),
        (
            "p.csv",
            b"prompt,not_before\na,10m\nb,600\nc,2099-01-31T22:00:00Z\n",
            [
                (2, {"prompt": "a", "not_before": 600}),
                (3, {"prompt": "b", "not_before": 600}),
                (4, {"prompt": "c", "not_before": "2099-01-31T22:00:00Z"}),
            ],
        ),
        ("p.csv", b" prompt , seed\na, 1\n", [(2, {"prompt": "a", "seed": 1})]),  # columns that are aligned by hand
        ("p.csv", b"image,seed\ni,1\n", [(2, {"image": "i", "seed": 1})]),  # a mesh needs no prompt
        ("p.csv", b'prompt,seed\n"two\nlines, one prompt",1\n', [(3, {"prompt": "two\nlines, one prompt", "seed": 1})]),
    ],
)
def test_prompts_are_read(tmp_path: Path, name: str, content: bytes, bodies: list[tuple[int, Any]]) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(read(tmp_path / name, {})) == bodies


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.doc", b"a", "must end in .jsonl"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: "),
        ("p.jsonl", b"[1]\n", "p.jsonl:1: a line must be a JSON object"),
        ("p.jsonl", b'{"prompt": "a", "batch_id": "b"}\n', "p.jsonl:1: batch_id: a backfill sets it"),
        ("p.csv", b"text,seed\na,1\n", "no column `prompt`, but `text`, `seed`$"),
        ("p.csv", b"", "no column `prompt`$"),
        ("p.csv", b"prompt;seed\na;1\n", "but `prompt;seed`; separate columns by commas$"),
        ("p.csv", b"prompt,seed\r\n", "p.csv: no line has a prompt$"),
        ("p.txt", b"\n \r\n", "p.txt: no line has a prompt$"),
        ("p.jsonl", b"", "p.jsonl: no line has a prompt$"),
        ("p.csv", b"prompt,seed\na,1,2\n", "p.csv:2: more columns"),
        ("p.csv", b'prompt,seed\na,1\n"b"c,2\n', "p.csv:3: ',' expected after '\"'$"),
        ("p.txt", b"\xff\xfe", "not UTF-8: .*; save it as UTF-8$"),
    ],
)
def test_an_invalid_file_is_an_error_with_file_and_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptsError, match=message):
        list(read(tmp_path / name, {}))


def test_fields_of_a_line_override_the_common_ones(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "steps": 4}\n')
    assert list(read(tmp_path / "p.jsonl", {"steps": 9, "seed": 1})) == [(1, {"prompt": "a", "steps": 4, "seed": 1})]


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A red circle, left!", "000012-a-red-circle-left"),
        ("Ünïcode ✨ prompt", "000012-unicode-prompt"),
        ("Große Straße™", "000012-grosse-strassetm"),
        ("../../etc/passwd", "000012-etc-passwd"),
        ("画", "000012"),
    ],
)
def test_file_names_are_readable_and_stay_in_their_folder(prompt: str, name: str) -> None:
    assert file_name(12, prompt) == name


def test_a_ledger_resumes(tmp_path: Path) -> None:
    """Lines with the fewest failed attempts are first."""
    ledger = Ledger(tmp_path)
    ledger.begin(LINES)
    ledger.submitted([(1, "job_1", None), (2, "job_2", None), (4, None, "too long")])
    ledger.failed([(ledger.entries(EntryState.SUBMITTED, 1)[0], "lost", True)])
    ledger.done(2, ["b.png"])
    ledger.close()
    reopened = Ledger(tmp_path)
    reopened.begin(LINES)
    assert {state: count for state, count in reopened.counts().items() if count} == {
        **{EntryState.NEW: 1, EntryState.DONE: 1, EntryState.FAILED: 1}
    }
    assert reopened.retry_failed() == 1
    assert [(entry.number, entry.failed_attempts) for entry in reopened.entries(EntryState.NEW, 10)] == [(1, 1), (4, 1)]
    with pytest.raises(LedgerError, match=r"another backfill.* only 0 of its 3 lines are the same"):
        reopened.begin([(1, {"prompt": "another"})])
    reopened.close()


def test_lines_of_a_corrected_file_keep_their_state_wherever_they_stand(tmp_path: Path) -> None:
    """Only what is new or corrected is made, under names that no earlier result has."""
    lines = [(number, {"prompt": prompt}) for number, prompt in enumerate(("a", "b", "b", "c"), 1)]
    with closing(Ledger(tmp_path)) as ledger:
        assert ledger.begin(lines) is None
        ledger.submitted([(1, "job_1", None), (2, "job_2", None), (4, None, "too long")])
        ledger.done(2, ["000002-b-0.png"])
    corrected = [(number, {"prompt": prompt}) for number, prompt in enumerate(("new", "a", "b", "b", "d"), 1)]
    with closing(Ledger(tmp_path)) as ledger:
        assert ledger.begin(corrected) == Corrections(kept=3, added=2, removed=1)
        assert ledger.begin(corrected) is None
        assert [(one.number, one.job) for one in ledger.entries(EntryState.SUBMITTED)] == [(2, "job_1")]
        assert [one.number for one in ledger.entries(EntryState.NEW)] == [1, 4, 5]
        assert ledger.counts()[EntryState.DONE] == 1
        assert [(one.edition, one.place) for one in ledger.entries(EntryState.NEW)] == [(1, 1), (0, 3), (1, 5)]
        assert file_name(2, "b", ledger.edition) == "000002.1-b"


@pytest.mark.parametrize(
    ("recorded", "job"),
    [
        pytest.param([(2, "job_2", None)], "job_2", id="the second one is submitted"),
        pytest.param([(1, "job_1", None)], "job_1", id="the first one is submitted"),
        pytest.param([(1, None, "too long"), (2, "job_2", None)], "job_2", id="the first one was refused"),
    ],
)
def test_of_identical_lines_the_one_with_a_job_stays(
    tmp_path: Path, recorded: list[tuple[int, str | None, str | None]], job: str
) -> None:
    """Else the other one, which stays in its place, would make the image again."""
    with closing(Ledger(tmp_path)) as ledger:
        ledger.begin([(1, {"prompt": "a"}), (2, {"prompt": "a"}), (3, {"prompt": "b"})])
        ledger.submitted(recorded)
        assert ledger.begin([(1, {"prompt": "a"}), (2, {"prompt": "b"})]) == Corrections(kept=2, added=0, removed=1)
        assert [(one.number, one.job) for one in ledger.entries(EntryState.SUBMITTED)] == [(1, job)]
        assert [one.number for one in ledger.entries(EntryState.NEW)] == [2]


def test_of_identical_new_lines_the_one_that_a_kill_may_have_sent_stays(tmp_path: Path) -> None:
    """The one with fewer failed attempts is sent first; its idempotency key finds its job."""
    with closing(Ledger(tmp_path)) as ledger:
        ledger.begin([(1, {"prompt": "a"}), (2, {"prompt": "a"}), (3, {"prompt": "b"})])
        ledger.submitted([(1, "job_1", None)])
        ledger.failed([(ledger.entries(EntryState.SUBMITTED)[0], "lost", True)])
        ledger.begin([(1, {"prompt": "a"}), (2, {"prompt": "b"})])
        assert [(one.place, one.failed_attempts) for one in ledger.entries(EntryState.NEW)] == [(2, 0), (3, 0)]


def test_the_group_of_a_folder_stays(tmp_path: Path) -> None:
    """A resumed backfill continues its group; another one is refused once a line has been submitted."""
    prompts = tmp_path / "My prompts.txt"
    for group in (None, None, "nightly", None, "nightly"):
        ledger = Ledger(tmp_path)
        ledger.begin(LINES, group, prefix=group_prefix(prompts, tmp_path / "out"))
        known = ledger.group
        ledger.close()
        assert known == "nightly" or (group is None and str(known).startswith("my-prompts-out-"))
    ledger = Ledger(tmp_path)
    ledger.begin(LINES)
    ledger.submitted([(1, "job_1", None)])
    assert ledger.group == "nightly"
    with pytest.raises(LedgerError, match="the jobs of the folder have the group nightly: leave --group out"):
        ledger.begin(LINES, "weekly")
    ledger.close()


def test_the_default_group_is_a_valid_name(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.begin(LINES, prefix=group_prefix(Path(f"{'東京'} {'a b' * 90}.txt"), Path(f"/{'x.y' * 90}")))
    assert re.fullmatch(GROUP_NAME, str(ledger.group))
    ledger.close()


def test_lines_that_were_never_submitted_can_all_be_replaced(tmp_path: Path) -> None:
    """As when an option is wrong for each of them."""
    with closing(Ledger(tmp_path)) as ledger:
        ledger.begin(LINES)
        assert ledger.begin([(1, {"prompt": "another"})]) == Corrections(kept=0, added=1, removed=3)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_truncated_file_does_not_empty_the_folder(tmp_path: Path, kept: int) -> None:
    with closing(Ledger(tmp_path)) as ledger:
        ledger.begin(LINES)
        ledger.submitted([(1, "job_1", None)])
        with pytest.raises(LedgerError, match=f"only {kept} of its 3 lines are the same"):
            ledger.begin(LINES[:kept])
        assert sum(ledger.counts().values()) == 3
        assert ledger.begin(LINES[:2]) == Corrections(kept=2, added=0, removed=1)


def test_progress_in_words() -> None:
    counts = {EntryState.NEW: 5, EntryState.SUBMITTED: 2, EntryState.DONE: 3, EntryState.FAILED: 0}
    assert progress_line(counts) == "3 of 10 saved, 2 submitted"
    assert progress_line(counts | {EntryState.FAILED: 1}) == "3 of 11 saved, 2 submitted, 1 failed"


def test_a_ledger_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    """Its lines had no columns for flagged files and for what they were made with, and its jobs no group."""
    with closing(Ledger(tmp_path)) as ledger:
        ledger.begin(LINES)
    with closing(sqlite3.connect(tmp_path / NAME)) as database:
        database.execute("ALTER TABLE line DROP COLUMN flagged")
        for column in ("made", "edition", "place"):
            database.execute(f"ALTER TABLE line DROP COLUMN {column}")
        for column in ("edition", "name", "began_at_ms"):
            database.execute(f"ALTER TABLE run DROP COLUMN {column}")
    with closing(Ledger(tmp_path)) as ledger:
        ledger.begin(LINES, prefix="prompts-")
        assert ledger.group is None, "a request that is sent again must be the same"
        ledger.done(1, ["a.png"], [0])
        assert ledger.flagged() == 1


def test_an_invalid_file_stores_no_lines(tmp_path: Path) -> None:
    """After a fix the same folder can be used."""

    def broken() -> Any:
        yield LINES[0]
        raise PromptsError("line 2")

    ledger = Ledger(tmp_path)
    with pytest.raises(PromptsError):
        ledger.begin(broken())
    ledger.begin(LINES)
    assert ledger.counts()[EntryState.NEW] == 3
    ledger.close()
