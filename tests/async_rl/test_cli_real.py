"""The command line with the real processes: stop, resume, a launcher that is killed, an actor by hand."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from async_rl.runfolder import RunFolder

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SMALL = ["buffer.groups_per_step=4", "sampling.group_size=4", "eval.every=0", "eval.problems=20", "log.wandb=false"]
SMALL += ["log.tensorboard=false", "actors.slots=32", "buffer.replace_zero_variance=false"]


class Command:
    """A running ``async-rl``; its output is read in a thread, so that it can be waited for with a deadline."""

    def __init__(self, *args):
        settings = [part for setting in SMALL for part in ("--set", setting)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "async_rl", *map(str, args), *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines, self.news = [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            with self.news:
                self.lines.append(line)
                self.news.notify_all()

    def await_line(self, text, timeout_s=120.0):
        with self.news:
            seen = self.news.wait_for(lambda: any(text in line for line in self.lines), timeout_s)
        assert seen, f"{text!r} did not come:\n{''.join(self.lines)}"
        return next(line for line in self.lines if text in line)

    def wait(self, timeout_s=120.0):
        code = self.process.wait(timeout_s)
        self.process.stdout.close()
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def segments(out):
    run_id = json.loads((out / "server.json").read_text())["run_id"]
    return list(Path("/dev/shm").glob(f"*{run_id}*"))


def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on(tmp_path):
    out = tmp_path / "run"
    with Command("run", "arithmetic", "--out", out, "--set", "steps=2000") as command:
        command.await_line("step 1/2000")
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130, "".join(command.lines)
    summary = json.loads((out / "summary.json").read_text())
    done = summary["steps"]
    assert (summary["status"], summary["ledger"]["trained"]) == ("stopped", 4 * done)
    assert RunFolder(out).latest_checkpoint().name == f"step_{done}"
    assert segments(out) == []

    with Command("run", "--resume", out, "--set", f"steps={done + 3}") as command:
        assert command.wait() == 0, "".join(command.lines)
    run = RunFolder(out)
    summary = run.summary
    assert (summary["status"], summary["steps"]) == ("completed", done + 3)
    steps = [row["step"] for row in run.metrics if "reward/mean" in row]
    assert steps == list(range(done + 3))
    books = summary["ledger"]
    assert books["issued"] == sum(count for name, count in books.items() if name != "issued")
    assert books["trained"] == 4 * (done + 3)
    assert (out / "report.html").is_file()
    assert segments(out) == []


def test_actors_join_a_learner_host_by_its_address_if_they_have_its_configuration(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('steps = 5\n[model]\npath = "tiny"\n')
    with Command("learner", config, "--out", tmp_path / "run") as learner:
        address = learner.await_line("--connect tcp://").rpartition("--connect ")[2].strip()
        with Command("actor", config, "--connect", address, "--set", "seed=7") as stranger:
            assert stranger.wait() == 1
            assert "reference or seed differ" in "".join(stranger.lines)
            assert "Traceback" not in "".join(stranger.lines)
        with Command("actor", config, "--connect", address, "--name", "by-hand") as actor:
            assert learner.wait() == 0, "".join(learner.lines)
            assert actor.wait() == 0, "".join(actor.lines)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 5)
    assert "actor0" not in summary["cpu_s"]
