"""Four roles on processes of their own: actor, critic (with the learner), reward and reference scorers."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.system.conftest import (
    PPO,
    REPOSITORY,
    assert_sound,
    child_pids,
    environment,
    overrides,
    rows,
    run,
    server_of,
    start,
    steps_of,
    summary_of,
    trained_rows,
    wait_until,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

FOUR_ROLES = {
    "algorithm.name": "ppo",
    "algorithm.kl_coef": PPO["algorithm.kl_coef"],
    "reward.placement": "scorer",
    "reference.placement": "scorer",
}


def test_four_roles_train_and_scorers_give_what_the_learner_and_the_actor_would_give(tmp_path, small, inline_ppo):
    small |= FOUR_ROLES | PPO
    scored = tmp_path / "scored"
    done = run("run", "arithmetic", *overrides(small), "--out", str(scored))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(scored, bound=0, steps=4)
    assert set(summary["stages"]) == {"reward", "reference"}
    for stage in summary["stages"].values():
        assert stage["annotated"] >= summary["ledger"]["trained"]
        assert (stage["failed"], stage["returned"]) == (0, 0)
    assert 0 < summary["utilization"]["scorers"] <= 1
    assert {"reward0", "reference0"} <= set(summary["cpu_s"])
    assert (scored / "report.html").read_text().count("reward0") >= 1
    samples = rows(scored / "samples.jsonl")
    assert samples
    assert all(len(sample["rewards"]) == 4 for sample in samples)

    ours, theirs = trained_rows(scored), trained_rows(inline_ppo)
    assert ours[-1]["kl/reference"] > 0
    for key in ("reward/mean", "grad_norm", "loss/policy", "loss/value", "kl/reference", "tokens/step"):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=1e-3, abs=1e-5), key


def test_killing_scorers_loses_nothing(tmp_path, small):
    out = tmp_path / "run"
    small |= FOUR_ROLES | {"steps": 36, "eval.every": 0}
    launcher = start("run", "arithmetic", *overrides(small), "--out", str(out), log=tmp_path / "run.log")
    try:
        for stage, steps in (("reward", 3), ("reference", 8)):
            wait_until(lambda steps=steps: steps_of(out) >= steps, f"{steps} steps")
            (scorer,) = child_pids(f"--name {stage}0", out)
            os.kill(scorer, signal.SIGKILL)
        assert launcher.wait(150) == 0, (tmp_path / "run.log").read_text()
    finally:
        launcher.kill()
        launcher.wait(10)
    summary = assert_sound(out, bound=2, steps=36)
    assert summary["restarts"] == {"reward0": 1, "reference0": 1}
    assert summary["ledger"]["failed"] == 0
    # groups are scored in any order, but at the end none is missing and none comes twice
    ordinals = sorted(o for batch in rows(out / "batches.jsonl") for o in batch["ordinals"])
    assert len(set(ordinals)) == len(ordinals) == 36 * 8
    assert {attempt for batch in rows(out / "batches.jsonl") for attempt in batch["attempts"]} == {0}


def test_on_a_learner_host_nothing_is_scored_until_scorers_join_from_elsewhere(tmp_path, small):
    out = tmp_path / "run"
    small |= {"steps": 3, "eval.every": 0, "reward.placement": "scorer", "buffer.heartbeat_s": 0.5}
    learner = start("learner", "arithmetic", *overrides(small), "--out", str(out), log=tmp_path / "learner.log")
    workers = []
    try:
        address = wait_until(lambda: server_of(out), "the server's start")["address"]
        config = wait_until(lambda: (out / "config.toml").is_file() and (out / "config.toml"), "the configuration")
        for role in ("actor", "reward"):
            arguments = ("actor", str(config), "--role", role, "--connect", address, "--name", f"far-{role}")
            workers.append(start(*arguments, log=tmp_path / f"{role}.log"))
        assert learner.wait(120) == 0, (tmp_path / "learner.log").read_text()
        assert [worker.wait(20) for worker in workers] == [0, 0]
    finally:
        for process in (learner, *workers):
            process.kill()
            process.wait(10)
    assert summary_of(out)["status"] == "completed"
    said = (tmp_path / "learner.log").read_text()
    assert "actors connect with: async-rl actor CONFIG.toml --connect" in said
    assert "reward scorers connect with: async-rl actor CONFIG.toml --role reward --connect" in said


def test_a_second_scorer_raises_the_rate_where_scoring_is_the_bottleneck(untrained):
    script = [sys.executable, str(REPOSITORY / "scripts" / "scoring_rate.py"), "--set", f"model.path={untrained}"]
    done = subprocess.run(
        [*script, "--groups", "40"], capture_output=True, text=True, timeout=200, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (float(rate) for rate in re.findall(r"scorers?: +([\d.]+) groups/s", done.stdout))
    assert one < 20.5  # the verifier takes 0.05 s a group; the server's count begins and ends between two groups
    assert two > 1.5 * one, done.stdout
