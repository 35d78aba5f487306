"""The scripts that measure TRL beside us: when the target is reached, the reward, and what is said without TRL."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import typer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module
    for name in ("compare_trl", "bench_trl", "bench_control", "sums_reward"):
        sys.modules.pop(name, None)


def test_the_target_is_reached_by_the_mean_of_three(load):
    reached = load("compare_trl").reached
    assert reached([0.9, 0.9], 0.8) is None
    assert reached([0.5, 0.9, 0.9, 0.9, 0.1], 0.9) == 3  # (0.5 + 0.9 + 0.9) / 3 = 0.77, then 0.9
    assert reached([0.7, 0.8, 0.9], 0.8) == 2


def test_the_reward_of_a_sum(load):
    reward, score = load("sums_reward").reward, load("sums_reward").score
    assert reward("123", "123", True) == 1.0
    assert reward("123", "123", False) == pytest.approx(0.2)  # it did not end: 3 of 3 positions
    assert reward("129", "123", True) == pytest.approx(0.2 * 2 / 3)
    assert reward("1234", "123", True) == pytest.approx(0.2 * 3 / 4)
    assert reward("", "123", True) == 0.0
    given = {"answer": ["12", "12"], "finish_reasons": ["stop", "length"]}
    assert score(["", ""], ["12", "12"], **given) == [1.0, pytest.approx(0.2)]


def test_a_line_that_is_being_written_is_no_evaluation(load, tmp_path):
    read = load("compare_trl").read_evaluations
    assert read(tmp_path) == []
    rows = [json.dumps({"version": v, "metrics": {"accuracy": a}}) for v, a in ((0, 0.5), (5, 0.7), (10, 0.9))]
    (tmp_path / "evals.jsonl").write_text("\n".join(rows))
    assert read(tmp_path) == [(0, 0.5), (5, 0.7)]


def test_figures_pair_the_seeds_that_both_solved(load):
    script = load("compare_trl")
    runs = [
        script.Run("TRL", 0, 60.0, 90.0, 100, 4.0, 50.0, 75.0, []),
        script.Run("ours", 0, 15.0, 9.0, 80, 7.0, 15.0, 9.0, []),
        script.Run("ours", 1, 15.0, 9.0, 80, 7.0, 15.0, 9.0, []),
        script.Run("TRL", 1, None, None, 400, 4.0, None, None, []),
    ]
    cpu, wall, steps_cpu, *_ = script.figures(runs, 0.87)
    assert steps_cpu.ratio == 0.3
    assert (cpu.ratio, cpu.met) == (0.25, True)
    assert (wall.ratio, wall.met) == (0.1, True)
    assert script.figures(runs[2:], 0.87) == []


@pytest.mark.parametrize("python", ["no-such-python", sys.executable])
def test_without_trl_it_is_said_what_to_do(load, capsys, python):
    with pytest.raises(typer.Exit):
        load("compare_trl").check_trl(Path(python))
    assert "pip install torch trl" in capsys.readouterr().err


def test_both_sides_get_the_problems_of_the_run(load):
    found = load("compare_trl").problems(seed=0)
    assert len(found["heldout"]) == 500
    assert len(found["train"]) == 7600
    prompts = [{row["prompt"] for row in rows} for rows in found.values()]
    assert not prompts[0] & prompts[1]
    assert all(row["answer"] == str(eval(row["prompt"][:-1])) for row in found["train"][:20])


def test_trl_gets_the_batch_that_we_train(load, tmp_path):
    bench = load("bench_trl")
    from async_rl.data import make_group, token_trajectory

    trajectories = [
        token_trajectory(prompt=[5, 6], completion=c, logprobs=[-1.0] * len(c), versions=[0] * len(c), reward=r)
        for c, r in (([7, 8], 1.0), ([9], 0.0))
    ]
    groups = [make_group(ordinal=0, attempt=0, task_index=0, trajectories=trajectories)]
    config = bench.load_case("smollm2", None).config
    case = bench.Case(name="arithmetic", config=config, folder=tmp_path, rows=1, checked=None)
    plan = json.loads(bench.write_plan(case, groups, tmp_path).read_text())
    batch = json.loads(Path(plan["batch"]).read_text())
    assert batch["prompts"] == [[5, 6], [5, 6]]
    assert batch["completions"] == [[7, 8], [9]]
    # mean 0.5, deviation 0.5
    assert batch["advantages"] == pytest.approx([1.0, -1.0], abs=1e-3)
