"""Control runs through the command line: real environments, real processes; an actor that dies, a stop, a resume."""

import json
import os
import signal

import pytest
from safetensors.torch import load_file

from tests.system.conftest import (
    assert_sound,
    child_pids,
    overrides,
    processes_of,
    rows,
    run,
    start,
    steps_of,
    trained_rows,
    wait_until,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

SMALL = {
    "seed": 3,
    "env.num_envs": 8,
    "env.horizon": 16,
    "policy.hidden": [16],
    "policy.normalize": True,
    "checkpoint.every": 0,
    "log.wandb": False,
    "log.tensorboard": False,
    "eval.episodes": 8,
}


def normalised(out, step):
    """Samples that the policy's normaliser has seen, in the checkpoint of a step."""
    return float(load_file(out / "checkpoints" / f"step_{step}" / "policy.safetensors")["normalizer.count"])


def test_two_ranks_and_two_actors_train_in_step_with_each_other(tmp_path):
    out = tmp_path / "run"
    settings = {**SMALL, "steps": 8, "eval.every": 4, "buffer.max_staleness": 0, "buffer.groups_per_step": 4}
    settings |= {"learner.ranks": 2, "actors.count": 2, "learner.checksum_every": 1}
    done = run("run", "cartpole", *overrides(settings), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(out, bound=0, steps=8)
    assert "4 fragments × 8 environments × 16 steps = 512 environment steps, 20 updates a step" in done.stdout

    metrics = trained_rows(out)
    assert all(row["logp_diff/fresh"] < 1e-5 for row in metrics)  # all of it is of the version that is trained
    trained = [row["env_steps/trained"] for row in metrics]
    assert trained[-1] == summary["staleness"]["histogram"]["0"] == metrics[-1]["env_steps/generated"]
    assert 8 * 400 < trained[-1] <= 8 * 512  # steps that only reset an environment are not counted
    assert normalised(out, 8) == trained[-1]
    for row in metrics:
        assert 0 < row["time/learn_s"] < row["time/step_s"]
        assert row["fps/total"] > 0
    assert metrics[-1]["episode/count"] == summary["episodes"]["count"] > 10
    assert 8 < metrics[-1]["episode/return"] == metrics[-1]["episode/length"] < 60

    assert [row["version"] for row in rows(out / "evals.jsonl")] == [0, 4, 8]
    assert {"return", "return_start", "length"} <= set(summary["eval"])
    assert summary["throughput"]["env_steps_per_s"] > 0
    assert summary["throughput"]["trained_tokens_per_s"] is None
    assert json.loads((out / "spaces.json").read_text())["action"]["choices"] == [2]
    assert "Return of an episode" in (out / "report.html").read_text()


def test_a_killed_actor_is_replaced_and_a_stopped_run_continues_where_it_was(tmp_path):
    out = tmp_path / "run"
    # the target is never met: each step makes the rate 1.5 times larger, in its second update
    settings = {**SMALL, "steps": 16, "eval.every": 0, "algorithm.epochs": 1, "algorithm.minibatches": 2}
    settings |= {"learner.lr_schedule": "kl_adaptive", "learner.lr": 1e-5, "learner.kl_target": 5.0}
    settings |= {"env.horizon": 256, "env.num_envs": 32}
    launcher = start("run", "cartpole", *overrides(settings | {"steps": 2000}), "--out", str(out), log=tmp_path / "log")
    try:
        wait_until(lambda: steps_of(out) >= 2, "two steps")
        (actor,) = child_pids("actors.control.main", out)
        os.kill(actor, signal.SIGKILL)
        before = steps_of(out)
        wait_until(lambda: steps_of(out) >= before + 4, "steps with another actor")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130, (tmp_path / "log").read_text()
    finally:
        launcher.kill()
        launcher.wait(10)
    assert not processes_of(out)
    assert "actor0 was ended by SIGKILL (out of memory?) and starts again" in (tmp_path / "log").read_text()
    (checkpoint,) = (out / "checkpoints").iterdir()
    stopped = json.loads((checkpoint / "trainer.json").read_text())
    assert stopped["step"] == steps_of(out) < 2000

    steps = stopped["step"] + 3
    done = run("run", "--resume", str(out), "--set", f"steps={steps}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_sound(out, bound=1, steps=steps)
    metrics = trained_rows(out)
    rates = [min(1e-5 * 1.5 ** (row["step"] + 1), 1e-2) for row in metrics]
    assert [row["lr"] for row in metrics] == pytest.approx(rates)
    trained = [row["env_steps/trained"] for row in metrics]
    assert trained == sorted(trained)
    assert stopped["trained"] == trained[stopped["step"] - 1]
    assert normalised(out, steps) == trained[-1]  # those of the session before are in it
    counts = [row["episode/count"] for row in metrics]
    assert counts == sorted(counts)


def test_two_runs_of_one_seed_without_staleness_end_with_the_same_bits(tmp_path):
    settings = {**SMALL, "steps": 4, "eval.every": 0, "eval.episodes": 1, "buffer.max_staleness": 0}
    files = ("policy", "critic", "optimizer")
    runs = {
        out: start("run", "cartpole", *overrides(settings), "--out", str(out), log=out.with_suffix(".log"))
        for out in (tmp_path / "first", tmp_path / "second")
    }
    try:
        for out, launcher in runs.items():
            assert launcher.wait(120) == 0, out.with_suffix(".log").read_text()
    finally:
        for launcher in runs.values():
            launcher.kill()
            launcher.wait(10)
    ends = [[(out / f"checkpoints/step_4/{file}.safetensors").read_bytes() for file in files] for out in runs]
    assert ends[0] == ends[1]
    assert normalised(tmp_path / "first", 4) > 400
