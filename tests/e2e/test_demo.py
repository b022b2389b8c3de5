"""`make demo` from start to end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_demo_succeeds(tmp_path):
    """Every job succeeds, images match their prompts, and forwards have several images."""
    output = tmp_path / "demo-output"
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    result = subprocess.run(
        (sys.executable, "-m", "demo.run", "--output", str(output)),
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    mean = re.search(r"^images per forward: (\d+\.\d) \(mean\)$", result.stdout, re.MULTILINE)
    assert mean is not None
    assert float(mean[1]) > 1.5  # 9 on a quiet machine of two cores, 2.9 on a busy one
    with Image.open(output / "contact-sheet.png") as sheet:
        assert sheet.width > 1000
    assert len(list(output.glob("*.png"))) > 48
