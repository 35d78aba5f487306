"""`scripts/setup.sh` refuses what it cannot do before it makes anything."""

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "python", "code", "message"),
    [(["contrl"], "", 2, "unknown part 'contrl'"), ([], "/no/such/python", 1, "PYTHON=/no/such/python")],
)
def test_a_wrong_part_or_python_is_refused_and_nothing_is_left(tmp_path, arguments, python, code, message):
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(Path(__file__).parents[2] / "scripts" / "setup.sh", tmp_path / "scripts")
    env = {"PATH": "/usr/bin:/bin", "PYTHON": python}
    done = subprocess.run(
        ["bash", script, *arguments], capture_output=True, text=True, check=False, cwd="/", env=env, timeout=20
    )
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / ".venv").exists()
