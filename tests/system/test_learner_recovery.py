"""A learner that dies in the middle, for real: the run that it goes on with is the one that it would have been."""

import os
import shutil
import signal

import pytest
from safetensors.torch import load_file

from tests.system.conftest import (
    assert_sound,
    child_pids,
    fresh_differences,
    overrides,
    rows,
    run,
    start,
    steps_of,
    summary_of,
    trained_rows,
    wait_until,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

STEPS = 16
SAME = ("reward/mean", "grad_norm", "lr", "kl_coef", "tokens/step", "tokens/trained")


def settings(small, **more):
    """Nothing may be stale, so that the run is determined; rate and β move."""
    small |= {"steps": STEPS, "checkpoint.every": 4, "checkpoint.keep": 4, "eval.every": 0, "buffer.max_staleness": 0}
    small |= {"learner.lr_schedule": "kl_adaptive", "learner.warmup_steps": 3}
    small |= {"algorithm.kl_coef": 0.1, "algorithm.kl_controller": "adaptive", "algorithm.minibatches": 2}
    return overrides(small | more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run folder of the same run without a fault, made once."""
    return tmp_path_factory.mktemp("undisturbed") / "run"


def reference(undisturbed, small):
    if not undisturbed.is_dir():
        done = run("run", "arithmetic", *settings(dict(small)), "--out", str(undisturbed))
        assert done.returncode == 0, done.stdout + done.stderr
    return undisturbed


def kill_the_learner(out, small, log, **more):
    """SIGKILL one rank some steps behind a checkpoint; the launcher's exit code and what it said."""
    launcher = start("run", "arithmetic", *settings(dict(small), **more), "--out", str(out), log=log)
    try:
        wait_until(lambda: steps_of(out) >= 6, "six steps")
        os.kill(child_pids("learner.main", out)[-1], signal.SIGKILL)
        return launcher.wait(200), log.read_text()
    finally:
        launcher.kill()
        launcher.wait(10)


def assert_same(out, expected, tolerance):
    ours, theirs = trained_rows(out), trained_rows(expected)
    assert [row["step"] for row in ours] == list(range(STEPS))
    for key in SAME:
        rel = 1e-4 if key == "grad_norm" else None  # shards sum squares in float64, a vector in float32
        assert [row.get(key) for row in ours] == pytest.approx([r.get(key) for r in theirs], rel=rel, abs=1e-5), key
    file = f"checkpoints/step_{STEPS}/hf/model.safetensors"
    final, wanted = load_file(out / file), load_file(expected / file)
    assert max((final[name] - wanted[name]).abs().max().item() for name in wanted) < tolerance
    assert [b["task_indices"] for b in rows(out / "batches.jsonl")] == [
        b["task_indices"] for b in rows(expected / "batches.jsonl")
    ]


def test_a_learner_that_is_killed_goes_on_from_its_checkpoint_and_ends_with_the_same_parameters(
    tmp_path, small, undisturbed
):
    expected, out = reference(undisturbed, small), tmp_path / "run"
    code, said = kill_the_learner(out, small, tmp_path / "run.log")
    assert code == 0, said
    assert "Traceback" not in said
    assert_sound(out, bound=0, steps=STEPS)
    assert summary_of(out)["restarts"] == {"learner": 1}
    assert_same(out, expected, 1e-6)


def test_when_one_of_two_ranks_with_shards_is_killed_both_begin_again_and_the_actors_stay(tmp_path, small, undisturbed):
    expected, out = reference(undisturbed, small), tmp_path / "run"
    shards = {"learner.ranks": 2, "learner.strategy": "fsdp", "learner.checksum_every": 1}
    code, said = kill_the_learner(out, small, tmp_path / "run.log", **shards)
    assert code == 0, said
    assert_sound(out, bound=0, steps=STEPS)
    assert "actor0" not in summary_of(out)["restarts"]
    assert_same(out, expected, 1e-4)  # two ranks add in another order, and Adam divides by small numbers


def test_a_run_that_is_resumed_with_other_ranks_and_strategies_is_the_run_that_it_would_have_been(
    tmp_path, small, undisturbed
):
    expected, out = reference(undisturbed, small), tmp_path / "run"
    shutil.copytree(expected, out)
    for step in (8, 12, STEPS):  # as if it had been killed with its launcher after step 4
        shutil.rmtree(out / f"checkpoints/step_{step}")
    for life in (
        {"learner.ranks": 3, "learner.strategy": "fsdp", "actors.count": 2, "steps": 10},
        {"learner.ranks": 2, "learner.strategy": "flat", "learner.shard_optimizer": True, "steps": STEPS},
    ):
        done = run("run", "--resume", str(out), *overrides(life))
        assert done.returncode == 0, done.stdout + done.stderr
        assert_sound(out, bound=0, steps=life["steps"])
    assert max(fresh_differences(out)) < 1e-4
    assert_same(out, expected, 1e-4)
