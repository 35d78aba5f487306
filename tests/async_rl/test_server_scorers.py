"""Scorers of a real server: leases, annotations, stages that nobody serves."""

from __future__ import annotations

import json

import numpy as np
import pytest
from buffer_helpers import annotation, answer, make
from server_helpers import Cast, Raw, config, eventually, exit_code, hello, lines, running

import async_rl.buffer.scorer_desk as scorer_desk
from async_rl.data import Annotation
from async_rl.wire import decode_groups, encode_annotations, pack_header


def staged(**sections):
    """A run with both stages."""
    sections = {"reward": {"placement": "scorer"}, "reference": {"placement": "scorer"}, **sections}
    return config(algorithm={"kl_coef": 0.1}, **sections)


@pytest.fixture
def settings():
    return staged()


def submit_all(actor, count):
    """Groups as an actor of such a run sends them: without rewards."""
    for ticket in actor.tickets(count):
        assert actor.submit(answer(ticket, rewards=(np.nan, np.nan)))[0][2] == "accepted"


@pytest.mark.parametrize(
    ("sections", "stage", "sentence"),
    [
        ({}, "reward", "set reward.placement = 'scorer'"),
        ({"algorithm": {"kl_coef": 0.1}}, "reference", "set reference.placement = 'scorer'"),
        ({}, "reference", "set algorithm.kl_coef above 0"),
        ({}, "", "a scorer needs a stage: reward or reference"),
        ({}, 3, "hello.stage must be str"),
    ],
)
def test_a_scorer_without_work_is_refused_with_the_setting_that_gives_it_some(tmp_path, sections, stage, sentence):
    settings = config(**sections)
    with running(settings, tmp_path) as server, Raw(server.address) as raw:
        refused = raw.ask(hello(settings, role="scorer", stage=stage))
    assert refused["type"] == "refused"
    assert sentence in refused["reason"]


def test_a_step_is_delivered_with_what_two_scorers_added(cast, tmp_path):
    learner, actor = cast.learner(), cast.actor()
    reward, reference = cast.scorer("r", "reward"), cast.scorer("f", "reference")
    for ticket in actor.tickets(4):
        meta = {"prompt": "1+1=", "completions": ["2", "3"]} if ticket.ordinal == 0 else {}
        actor.submit(answer(ticket, rewards=(np.nan, np.nan), meta=meta))
    learner.send("next", step=0)
    for scorer, stage in ((reward, "reward"), (reference, "reference")):
        header, frames = scorer.until("lease")
        assert header["lease_s"] == 30.0
        groups = decode_groups(header, frames)
        while len(groups) < 4:
            groups += decode_groups(*scorer.until("lease"))
        assert [g.ordinal for g in groups] == [0, 1, 2, 3]
        acks = [row for g in groups for row in scorer.annotate(annotation(g, stage))]
        assert acks == [[ordinal, 0, "accepted", ""] for ordinal in range(4)]
    shard, frames = learner.until("shard")
    assert shard["stats"]["reward"] == 0.5
    for group in decode_groups(shard, frames):
        np.testing.assert_array_equal(group.rewards, [0, 1])
        np.testing.assert_array_equal(group.arrays["ref_logprobs"], np.float32([0, 0, -0.25] * 2))
    learner.train(0)
    books = json.loads((tmp_path / "books.json").read_text())
    assert {stage: (n["annotated"], n["scorers"]) for stage, n in books["stages"].items()} == {
        "reward": (4, 1),
        "reference": (4, 1),
    }
    assert books["stages"]["reward"]["seconds"] > 0
    assert {(c["name"], c["stage"]) for c in books["clients"] if c["role"] == "scorer"} == {
        ("r", "reward"),
        ("f", "reference"),
    }
    (sample,) = lines(tmp_path / "samples.jsonl")
    assert (sample["ordinal"], sample["rewards"]) == (0, [0.0, 1.0])


def test_credit_bounds_what_a_scorer_gets_and_work_is_shared(cast):
    cast.learner()
    one, two = cast.scorer("one", credit=1), cast.scorer("two", credit=8)
    submit_all(cast.actor(), 4)
    (mine,) = one.leased(1)
    others = two.leased(3)
    assert sorted(g.ordinal for g in [mine, *others]) == [0, 1, 2, 3]


def test_a_dead_scorers_groups_go_to_another_and_nothing_is_issued_again(cast, server):
    cast.learner()
    dying = cast.scorer("dying")
    submit_all(cast.actor(), 4)
    dying.leased(4)
    other = cast.scorer("other")
    cast.join("monitor", "launcher").send("dead", name="dying")
    (group,) = other.leased(1)  # alone, because any of them may be what the first one died of
    assert group.ordinal == 0
    assert (server.service.ledger.issued, server.service.ledger.failed) == (4, {})
    # It lives: it is let in again, and what it had made counts, because nobody else was faster.
    assert dying.annotate(annotation(make(0), "reward")) == [[0, 0, "accepted", ""]]
    assert other.annotate(annotation(make(0), "reward")) == [[0, 0, "late", "moved_on"]]


def test_a_group_that_scorers_do_not_survive_is_filtered_by_the_third(cast, server, capsys):
    cast.learner()
    monitor = cast.join("monitor", "launcher")
    submit_all(cast.actor(), 4)
    for i in range(3):
        scorer = cast.scorer(f"s{i}")
        assert scorer.leased(4 if i == 0 else 1)[0].ordinal == 0
        monitor.send("dead", name=f"s{i}")
        eventually(lambda i=i: server.service.roster.named(f"s{i}") is None)
        scorer.close()
    last = cast.scorer("last")
    for ordinal in (1, 2, 3):
        (group,) = last.leased(1)
        assert last.annotate(annotation(group, "reward")) == [[ordinal, 0, "accepted", ""]]
    assert server.service.ledger.filtered == {"scorers_died": 1}
    assert "ordinal 0 attempt 0 is filtered (scorers_died): 3 reward scorers, the last s2" in capsys.readouterr().out


def test_a_leaving_and_a_silent_scorer_give_back_what_they_have(cast, server, settings):
    cast.learner()
    leaving = cast.scorer("leaving")
    submit_all(cast.actor(), 4)
    leaving.leased(4)
    leaving.close()
    with Raw(server.address) as raw:
        raw.ask(hello(settings, role="scorer", stage="reward", name="silent"))
        assert len(raw.ask(pack_header({"type": "credit", "count": 4}))["groups"]) == 1
        last, ordinals = cast.scorer("last"), []
        for _ in range(4):
            (group,) = last.leased(1)
            ordinals.append(group.ordinal)
            assert last.annotate(annotation(group, "reward"))[0][2:] == ["accepted", ""]
        assert sorted(ordinals) == [0, 1, 2, 3]


def test_bad_annotations_are_refused_and_the_group_is_scored_by_another(cast, server, settings):
    cast.learner()
    with Raw(server.address) as raw:
        raw.ask(hello(settings, role="scorer", stage="reward", name="bad"))
        submit_all(cast.actor(credit=1), 1)
        assert raw.ask(pack_header({"type": "credit", "count": 1}))["type"] == "lease"
        good = annotation(make(0), "reward")
        wrong = Annotation(ordinal=0, attempt=0, stage="reference", values=good.values)
        assert raw.ask(*map(bytes, encode_annotations("annotate", [wrong])))["results"] == [
            [0, 0, "refused", "wrong_stage"]
        ]
        head, _ = encode_annotations("annotate", [good])
        assert raw.ask(bytes(head), b"short")["results"] == [[0, 0, "failed", "bad_shape"]]
        assert raw.ask(pack_header({"type": "annotate", "groups": 3}))["code"] == "schema_mismatch"
        other = cast.scorer("other")
        (group,) = other.leased(1)
        assert other.annotate(annotation(group, "reward")) == [[0, 0, "accepted", ""]]
    assert server.service.refused["bad_shape"] == 1
    assert server.service.refused["wrong_stage"] == 1


def test_a_scorer_that_gives_up_for_good_filters_the_task(cast, server):
    cast.learner()
    scorer = cast.scorer()
    submit_all(cast.actor(credit=1), 1)
    scorer.leased(1)
    scorer.send("fail", ordinal=0, attempt=0, reason="judge_down", detail="503", final=True)
    assert scorer.until("ack")[0]["results"] == [[0, 0, "filtered", "judge_down"]]
    assert server.service.ledger.filtered == {"judge_down": 1}


def test_a_stage_that_nobody_serves_is_named_in_the_status_and_by_the_watchdog(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_desk, "UNSERVED_S", 0.3)
    settings = staged(buffer={"watchdog_s": 1.0, "watchdog_rounds": 1})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, monitor = cast.learner(), cast.join("monitor", "launcher")
        reference = cast.scorer("f", "reference")
        submit_all(cast.actor(), 4)
        reference.leased(4)
        learner.send("next", step=0)
        status, _ = monitor.until("status", lambda h: h["notices"])
        (notice,) = status["notices"]
        assert "4 groups wait for the stage 'reward', but no scorer of it is connected" in notice
        assert status["stages"]["reward"]["waiting"] == 4
        stop, _ = learner.until("stop")
        assert stop["error"] is True
        assert "no group became ready for 1 s" in stop["reason"]
        assert "scorers: f (reference" in stop["reason"]
        assert notice.partition("connected")[0] in stop["reason"]
        assert "ordinal 0 attempt 0 scoring (reward: no scorer, reference: f)" in stop["reason"]


def test_scorers_are_stopped_with_the_actors_and_waited_for(cast, server):
    learner, actor, scorer = cast.learner(), cast.actor(), cast.scorer()
    learner.send("done", stopped=True)
    for peer in (actor, scorer):
        assert peer.until("stop")[0]["error"] is False
    learner.close()
    actor.close()
    eventually(lambda: [s.name for s in server.service.roster] == ["s"])
    assert server.service.ending.phase == "closing"
    scorer.close()
    assert exit_code(server) == 0


def test_a_resumed_server_gives_what_was_in_scoring_to_scorers_again(tmp_path):
    settings = staged()
    checkpoint = tmp_path / "checkpoints" / "step_0"
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, actor, scorer = cast.learner(), cast.actor(), cast.scorer()
        for ticket in actor.tickets(4):
            actor.submit(answer(ticket, rewards=(np.nan, np.nan), meta={"prompt": "1+1=", "completions": ["2", "3"]}))
        groups = scorer.leased(4)
        scorer.annotate(annotation(groups[0], "reward"))
        assert learner.request("snapshot", "snapshot", path=str(checkpoint))[0]["ok"]
        scorer.annotate(annotation(groups[1], "reward"))  # its text is written again after the resume
    with running(settings, tmp_path, checkpoint) as server, Cast(server, settings) as cast:
        cast.learner()
        assert [row["ordinal"] for row in lines(tmp_path / "samples.jsonl")] == [0]
        assert [g.ordinal for g in cast.scorer().leased(3)] == [1, 2, 3]
        assert [g.ordinal for g in cast.scorer("f", "reference").leased(4)] == [0, 1, 2, 3]
        assert server.service.ledger.issued == 4
