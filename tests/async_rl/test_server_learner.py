"""The server and the learner: shards, trained steps, and what is written down about them."""

from __future__ import annotations

import json

import numpy as np
from buffer_helpers import answer, make
from server_helpers import Raw, finish, hello, lines, manifest

from async_rl.wire import decode_groups, pack_header


def test_two_ranks_get_complementary_shards_and_the_same_one_when_they_ask_again(cast, tmp_path):
    zero, one = cast.learner(0, 2), cast.learner(1, 2)
    actor = cast.actor()
    finish(actor, actor.tickets(4))
    first, frames = zero.request("next", "shard", step=0)
    second, _ = one.request("next", "shard", step=0)
    again, _ = zero.request("next", "shard", step=0)
    ordinals = [[g["ordinal"] for g in h["groups"]] for h in (first, second, again)]
    assert sorted(ordinals[0] + ordinals[1]) == [0, 1]
    assert ordinals[2] == ordinals[0]
    assert first["counts"] == second["counts"] == [{"groups": 2, "sequences": 4, "tokens": 4}]
    assert first["costs"] == [[[3, 3], [3, 3]]]
    group, expected = decode_groups(first, frames)[0], make(ordinals[0][0])
    np.testing.assert_array_equal(group.arrays["tokens"], expected.arrays["tokens"])
    assert first["stats"]["reward"] == 0.5
    assert first["stats"]["age"] == {"mean": 0.0, "max": 0, "histogram": {"0": 4}}
    assert second["stats"] == {}
    assert zero.train(0)["books"]["trained"] == 2


def test_trained_steps_reach_the_files_and_the_monitors(cast, tmp_path, server):
    learner = cast.learner()
    actor = cast.actor()
    monitor = cast.join("monitor", "launcher")
    tickets = actor.tickets(4)
    finish(actor, tickets)
    learner.request("next", "shard", step=0)
    learner.request(
        "trained", "trained", step=0, manifest=manifest(1).to_wire(), stats={"lr": 0.5, "publish_s": 0.25, "text": "x"}
    )
    status, _ = monitor.until("status", lambda h: h["step"] == 1)
    assert status["stats"] == {"reward": 0.5, "accuracy": 0.5, "length": 1.0, "lr": 0.5, "publish_s": 0.25}
    assert {c["name"] for c in status["clients"]} == {"learner0", "a", "launcher"}
    books = json.loads((tmp_path / "books.json").read_text())
    assert books["step"] == 1
    assert books["books"]["trained"] == 2
    assert books["staleness"] == {"mean": 0.0, "max": 0, "histogram": {"0": 4}, "bound": 1}
    assert books["tokens"] == {"generated": 8, "trained": 4}
    assert books["weights"]["bytes"] == 8
    assert books["weights"]["publish_s"] == 0.25
    assert lines(tmp_path / "batches.jsonl") == [
        {"step": 0, "ordinals": [0, 1], "attempts": [0, 0], "task_indices": [t.task_index for t in tickets[:2]]}
    ]
    assert server.service._weights.served == [0, 1]


def test_a_wrong_step_or_manifest_is_refused(server, settings):
    with Raw(server.address) as raw:
        raw.ask(hello(settings, role="learner", name="l"))
        trained = {"type": "trained", "stats": {}}
        assert raw.ask(pack_header({**trained, "step": 0, "manifest": manifest(1).to_wire()}))["code"] == "bad_step"
        assert (
            raw.ask(pack_header({**trained, "step": -1, "manifest": manifest(1).to_wire()}))["code"] == "bad_manifest"
        )
        assert raw.ask(pack_header({**trained, "step": -1, "manifest": {}}))["code"] == "bad_manifest"
        assert raw.ask(pack_header({"type": "next", "step": 1}))["code"] == "bad_step"


def test_texts_beats_and_evaluations_are_written_down(cast, tmp_path):
    learner = cast.learner()
    actor = cast.actor(credit=0)
    actor.beat_info = lambda: {
        "timer": {
            "state": "generating",
            "seconds": {"generating": 3.0, "idle": 1.0},
            "spans": [["generating", 1.0, 2.0]],
        },
        "in_flight": [[0, 0, 0.5]],
    }
    actor.send("credit", count=8)
    evaluator = cast.join("evaluator", "evaluator")
    evaluator.send("eval", version=0, metrics={"accuracy": 0.5, "bad": "x"}, samples=[{"prompt": "p"}])
    tickets = actor.tickets(4)
    actor.submit(answer(tickets[0], meta={"prompt": "1+1=", "completions": ["2", "3"]}))
    finish(actor, tickets[1:])
    monitor = cast.join("monitor", "m")
    status, _ = monitor.until("status", lambda h: any(c["state"] == "generating" for c in h["clients"]))
    assert status["evals"] == [{"version": 0, "metrics": {"accuracy": 0.5}}]
    shard, _ = learner.request("next", "shard", step=0)
    assert shard["stats"]["evals"] == [{"version": 0, "metrics": {"accuracy": 0.5}}]
    assert shard["stats"]["utilization"]["actors"] == 0.75
    learner.train(0)
    (sample,) = lines(tmp_path / "samples.jsonl")
    assert sample == {"ordinal": 0, "prompt": "1+1=", "completions": ["2", "3"], "rewards": [0.0, 1.0], "version": 0}
    assert lines(tmp_path / "timeline.jsonl")[0] == {"name": "a", "role": "actor", "spans": [["generating", 1.0, 2.0]]}
    (row,) = lines(tmp_path / "evals.jsonl")
    assert (row["version"], row["metrics"], row["samples"]) == (0, {"accuracy": 0.5}, [{"prompt": "p"}])
