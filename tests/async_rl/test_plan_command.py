"""``async-rl plan``: where the numbers come from, which candidate is recommended, what is said and written."""

import json

import pytest
from run_folder import make_run, write_lines
from typer.testing import CliRunner

from async_rl.cli import app
from async_rl.config import load_any
from async_rl.errors import ConfigError
from async_rl.lengths import Lengths
from async_rl.plan.candidates import Row, actor_counts, bounds_of, choose, predict, search
from async_rl.plan.measured import measure
from async_rl.plan.outcome import Outcome
from async_rl.plan.scenario import Speeds, scenario

SMALL = ("sampling.group_size=4", "buffer.groups_per_step=16", "actors.slots=8", "buffer.max_staleness=1")


def base(**fields):
    """An actor makes 8 · 64 tokens a second; a step trains 16 · 4 answers of 16 tokens in a second: balanced at 2."""
    return scenario(
        load_any("arithmetic", SMALL),
        speeds=Speeds(slot_tokens_per_s=64, step_s=1.0),
        lengths=Lengths(kind="constant", median=16),
        **{"actors": 1, "ranks": 1, **fields},
    )


def row(actors, bound, learner, tokens_per_s):
    outcome = Outcome(
        learner=learner,
        actors=0.5,
        actors_awake=0.5,
        tokens_per_s=tokens_per_s,
        step_s=1.0,
        ages={0: 1},
        lost=0.0,
        books={},
        steps=1,
    )
    return Row(base(actors=actors).with_bound(bound), outcome)


def plan(*args):
    return CliRunner().invoke(app, ["plan", *map(str, args)], catch_exceptions=True)


def test_the_fewest_actors_that_keep_the_learner_busy_with_the_smallest_bound_are_chosen():
    rows = [row(1, 2, 0.50, 50), row(2, 0, 0.60, 60), row(2, 1, 0.975, 97.5), row(2, 4, 0.98, 98), row(3, 1, 1.0, 100)]
    assert choose(rows) is rows[2]  # η = 4 gives 0.5 % more, a third actor 2.5 %


def test_where_nothing_keeps_the_learner_busy_most_tokens_are_chosen():
    rows = [row(1, 1, 0.4, 40), row(2, 1, 0.7, 70), row(2, 2, 0.9, 90), row(3, 2, 0.905, 90.5)]
    assert choose(rows) is rows[2]


def test_candidates_lie_around_the_balance():
    assert base().balanced_actors == 2.0
    assert actor_counts(base()) == [1, 2, 3, 4]
    assert bounds_of(base().with_bound(5)) == [0, 1, 2, 3, 4, 5, 6, 8]


def test_more_bound_is_tried_until_it_buys_nothing():
    found = search(base(), [1, 2], [0, 1, 2, 3])
    ended = [i for i, r in enumerate(found.rows) if r.of_ideal >= 0.97]
    assert [found.rows[i].scenario.actors for i in ended] == [1, 2]
    assert ended[-1] == len(found.rows) - 1  # nothing is tried behind the row that is good enough
    assert all(r.bound >= 1 for r in found.rows if r.of_ideal >= 0.97)  # synchronous, each side has half of the time
    assert found.choice is found.rows[ended[-1]]


def test_tokens_of_a_smaller_system_are_those_of_the_whole():
    whole = base(actors=4).with_bound(4)
    assert predict(whole).tokens_per_s == pytest.approx(1024, rel=0.01)  # the learner's
    assert predict(whole, 2).tokens_per_s == pytest.approx(predict(whole).tokens_per_s, rel=0.01)


def test_the_speeds_of_a_run_are_read_from_its_folder(tmp_path):
    run = make_run(tmp_path / "run")
    steps = [(9.0, 9.0), (9.0, 9.0), (2.0, 0.25), (3.0, 0.5), (7.0, 0.25)]
    rows = [
        {"step": i, "time/learn_s": s, "time/publish_s": p, "length/generated": 6.0} for i, (s, p) in enumerate(steps)
    ]
    write_lines(run / "metrics.jsonl", rows)
    found = measure(run)
    assert found.speeds == Speeds(
        slot_tokens_per_s=1500 / 24 / 512,  # tokens, seconds of generating, slots
        step_s=3.0,  # the median of 2, 3 and 7: the first two are left out
        publish_s=0.25,
        weights_s=0.003,
        pause_s=0.0005,
        filtered=1 / 7,
    )
    assert found.ranks == 1
    # texts of 8 and 5 characters, scaled to a mean of 6 tokens: 7.4 and 4.6
    assert found.lengths is not None
    assert found.lengths.recorded == (7, 5)


def test_a_folder_without_a_measured_step_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no run folder, there is no config.toml"):
        measure(tmp_path)
    with pytest.raises(ConfigError, match="shows no step behind the first 2 steps"):
        measure(make_run(tmp_path / "run"))


def test_the_plan_is_printed_and_written(tmp_path):
    sets = [part for setting in SMALL for part in ("--set", setting)]
    out = tmp_path / "plan.json"
    options = ["--slot-tokens-per-s", 64, "--step-s", 1, "--lengths", "constant", "--median", 16, "--out", out]
    done = plan("arithmetic", *sets, *options, "--actors", 2)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert (
        f"Take 2 actors for 1 learner rank and max_staleness = {json.loads(out.read_text())['choice']['max_staleness']}"
        in text
    )
    assert "Both sides are busy" in text
    written = json.loads(out.read_text())
    assert written["balanced_actors"] == 2.0
    assert written["choice"] == written["rows"][-1]
    assert written["choice"]["tokens_per_s"] == pytest.approx(1024, rel=0.03)
    assert written["words"][-1].startswith("A version is published after every step")


def test_what_is_missing_or_wrong_is_named():
    for args, message in [
        (["--step-s", 1], "how fast is an actor?"),
        (["--tokens-per-s", 100], "how long does a step of the learner take?"),
        (["--tokens-per-s", 100, "--slot-tokens-per-s", 1, "--step-s", 1], "give one"),
        (["--tokens-per-s", 100, "--step-s", 1, "--actors", "many"], "--actors 'many': a number, or search"),
        (["--tokens-per-s", 100, "--step-s", 1, "--median", 99], "--median 99: between 1 and the longest answer, 16"),
        (["--tokens-per-s", 0, "--step-s", 1], "it must be above 0"),
        (["--tokens-per-s", 100, "--step-s", 1, "--set", "actors.placement=colocated"], "colocated"),
    ]:
        assert message in str(plan("arithmetic", *args).exception), args


def test_a_control_run_is_planned_in_environment_steps(tmp_path):
    out = tmp_path / "plan.json"
    done = plan("cartpole", "--tokens-per-s", 10_000, "--step-s", 0.1, "--actors", 1, "--out", out)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["unit"] == "env steps"
    assert "env steps/s" in done.output
