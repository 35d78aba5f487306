"""The command line from outside: speed, exit codes, one sentence on stderr for what is the user's mistake."""

import os
import re
import subprocess
import sys
import time

import pytest
from run_folder import make_run

COMMAND = [sys.executable, "-m", "async_rl"]


def run(*args, cwd=None, env=None):
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )


def test_help_is_instant():
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        done = run("--help")
        seconds.append(time.monotonic() - began)
        assert done.returncode == 0
    assert all(name in done.stdout for name in ("run", "learner", "actor", "presets", "report", "doctor", "fetch"))
    assert min(seconds) < 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run"], "name a preset"),
        (["run", "missing.toml"], "no config file missing.toml"),
        (["run", "x.toml", "--set", "learner.lrr=1"], "learner.lr"),
        (["run", "x.toml", "--set", "sampling.group_size=1"], "group_size"),
        (["run", "x.toml", "--set", "learner.lr"], "section.key=value"),
        (["run", "x.toml", "--set", "model.path=/no/such/model"], "/no/such/model"),
        (["run", "x.toml", "--set", "task.data=none.jsonl"], "none.jsonl"),
        (["run", "x.toml", "--set", "buffer.bind=localhost"], "tcp://HOST:PORT"),
        (["run", "x.toml", "--set", "task.verifier=absent:f"], "No module named 'absent'"),
        (["run", "x.toml", "--out", "full"], "is not empty"),
        (["run", "--resume", "full"], "no run folder"),
        (["actor", "x.toml", "--connect", "here"], "tcp://HOST:PORT"),
        (["report", "full"], "no run folder"),
        (["fetch", "gpt"], "only smollm2"),
        (["doctor", "missing.toml"], "no config file"),
    ],
)
def test_a_mistake_of_the_user_is_one_sentence_and_exit_code_2(tmp_path, args, message):
    (tmp_path / "x.toml").write_text("steps = 2\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("async-rl: ")
    assert message in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_an_option_that_does_not_exist_is_a_usage_error():
    done = run("run", "--sett", "a=1")
    assert done.returncode == 2
    assert re.search(r"No such option", done.stderr)


def test_presets_are_listed_with_model_and_task():
    done = run("presets")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert "arithmetic" in names
    assert "smollm2" in names


def test_report_prints_where_the_page_is(tmp_path):
    done = run("report", make_run(tmp_path / "r"))
    assert done.returncode == 0
    assert done.stdout.strip() == str(tmp_path / "r" / "report.html")
    assert (tmp_path / "r" / "report.html").stat().st_size > 5000
