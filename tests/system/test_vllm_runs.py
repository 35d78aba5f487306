"""Whole runs with real vLLM engines."""

import importlib.util

import pytest

from tests.system.conftest import assert_sound, fresh_differences, overrides, rows, run, trained_rows

pytestmark = [
    pytest.mark.real,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_arithmetic_trains_through_vllm_with_weights_swapped_in_flight(tmp_path, small):
    out = tmp_path / "run"
    done = run("run", "arithmetic", *overrides(small | {"actors.engine": "vllm"}), "--out", str(out), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(out, bound=2, steps=4)
    assert summary["weights"]["mismatches"] == 0
    assert 0 < summary["weights"]["pause_s"] < summary["weights"]["commit_s"]
    assert 0 < summary["weights"]["pause_share"] < 0.2  # below 0.05 where the machine is not shared by a whole test run
    first = trained_rows(out)[0]
    assert first["age/max"] == 0
    assert first["logp_diff/age0"] < 1e-4


def test_smollm2_trains_for_two_steps(tmp_path):
    out = tmp_path / "run"
    settings = {
        "steps": 2,
        "buffer.groups_per_step": 1,
        "sampling.group_size": 4,
        "actors.slots": 8,  # vLLM keeps KV for all of them at full length, and clears it
        "eval.problems": 2,
        "log.wandb": False,
        "log.tensorboard": False,
    }
    done = run("run", "smollm2", *overrides(settings), "--out", str(out), timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_sound(out, bound=2, steps=2)
    assert max(fresh_differences(out)) < 1e-3
    assert rows(out / "evals.jsonl")[-1]["version"] == 2
