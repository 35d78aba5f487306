"""The command line from outside: speed, exit codes, one sentence on stderr for what is the user's mistake."""

import io
import os
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console
from run_folder import make_run

from async_rl import cli
from async_rl.config import parse_config
from async_rl.errors import ConfigError
from async_rl.launch.overview import overview, print_overview
from async_rl.launch.progress import Glance, Pace, PlainDisplay, one_line, panel
from async_rl.units import format_bytes, format_seconds

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
        (["actor", "x.toml", "--connect", "tcp://h:1", "--role", "reward"], "no reward scorer is needed"),
        (["actor", "x.toml", "--connect", "tcp://h:1", "--role", "reference"], "nothing in [algorithm] reads"),
        (["run", "x.toml", "--set", "reward.model=1", "--set", "reward.model_path=absent"], "no such folder"),
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


# ------------------------------------------------------------------ what a run says


def console():
    return Console(file=io.StringIO(), width=200, highlight=False)


def test_plain_lines_come_for_the_first_step_at_round_steps_and_for_the_last():
    screen = console()
    display = PlainDisplay(screen, parse_config({"steps": 100}))  # a line every 5 steps
    for step in [0, 1, 1, 2, 4, 5, 6, 9, 11, 99, 100]:
        display.update({"step": step})
    steps = [line.split()[1] for line in screen.file.getvalue().splitlines()]
    assert steps == ["1/100", "5/100", "11/100", "99/100", "100/100"]


def test_a_status_message_becomes_one_line_without_what_is_not_known():
    status = {
        "step": 7,
        "stats": {"reward": 0.25, "accuracy": 0.5},
        "staleness": {"mean": 1.5, "max": 2},
        "utilization": {"learner": 0.9, "actors": None},
        "evals": [{"version": 0, "metrics": {"accuracy": 0.5}}, {"version": 5, "metrics": {"accuracy": 0.75}}],
        "clients": [{"role": "actor"}, {"role": "monitor"}],
        "books": {"issued": 9},
    }
    glance = Glance.from_status(status)
    assert one_line(glance, 10, 65.0) == (
        "step 7/10  reward 0.250  accuracy 0.500  held out 0.750 at 5  age 1.50/2  learner 90%  1 min 05 s left"
    )
    assert glance.clients == 1
    assert one_line(Glance.from_status({}), 10, None) == "step 0/10"
    screen = console()
    screen.print(panel(glance, 10, 65.0))
    assert all(part in screen.file.getvalue() for part in ("7/10", "0.750 at 5", "1.50 mean, 2 max", "issued 9"))


def test_scorers_and_what_holds_the_run_up_are_shown_and_each_notice_is_said_once():
    status = {"step": 1, "utilization": {"scorers": 0.5}, "notices": []}
    assert one_line(Glance.from_status(status), 10, None) == "step 1/10  scorers 50%"
    screen = console()
    display = PlainDisplay(screen, parse_config({"steps": 10}))
    for text in ("no scorer for 15 s", "no scorer for 17 s", "", "no scorer for 15 s"):
        display.update(status | {"notices": [text] if text else []})
    assert screen.file.getvalue().splitlines()[1:] == ["no scorer for 15 s"] * 2
    screen.print(panel(Glance.from_status(status | {"notices": ["no scorer"]}), 10, None))
    assert "no scorer" in screen.file.getvalue().splitlines()[-1]


def test_time_left_is_what_remains_at_the_pace_since_the_first_step():
    now = [0.0]
    pace = Pace(100, clock=lambda: now[0])
    assert pace.left_s(0) is None
    now[0] = 50.0  # start-up
    assert pace.left_s(1) is None
    now[0] = 60.0
    assert pace.left_s(21) == pytest.approx(79 * 0.5)  # 20 steps in 10 s


def test_the_overview_says_what_the_numbers_mean_together(tmp_path):
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(10)}, tmp_path / "model.safetensors")
    config = parse_config(
        {
            "buffer": {"groups_per_step": 10, "max_staleness": 3},
            "sampling": {"group_size": 3, "max_new_tokens": 7},
            "algorithm": {"minibatches": 2, "epochs": 2},
            "model": {"dtype": "bfloat16"},
        }
    )
    view = overview(config, tmp_path)
    assert (view.sequences_per_step, view.sampled_tokens_per_step, view.updates_per_step) == (30, 210, 4)
    assert (view.tickets_in_flight, view.staleness_bound) == (40, 3)  # (3 + 1) · 10
    assert (view.staleness_waiting, view.staleness_ahead) == (1, 3)
    assert view.weight_bytes == 25 * 2

    screen = console()
    print_overview(screen, config, tmp_path, tmp_path / "out")
    text = screen.file.getvalue()
    assert "10 groups × 3 = 30 sequences" in text
    assert "warning: sampling.group_size = 3" in text
    assert str(tmp_path / "out") in text


def test_a_damaged_model_file_is_a_sentence_before_anything_starts(tmp_path):
    import torch
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, 5)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is cut short"):
        overview(parse_config({}), tmp_path)
    for content in (b"", b"short", b"\2\0\0\0\0\0\0\0[]", b'\7\0\0\0\0\0\0\0{"a":1}', bytes(range(256))):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="is no safetensors file"):
            overview(parse_config({}), tmp_path)


def test_synchronous_training_expects_no_staleness():
    view = overview(parse_config({"buffer": {"max_staleness": 0}}), None)
    assert (view.staleness_waiting, view.staleness_ahead, view.tickets_in_flight) == (0, 0, 64)
    assert view.weight_bytes is None


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (2_499_072, "2.5 MB"), (270e6, "270 MB"), (3.2e12, "3.2 TB")]
)
def test_bytes_are_shown_with_the_digits_that_matter(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (3720, "1 h 02 min")]
)
def test_durations_are_shown_in_the_unit_that_matters(seconds, text):
    assert format_seconds(seconds) == text


def test_a_configuration_that_is_no_text_and_a_cache_that_cannot_be_made_are_sentences(tmp_path):
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    done = subprocess.run([*COMMAND, "run", str(tmp_path / "c.toml")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
    env = {**os.environ, "ASYNC_RL_CACHE": str(tmp_path / "c.toml" / "cache")}
    command = [*COMMAND, "run", "arithmetic", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert "set ASYNC_RL_CACHE" in done.stderr
    assert not (tmp_path / "run").exists()


def test_trouble_with_the_disk_is_a_sentence(tmp_path, monkeypatch, capsys):
    def full() -> None:
        raise OSError(28, "No space left on device", "/somewhere/summary.json")

    monkeypatch.setattr(cli, "app", full)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "async-rl: [Errno 28] No space left on device: '/somewhere/summary.json'\n"


def test_damaged_files_of_a_run_are_left_out_of_its_report(tmp_path):
    out = make_run(tmp_path)
    for name in ("books.json", "summary.json", "metrics.jsonl"):
        (out / name).write_bytes(bytes(range(128, 256)) * 9)
    done = subprocess.run([*COMMAND, "report", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
