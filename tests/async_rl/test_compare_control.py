"""The script that compares control runs reads run folders and prints Markdown."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/compare_control.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_control", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_control"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_run(folder, returns):
    folder.mkdir()
    evals = [{"version": 10 * i, "metrics": {"return": value}} for i, value in enumerate(returns)]
    rows = [{"step": step, "env_steps/trained": 1000 * (step + 1)} for step in range(10 * len(returns) - 10)]
    (folder / "evals.jsonl").write_text("\n".join(map(json.dumps, evals)))
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    summary = {"status": "completed", "wall_s": 12.0, "cpu_s": {"learner": 3.0}, "staleness": {"max": 1}}
    (folder / "summary.json").write_text(json.dumps({**summary, "throughput": {"env_steps_per_s": 500.0}}))


def test_a_variant_is_a_label_a_preset_and_settings(script):
    assert script.parse("cartpole") == ("cartpole", "cartpole", [])
    assert script.parse("old: cartpole buffer.max_staleness=4 seed=2") == (
        "old",
        "cartpole",
        ["buffer.max_staleness=4", "seed=2"],
    )


def test_tables_show_the_seeds_side_by_side_and_the_curve_over_environment_steps(script, tmp_path):
    for seed, returns in enumerate([[1.0, 50.0, 400.0], [3.0, 70.0, 500.0]]):
        write_run(tmp_path / f"cartpole-{seed}", returns)
    runs = [script.read(tmp_path / f"cartpole-{seed}", "cartpole", seed, "return") for seed in (0, 1)]
    assert "| cartpole | 1.00 / 3.00 | 400 / 500 | 20,000 | 500 | 12 | 1 |" in script.table(runs)
    assert "0: 2.00 (1.00 to 3.00), 10: 60 (50 to 70), 20: 450 (400 to 500) |" in script.curves(runs)
