"""A real server of a control run: fragments in, shards with the numbers of episodes out, hostile input counted."""

import json
from dataclasses import replace

import numpy as np
import pytest
from control_groups import N, T, control_config, control_limits, filled
from server_helpers import Cast, Raw, eventually, hello, lines, running

from async_rl.buffer.server import limits_of
from async_rl.config import parse_control
from async_rl.errors import ConfigError
from async_rl.wire import decode_groups


@pytest.fixture
def stage(tmp_path):
    """A running server, its settings and clients."""
    settings = control_config()
    with running(settings, tmp_path, limits=control_limits(settings)) as server, Cast(server, settings) as cast:
        yield server, settings, cast


def test_fragments_become_shards_and_the_episodes_of_all_actors_are_told_with_them(stage, tmp_path):
    server, _, cast = stage
    learner, first, second = cast.learner(), cast.actor("a", credit=1), cast.actor("b", credit=1)
    for actor, value in ((first, 10.0), (second, 20.0)):
        (ticket,) = actor.tickets(1)
        assert (ticket.group_size, ticket.task_index) == (1, 0)
        group = filled(ticket, episode_returns=np.array([value], np.float32))
        assert actor.submit(group)[0][2] == "accepted"
    header, frames = learner.request("next", "shard", step=0)
    assert len(decode_groups(header, frames)) == 2
    assert header["counts"] == [{"groups": 2, "sequences": 2, "steps": 2 * (T * N - 1)}]
    stats = header["stats"]
    assert stats["control"] == {
        "episode/return": 15.0,
        "episode/length": 9.0,
        "episode/count": 2.0,
        "env_steps/generated": 2.0 * (T * N - 1),
        "fps/collect": None,
    }
    assert stats["lengths"] == {}
    assert "accuracy" not in stats
    learner.train(0)
    books = json.loads((tmp_path / "books.json").read_text())
    assert books["staleness"]["histogram"] == {"0": 10}
    assert books["control"]["episode/count"] == 2.0
    server.service.tick(0.0, all_heard=False)  # hands the lines over
    assert lines(tmp_path / "samples.jsonl") == []


def test_beats_tell_how_fast_the_actors_step(stage):
    server, _, cast = stage
    rates = {"a": (100.0, 600.0), "b": (0.0, 250.0)}
    for name, (before, after) in rates.items():
        peer = cast.join("actor", name)
        for steps, seconds in ((before, 1.0), (after, 2.0)):
            timer = {"state": "generating", "seconds": {"generating": seconds, "waiting_ticket": 50.0}, "spans": []}
            peer.send("beat", timer=timer, info={"env_steps": steps}, cpu_s=0.0, rss_bytes=0.0, in_flight=[])
    eventually(lambda: server.service.roster.steps_per_s() == 750.0)  # 500 and 250 more in a second of work each


def test_what_a_resumed_run_starts_from_is_told_once_however_often_it_was_evaluated(tmp_path):
    settings = control_config()
    checkpoint = tmp_path / "checkpoints" / "step_1"
    limits = control_limits(settings)
    with running(settings, tmp_path, limits=limits) as server, Cast(server, settings) as cast:
        learner, actor, evaluator = cast.learner(), cast.actor("a", credit=2), cast.join("evaluator", "evaluator")
        for ticket in actor.tickets(2):
            assert actor.submit(filled(ticket))[0][2] == "accepted"
        learner.request("next", "shard", step=0)
        learner.train(0)
        for version in (0, 1):
            evaluator.send("eval", version=version, metrics={"return": 1.0})
        assert learner.request("snapshot", "snapshot", path=str(checkpoint))[0]["ok"]
        eventually(lambda: len(server.service.account.evals) == 2)
    with running(settings, tmp_path, checkpoint, limits=limits) as server, Cast(server, settings) as cast:
        cast.learner(start=1)
        cast.join("evaluator", "evaluator").send("eval", version=1, metrics={"return": 2.0})
        eventually(lambda: len(server.service.account.evals) == 1)
    assert [(row["version"], row["metrics"]["return"]) for row in lines(tmp_path / "evals.jsonl")] == [
        (0, 1.0),
        (1, 2.0),
    ]


def test_hostile_groups_are_refused_counted_and_their_tickets_given_again(stage):
    server, _, cast = stage
    cast.learner()
    actor = cast.actor("a", credit=1)
    hostile = {
        "bad_shape": {"logprobs": np.zeros((T, N, 3), np.float32)},
        "not_finite": {"step_rewards": np.full((T, N), np.nan, np.float32)},
        "missing_array": {"actions": None},
        "unknown_array": {"tokens": np.zeros(T, np.int32), "loss_mask": np.zeros(T, np.uint8)},
    }
    for reason, changes in hostile.items():
        (ticket,) = actor.tickets(1)
        assert ticket.ordinal == 0
        group = filled(ticket, **changes)
        if reason == "unknown_array":  # it looks like tokens: what a token run may hold is no array of this one
            group = replace(group, arrays={**group.arrays, "versions": np.zeros(T, np.int32)})
        outcome = actor.submit(group)[0]
        assert outcome[2] == "refused", (reason, outcome)
        actor.send("credit", count=1)
    assert set(server.service.refused) >= set(hostile) - {"unknown_array"}
    (ticket,) = actor.tickets(1)
    assert (ticket.ordinal, ticket.attempt) == (0, 4)
    assert actor.submit(filled(ticket))[0][2] == "accepted"


def test_each_process_that_takes_a_name_is_told_how_many_had_it_before(stage):
    server, settings, _ = stage
    lives = []
    for pid in (11, 11, 12, 13):
        with Raw(server.address) as raw:
            lives.append(raw.ask(hello(settings, name="actor0", pid=pid))["life"])
    assert lives == [0, 0, 1, 2]  # the second is the first one again, whose connection broke


def test_other_environments_and_scorers_are_turned_away_with_a_sentence(stage):
    server, settings, _ = stage
    other = control_config(env={"id": "gymnasium:Other-v0"})
    with Raw(server.address) as raw:
        said = raw.ask(hello(settings, contract=other.contract_hash()))["reason"]
        assert said.startswith("environment, observations, networks, episodes or seed differ")
    with Raw(server.address) as raw:
        said = raw.ask(hello(settings, role="scorer", stage="reward"))["reason"]
        assert "has no work for scorers" in said
    with Raw(server.address) as raw:
        assert "feeds 1 to 2 ranks" in raw.ask(hello(settings, role="learner", rank=0, world=3))["reason"]


def test_a_server_without_the_spaces_of_the_environment_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"spaces\.json describes no environment"):
        limits_of(parse_control({"domain": "control"}), tmp_path)


def test_a_bare_message_of_a_fragment_without_versions_is_refused_and_its_ticket_returns(stage):
    server, _, cast = stage
    cast.learner()
    actor = cast.actor("a", credit=1)
    (ticket,) = actor.tickets(1)
    group = filled(ticket)
    arrays = {k: v for k, v in group.arrays.items() if k != "versions"}
    actor.send_groups([replace(group, arrays=arrays)])
    assert actor.until("ack")[0]["results"] == [[0, 0, "refused", "missing_array"]]
    actor.send("credit", count=1)
    assert actor.tickets(1)[0].attempt == 1
    assert server.service.refused["missing_array"] == 1
