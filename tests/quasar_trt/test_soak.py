"""The script that runs random requests for some minutes, here a thousand of them on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


def test_nothing_is_lost_or_left_over(engine_dirs):
    command = [sys.executable, str(SCRIPT), str(engine_dirs["INT8"]), "--requests", "1000"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "requests, 0 lost, 0 bytes of keys and values left over" in result.stdout
