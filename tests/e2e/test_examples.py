"""The Python examples of docs/clients/python.md, run in their order against a whole service as a reader runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS_ANOTHER_MODEL = ('client.run("shape"',)


def examples() -> list[str]:
    """Return the blocks of the page."""
    text = (ROOT / "docs/clients/python.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for block in blocks if not block.startswith(NEEDS_ANOTHER_MODEL)]


@pytest.mark.timeout(300)
def test_the_examples_of_the_python_client_run(make_stack: Callable[..., Any], tmp_path: Path) -> None:
    """On an idle service: a job that they change must still be queued. Their webhook is one of this machine."""
    stack = make_stack(webhook_allow_loopback="1").start(workers=1)
    stack.chores()
    script = "\n".join(examples()).replace("https://example.com/hook", f"{stack.url}/hook")
    env = {**stack.env, "FUSEQUEUE_URL": stack.url}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "('steps', " in done.stdout
    names = {path.name for path in (tmp_path / "images").iterdir()}
    assert {"circle-0.png", "circle-1.png", "00000-0.png", "00001-0.png"} <= names
