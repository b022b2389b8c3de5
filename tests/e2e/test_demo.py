"""`make demo`: the whole of it, as a newcomer runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 240


@pytest.mark.timeout(LONGEST_S + 30)
def test_the_demo_ends_well(tmp_path):
    """Every job succeeds, pictures show what their prompts say, and forwards are well filled."""
    output = tmp_path / "demo-output"
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    done = subprocess.run(
        (sys.executable, "-m", "demo.run", "--output", str(output)),
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    mean = re.search(r"^pictures per forward: (\d+\.\d) \(mean\)$", done.stdout, re.MULTILINE)
    assert mean is not None
    assert float(mean[1]) > 4
    with Image.open(output / "contact-sheet.png") as sheet:
        assert sheet.width > 1000
    assert len(list(output.glob("*.png"))) > 48
