"""The utilisation benchmark: its arithmetic on a run written by hand, its picture, and one small run with processes."""

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from unittest.mock import ANY

import pytest

from async_rl.bench.utilization import figures_of, learner_bar, parse_modes, parse_ratios, scenario_of, to_plain
from async_rl.bench.utilization_plot import chart, page
from async_rl.bench.utilization_run import Scenario, evaluate
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.runfolder import RunFolder


def scenario(mode="in_flight", **changes):
    settings = {"ratio": 1.0, "lengths": "constant", "seconds": 2.0, "actors": 1, "slots": 4, "groups_per_step": 4}
    return Scenario(mode=mode, **(settings | {"step_s": 0.5, "max_staleness": 0} | changes))


def written(folder, wanted, period_s, steps):
    """A run whose learner trains half a second in each period and waits for data in the rest of it."""
    zero = time.time() - time.monotonic()  # so that the timeline's clock reads as the actors' one
    spans = []
    for step in range(steps):
        begin = zero + step * period_s
        spans += [["training", begin, begin + 0.5], ["waiting_data", begin + 0.5, begin + period_s]]
    rows = [
        {"name": "learner0", "role": "learner", "spans": spans},
        {"name": "actor0", "role": "actor", "spans": [["generating", zero, zero + steps * period_s]]},
    ]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [{"step": s, "time": s, "tokens/step": 64.0 * wanted.batch} for s in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return RunFolder(folder)


def test_busy_shares_count_the_given_step_time_and_the_slots_in_use(tmp_path):
    wanted = scenario()
    run = written(tmp_path, wanted, 0.8, 20)
    slots = {"actor0": [(0.0, 0.0), (8.0, 24.0), (16.0, 48.0)]}  # 3 of 4 slots
    found = evaluate(wanted, run, slots, 5)
    assert found.steps == 20 - wanted.warmup_steps
    assert found.learner == pytest.approx([0.5 / 0.8] * 5, rel=1e-3)
    assert found.actors == pytest.approx([0.75] * 5, rel=1e-3)
    assert found.rate == pytest.approx(1 / 0.8, rel=1e-3)
    # 4 slots make the 16 answers of 64 tokens in a step's time: that is what ratio 1 means
    assert wanted.tokens_per_s() == 16 * 64 / (4 * 0.5)
    assert found.generation_s == pytest.approx(0.5)
    assert found.ideal == pytest.approx(2.0)
    assert found.states["learner"]["training"] == pytest.approx(0.625, rel=0.05)


def test_what_lies_beyond_the_actors_last_word_is_not_measured(tmp_path):
    wanted = scenario()
    run = written(tmp_path, wanted, 0.8, 20)
    found = evaluate(wanted, run, {"actor0": [(0.0, 0.0), (10.0, 40.0)]}, 2)
    assert found.seconds < 10.0
    assert found.actors == pytest.approx([1.0, 1.0], rel=1e-3)
    with pytest.raises(AsyncRLError, match="steps in the steady state"):
        evaluate(wanted, run, {"actor0": [(0.0, 0.0), (3.5, 14.0)]}, 5)


def test_the_ratio_is_the_speed_of_all_actors_over_the_learners():
    slow, fast = scenario(ratio=0.5), scenario(ratio=2.0, actors=2)
    assert slow.tokens_per_s() == scenario().tokens_per_s() / 2
    assert fast.tokens_per_s() == scenario().tokens_per_s()  # two actors are twice as fast as one


def test_each_mode_is_a_setting_of_the_product(tmp_path):
    found = {}
    for mode in parse_modes("in-flight,synchronous,one-step-off,drained"):
        config = scenario_of(mode, 1.0, "lognormal", 5.0, 2, 0.5).config(tmp_path)
        found[mode] = (config.buffer.max_staleness, config.actors.weight_updates)
    assert found == {
        "synchronous": (0, "in_flight"),
        "one_step_off": (1, "drained"),
        "drained": (4, "drained"),
        "in_flight": (4, "in_flight"),
    }


def test_bars_hold_for_the_side_that_must_not_wait(tmp_path):
    assert [learner_bar(r) for r in (0.5, 1.0, 2.0)] == [None, 0.97, 0.98]
    wanted = scenario(lengths="lognormal")
    folders = [tmp_path / name for name in ("fast", "slow")]
    for folder in folders:
        folder.mkdir()
    slots = {"actor0": [(0.0, 0.0), (60.0, 240.0)]}
    ours = evaluate(wanted, written(folders[0], wanted, 0.5, 40), slots, 5)
    base = scenario("synchronous", lengths="lognormal")
    theirs = evaluate(base, written(folders[1], base, 1.0, 40), slots, 5)
    figures = {figure.name.partition(",")[0]: figure for figure in figures_of(ours, [theirs, ours])}
    assert (figures["learner busy"].bar, figures["actors busy"].bar) == (0.97, 0.97)
    assert figures["steps"].ratio == pytest.approx(2.0, rel=1e-3)
    assert figures["steps"].bar == pytest.approx(0.95 * ours.ideal, abs=1e-3)
    assert all(figure.bar is None for figure in figures_of(theirs, [theirs, ours]))


def test_options_that_cannot_be_read_are_named():
    with pytest.raises(ConfigError, match=r"there is no mode 'async'; known are synchronous, one_step_off"):
        parse_modes("in-flight,async")
    for wrong in ("", "1,x", "0", "-1", "nan"):
        with pytest.raises(ConfigError, match=r"such as 0\.5,1,2"):
            parse_ratios(wrong)


def test_the_picture_is_whole_and_stands_alone(tmp_path):
    wanted = scenario()
    run = evaluate(wanted, written(tmp_path, wanted, 0.8, 20), {"actor0": [(0.0, 0.0), (16.0, 48.0)]}, 5)
    rows = [to_plain(run, run), to_plain(run, None)]
    root = ET.fromstring(chart(rows))
    kinds = [r.get("class") for r in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert [kinds.count(kind) for kind in ("speed", "learner", "actors")] == [1, 2, 2]
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "75 %" in texts
    assert "http" not in page(chart(rows)).replace("http://www.w3.org/2000/svg", "")


@pytest.mark.real
@pytest.mark.timeout(120)
def test_a_small_run_with_real_processes_gives_plausible_figures(tmp_path):
    out, plot = tmp_path / "found.json", tmp_path / "found.html"
    command = [sys.executable, "-m", "async_rl", "bench", "utilization", "--out", str(out), "--plot", str(plot)]
    small = ["--modes", "in-flight", "--actors", "1", "--seconds", "0.5", "--step-s", "0.1", "--lengths", "constant"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    (run,) = document["runs"]
    assert run["steps"] >= 5
    assert 0 < run["learner_busy"] <= 1.02  # the edges of parts are interpolated
    assert 0 < run["actors_busy"] <= 1.001
    assert run["ideal"] == pytest.approx(2.0, rel=1e-6)  # constant lengths: the times are equal
    assert run["steps_per_s"] <= 1 / 0.1 + 0.5
    # the simulator runs the same ledger in virtual time; wide enough for a machine that is busy with something else
    assert run["plan"] == {"learner_busy": pytest.approx(run["learner_busy"], abs=0.15), "actors_busy": ANY}
    assert run["plan"]["actors_busy"] == pytest.approx(run["actors_busy"], abs=0.15)
    assert {f["name"] for f in document["figures"]} == {f"{s} busy, in_flight, ratio 1" for s in ("learner", "actors")}
    assert "<svg" in plot.read_text()
