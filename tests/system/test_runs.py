"""`async-rl run`, whole: each test starts the real server, learner group, actors and evaluator."""

import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.system.conftest import (
    PPO,
    REPOSITORY,
    assert_sound,
    environment,
    fresh_differences,
    overrides,
    rows,
    run,
    trained_rows,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def test_arithmetic_trains_for_a_few_steps_and_leaves_nothing_behind(tmp_path, small):
    out = tmp_path / "run"
    small |= {"log.wandb": True, "log.tensorboard": True}
    done = run("run", "arithmetic", *overrides(small), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(out, bound=2, steps=4)
    assert summary["eval"].keys() >= {"accuracy", "accuracy_start"}
    assert [r["version"] for r in rows(out / "evals.jsonl")] == [0, 2, 4]
    assert (out / "wandb").is_dir()
    assert any((out / "tensorboard").iterdir())
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert (out / "checkpoints" / "step_4" / "hf" / "model.safetensors").is_file()
    assert max(fresh_differences(out)) < 1e-4


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_without_staleness_the_run_makes_the_updates_of_the_synchronous_script(tmp_path, small, algorithm, request):
    sync = tmp_path / "sync"
    if algorithm == "ppo":
        small, out = small | PPO, request.getfixturevalue("inline_ppo")
    else:
        small |= {"buffer.max_staleness": 0, "algorithm.name": "grpo", "algorithm.minibatches": 2}
        out = tmp_path / "async"
        done = run("run", "arithmetic", *overrides(small), "--out", str(out))
        assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(out, bound=0, steps=4)
    assert summary["staleness"]["max"] == 0
    script = [sys.executable, str(REPOSITORY / "scripts" / "sync_grpo.py"), "arithmetic", *overrides(small)]
    subprocess.run([*script, "--out", str(sync)], check=True, timeout=120, env=environment(), capture_output=True)
    ours, oracle = trained_rows(out), rows(sync / "metrics.jsonl")
    for key in ("reward/mean", "grad_norm", "loss/policy", "tokens/step"):
        assert [r[key] for r in ours] == pytest.approx([r[key] for r in oracle], abs=1e-5)
    assert max(r["grad_norm"] for r in oracle) > 1e-3
    final = load_file(out / "checkpoints" / "step_4" / "hf" / "model.safetensors")
    expected = load_file(sync / "hf" / "model.safetensors")
    assert final.keys() == expected.keys()
    assert max((final[k] - expected[k]).abs().max().item() for k in final) < 1e-5


def test_two_ranks_and_two_actors_share_the_work_over_zeromq(tmp_path, small):
    out = tmp_path / "run"
    small |= {"learner.ranks": 2, "actors.count": 2, "weights.path": "zmq", "learner.checksum_every": 1}
    done = run("run", "arithmetic", *overrides(small), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_sound(out, bound=2, steps=4)


def test_stragglers_are_reissued_within_the_bound(tmp_path, small):
    out = tmp_path / "run"
    small |= {"buffer.stragglers": "reissue", "actors.engine": "mock", "buffer.max_staleness": 1, "eval.every": 0}
    small |= {"actors.mock_spread": 30.0, "actors.mock_speed": 800.0, "steps": 8}
    done = run("run", "arithmetic", *overrides(small), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_sound(out, bound=1, steps=8)


def test_groups_are_trained_as_often_as_max_uses_allows(tmp_path, small):
    out = tmp_path / "run"
    small |= {"buffer.max_uses": 2, "actors.engine": "mock", "actors.mock_speed": 16.0, "eval.every": 0}
    done = run("run", "arithmetic", *overrides(small), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    ordinals = [o for b in rows(out / "batches.jsonl") for o in b["ordinals"]]
    assert max(ordinals.count(o) for o in ordinals) == 2
