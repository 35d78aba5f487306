"""One child of the launcher: that it dies with it, what it used, and what its log says of its end."""

import os
import signal
import subprocess
import sys

import pytest

from async_rl.launch import launcher as launcher_module
from async_rl.launch.children import Child, cause, tail


def test_children_die_with_a_launcher_that_is_killed(tmp_path):
    code = (
        "import sys, os, threading; from pathlib import Path; from async_rl.launch.children import Child\n"
        "child = Child.start('c', ['sleep', '60'], Path(sys.argv[1]) / 'c.log', os.environ)\n"
        "print(child.pid, flush=True); threading.Event().wait(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    handle = os.pidfd_open(pid)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    import select

    assert select.select([handle], [], [], 5.0)[0], "the child outlived its parent"
    os.close(handle)


def test_a_child_reports_cpu_time_and_signal(tmp_path):
    code = "sum(i * i for i in range(3_000_000)); import os; os.kill(os.getpid(), 15)"
    child = Child.start("c", [sys.executable, "-c", code], tmp_path / "c.log", os.environ)
    assert launcher_module.wait_all([child], 20.0) == []
    assert child.exit_code == -signal.SIGTERM
    assert 0.05 < child.cpu_s < 15
    assert child.describe_end() == "was ended by SIGTERM"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; print('async-rl: no such verifier'); sys.exit(1)", "no such verifier"),
        ("import sys; sys.exit(1)", None),
        ("import os; print('ConnectionResetError: of another', flush=True); os.kill(os.getpid(), 9)", None),
    ],
)
def test_a_cause_is_what_this_life_said_itself_and_not_an_earlier_one_or_one_that_was_killed(tmp_path, code, why):
    log = tmp_path / "c.log"
    log.write_text(
        "async-rl: of an earlier life\ntorch/distributed/elastic/x.py:1] failed (exitcode: -9) local_rank: 1\n"
    )
    child = Child.start("c", [sys.executable, "-c", code], log, os.environ)
    assert launcher_module.wait_all([child], 20.0) == []
    assert child.cause() == why
    assert child.killed_rank() is None
    assert "async-rl: of an earlier life" not in child.tail()


def test_the_cause_is_our_sentence_before_torchruns_noise(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "step 1\n[rank0]:async-rl: the gradient was not finite\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\nexitcode : 1\n"
    )
    assert cause(log) == "the gradient was not finite"
    log.write_text("Traceback (most recent call last):\n  File x\nRuntimeError: out of slots\n")
    assert cause(log) == "RuntimeError: out of slots"
    log.write_text("all is well\n")
    assert cause(log) is None
    assert tail(log, 3) == ["all is well"]
    assert tail(tmp_path / "missing", 3) == []
