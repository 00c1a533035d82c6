"""The script that lets many clients ask a server for some minutes, here a few for seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "server_soak.py"


def test_answers_are_right_and_nothing_is_left_over(engine_dirs):
    command = [sys.executable, str(SCRIPT), str(engine_dirs["INT8"]), "--clients", "16", "--seconds", "4"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "'answered': " in result.stdout and "'left in the middle': " in result.stdout
    assert ", 0 wrong, " in result.stdout
