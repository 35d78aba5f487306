from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from buffer_helpers import answer, make
from server_helpers import Cast, NoWeights, Raw, config, eventually, exit_code, finish, hello, lines, manifest, running

from async_rl.buffer.records import Limits
from async_rl.buffer.server import Server
from async_rl.client import Client, Stopped
from async_rl.config import to_toml
from async_rl.errors import ConfigError, HandshakeError
from async_rl.protocol import Ticket
from async_rl.runfolder import RunFolder
from async_rl.wire import decode_groups, encode_groups, pack_header


@pytest.fixture
def settings():
    return config()


@pytest.fixture
def server(settings, tmp_path):
    with running(settings, tmp_path) as server:
        yield server


@pytest.fixture
def cast(server, settings):
    with Cast(server, settings) as cast:
        yield cast


# ---------------------------------------------------------------- handshake


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"protocol": 99}, "install the same version"),
        ({"schema": 99}, "install the same version"),
        ({"contract": "other"}, "same config.toml"),
        ({"role": "king"}, "a role of actor"),
        ({"name": ""}, "a name of 1 to 200"),
        ({"name": "a\nb"}, "printable characters"),
        ({"role": "learner", "rank": 2, "world": 2}, "rank 2 of 2"),
        ({"role": "learner", "rank": 0, "world": 3}, "feeds 1 to 2 ranks"),
        ({"name": None}, "hello.name must be str"),
    ],
)
def test_a_client_that_does_not_fit_is_refused_with_a_sentence(server, settings, change, sentence):
    with Raw(server.address) as raw:
        refused = raw.ask(hello(settings, **change))
    assert refused["type"] == "refused"
    assert sentence in refused["reason"]


def test_ranks_must_belong_to_one_group(cast, server, settings):
    cast.learner(0, 2)
    with Raw(server.address) as raw:
        refused = raw.ask(hello(settings, role="learner", name="x", rank=0, world=1))
    assert "a group of 2" in refused["reason"]


def test_a_newcomer_with_the_same_name_takes_the_place_and_the_tickets_return(cast, server):
    cast.learner()
    old = cast.actor(credit=1)
    old.tickets(1)
    server.service.roster.named("a").pid = 1  # as if it were another process
    new = cast.actor(credit=1)
    assert [(t.ordinal, t.attempt) for t in new.tickets(1)] == [(0, 1)]
    with pytest.raises(HandshakeError, match="took the name"):
        old.until("never")


def test_an_address_that_others_reach_needs_consent_and_a_taken_port_is_a_sentence(tmp_path):
    def serve(**buffer):
        return Server(config(buffer=buffer), tmp_path, Limits(num_tasks=4), NoWeights())

    with pytest.raises(ConfigError, match=r"buffer\.insecure"):
        serve(bind="tcp://0.0.0.0:*")
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        serve(bind="nonsense")
    serve(bind="tcp://0.0.0.0:*", insecure=True).close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="another program listens"):
            serve(bind=f"tcp://127.0.0.1:{taken.getsockname()[1]}")


# ---------------------------------------------------------------- bad input


def test_the_server_survives_noise_and_counts_it(server, settings, cast):
    with Raw(server.address) as raw:
        assert raw.ask(b"")["code"] == "bad_msgpack"
        assert raw.ask(b"\xc1 not msgpack")["code"] == "bad_msgpack"
        assert raw.ask(pack_header({"type": 3}))["code"] == "bad_header"
        assert raw.ask(pack_header({"type": "credit", "count": 4}))["code"] == "hello_first"
        assert raw.ask(hello(settings))["type"] == "welcome"
        assert raw.ask(pack_header({"type": "sing"}))["code"] == "unknown_type"
        assert raw.ask(pack_header({"type": "done"}))["code"] == "wrong_role"
        assert raw.ask(pack_header({"type": "credit", "count": True}))["code"] == "bad_field"
        assert raw.ask(pack_header({"type": "credit", "count": 1 << 63}))["code"] == "bad_field"
        assert raw.ask(pack_header({"type": "fail", "ordinal": 1}))["code"] == "bad_field"
        assert raw.ask(pack_header({"type": "live", "version": 0, "checksum": 7}))["code"] == "bad_field"
        assert raw.ask(pack_header({"type": "submit", "schema": 1, "groups": 3}))["code"] == "bad_header"
        noise = random.Random(0)
        for _ in range(200):
            raw.send(*[noise.randbytes(noise.randrange(40)) for _ in range(noise.randrange(1, 4))])
    assert server.service.refused["wrong_role"] == 1
    cast.learner()
    assert len(cast.actor(credit=2).tickets(2)) == 2


@pytest.mark.parametrize(
    "kind",
    ["credit", "submit", "annotate", "fail", "asleep", "live", "beat", "next", "trained", "snapshot", "eval", "dead"],
)
def test_no_field_of_any_type_can_end_the_server(tmp_path, kind):
    values = [None, -1, 1 << 61, 1.5, "x", b"x", [], [[]], {}, {"a": [1]}, True]
    role = {"next": "learner", "trained": "learner", "snapshot": "learner", "eval": "evaluator", "dead": "monitor"}
    role["annotate"] = "scorer"
    settings = config(reward={"placement": "scorer"})
    names = [
        "count", "received", "ordinal", "attempt", "reason", "final", "version", "checksum", "timer", "in_flight",
        "info", "cpu_s", "step", "manifest", "stats", "path", "metrics", "samples", "name", "seq", "groups", "schema",
    ]  # fmt: skip
    noise = random.Random(kind)
    with running(settings, tmp_path) as server, Raw(server.address) as raw:
        raw.send(hello(settings, role=role.get(kind, "actor"), stage="reward"))
        for _ in range(300):
            raw.send(pack_header({"type": kind, **{n: noise.choice(values) for n in names if noise.random() < 0.8}}))
        assert raw.ask(pack_header({"type": "sing"}))
        eventually(lambda: server.service.refused["unknown_type"] == 1)
        assert server.thread.is_alive()


def test_a_group_that_cannot_be_decoded_is_refused_and_its_ticket_returns(server, settings, cast):
    cast.learner()
    with Raw(server.address) as raw:
        raw.ask(hello(settings))
        live = {"type": "live", "version": 0, "checksum": manifest(0).checksum}
        raw.send(pack_header(live))
        tickets = raw.ask(pack_header({"type": "credit", "count": 1}))
        assert tickets["tickets"][0][:2] == [0, 0]
        frames = encode_groups("submit", [make(0)])
        ack = raw.ask(*map(bytes, [frames[0], *frames[1:-1], b"short"]))
        assert ack == {"type": "ack", "results": [[0, 0, "refused", "bad_shape"]]}
        again = raw.ask(pack_header({"type": "credit", "count": 1}))
        assert again["tickets"][0][:2] == [0, 1]
    assert server.service.refused["bad_shape"] == 1


# ---------------------------------------------------------------- actors


def test_tickets_come_as_soon_as_there_is_room_without_asking_again(cast):
    actor = cast.actor(live=None)
    learner = cast.learner()
    actor.until("version")
    actor.go_live(0)
    first = actor.tickets(4)  # (0 + 1 + 1 - 0) * 2
    finish(actor, first)
    learner.request("next", "shard", step=0)
    learner.train(0)
    actor.until("version")
    actor.go_live(1)
    assert [t.ordinal for t in actor.tickets(2)] == [4, 5]  # (1 + 2 - 1) * 2 = 4, 2 are ready


def test_room_is_shared_between_actors(cast):
    cast.learner()
    first = cast.actor("first", credit=4)
    first.tickets(4)  # all the room there is
    a, b = cast.actor("a"), cast.actor("b")
    for peer in (a, b):
        peer.send("fail", ordinal=99, attempt=0, reason="x", detail="", final=False)
        peer.until("ack")  # so its credit has arrived
    first.close()
    assert sorted(t.ordinal for peer in (a, b) for t in peer.tickets(2)) == [0, 1, 2, 3]


def test_credit_is_counted_without_the_tickets_that_are_under_way(server, settings, cast):
    cast.learner()
    with Raw(server.address) as raw:
        raw.ask(hello(settings))
        raw.send(pack_header({"type": "live", "version": 0, "checksum": manifest(0).checksum}))
        assert len(raw.ask(pack_header({"type": "credit", "count": 2}))["tickets"]) == 2
        # It says 3 before it has seen those two: only one more is due.
        assert len(raw.ask(pack_header({"type": "credit", "count": 3, "received": 0}))["tickets"]) == 1


def test_a_late_and_a_repeated_submit_are_answered_and_not_counted(cast, server, tmp_path):
    cast.learner()
    actor = cast.actor(credit=2)
    first, second = actor.tickets(2)
    assert actor.submit(answer(first)) == [[0, 0, "accepted", ""]]
    assert actor.submit(answer(first)) == [[0, 0, "accepted", ""]]
    actor.send("fail", ordinal=1, attempt=0, reason="engine_error", detail="", final=False)
    actor.until("ack")
    assert actor.submit(answer(second)) == [[1, 0, "failed", "engine_error"]]
    assert server.service.ledger.books()["ready"] == 1


def test_a_dead_actors_tickets_go_to_the_others(cast, server):
    cast.learner()
    dying = cast.actor("dying", credit=4)
    dying.tickets(4)
    other = cast.actor("other", credit=4)
    monitor = cast.join("monitor", "launcher")
    monitor.send("dead", name="dying")
    assert [(t.ordinal, t.attempt) for t in other.tickets(4)] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert [t[:1] for t in dying.until("cancel")[0]["tickets"]] == [[0], [1], [2], [3]]
    assert server.service.ledger.failed == {"actor_lost": 4}


def test_a_silent_actor_is_dead_after_three_beats(server, settings, cast):
    cast.learner()
    with Raw(server.address) as raw:
        raw.ask(hello(settings))
        raw.send(pack_header({"type": "live", "version": 0, "checksum": manifest(0).checksum}))
        assert len(raw.ask(pack_header({"type": "credit", "count": 8}))["tickets"]) == 4
        other = cast.actor("other", credit=4)
        assert [t.attempt for t in other.tickets(4)] == [1, 1, 1, 1]


def test_an_actor_with_other_bytes_gets_no_tickets(cast, server):
    cast.learner()
    actor = cast.actor(live=None)
    actor.send("live", version=0, checksum="not these", transfer_s=0.0, commit_s=0.0)
    eventually(lambda: server.service.versions.mismatches == 1)
    actor.send("fail", ordinal=0, attempt=0, reason="x", detail="", final=True)
    assert actor.until("ack")[0]["results"] == [[0, 0, "refused", "never_issued"]]  # and no tickets before it
    assert server.service.ledger.issued == 0
    actor.go_live(0)
    actor.tickets(4)


def test_pauses_for_weights_are_known_by_median_and_sum(cast, server):
    cast.learner()
    actor = cast.actor(live=None)
    for pause_s in (0.5, 0.1, 0.3):
        actor.send("live", version=0, checksum=manifest(0).checksum, transfer_s=0.0, commit_s=0.0, pause_s=pause_s)
    eventually(lambda: server.service.versions.to_plain()["paused_s"] == pytest.approx(0.9))
    assert server.service.versions.to_plain()["pause_s"] == 0.3


def test_an_actor_that_misses_a_version_is_fenced_until_it_has_caught_up(tmp_path):
    settings = config(weights={"commit_deadline_s": 0.2}, buffer={"max_staleness": 3}, steps=9)
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner = cast.learner()
        slow = cast.actor("slow", credit=2)
        finish(slow, slow.tickets(2))
        learner.request("next", "shard", step=0)
        learner.train(0)
        eventually(lambda: server.service.roster.named("slow").fenced)
        slow.send("credit", count=2)
        fast = cast.actor("fast", credit=1, live=1)
        assert fast.tickets(1)[0].ordinal == 2
        assert not server.service.ledger.leases["slow"]
        slow.go_live(1)
        assert [t.ordinal for t in slow.tickets(2)] == [3, 4]


# ---------------------------------------------------------------- learner


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


# ---------------------------------------------------------------- the end


def run_steps(learner, actor, first, last):
    """Train steps ``first`` to ``last - 1``; every ticket is answered."""
    for step in range(first, last):
        learner.send("next", step=step)
        while True:
            arrived = {h["type"]: h for h, _ in learner.receive(0.02)}
            if "shard" in arrived:
                break
            for header, _ in actor.receive(0.02):
                if header["type"] == "tickets":
                    actor.send_groups([answer(Ticket.from_wire(t)) for t in header["tickets"]])
        learner.train(step)
        actor.go_live(step + 1)


def test_a_whole_run_ends_with_the_last_evaluation_and_closed_books(cast, server, tmp_path):
    learner, actor, evaluator = cast.learner(), cast.actor(credit=100), cast.join("evaluator", "evaluator")
    monitor = cast.join("monitor", "launcher")
    run_steps(learner, actor, 0, 3)
    learner.send("done")
    assert actor.until("stop")[0]["error"] is False
    assert server.service.ending.phase == "evaluating"
    evaluator.send("eval", version=3, metrics={"accuracy": 1.0}, samples=[])
    assert evaluator.until("stop")[0]["error"] is False
    assert monitor.until("stop")[0]["reason"] == "all steps are trained"
    for peer in (learner, actor, evaluator):
        peer.close()
    assert exit_code(server) == 0
    books = json.loads((tmp_path / "books.json").read_text())
    assert books["status"] == "completed"
    assert books["books"] == {
        "issued": 6, "open": 0, "scoring": 0, "ready": 0, "delivered": 0, "trained": 6, "filtered": 0, "failed": 0,
    }  # fmt: skip
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1, 2]


def test_a_step_that_is_called_trained_twice_is_trained_and_announced_once(cast, server, tmp_path):
    learner, actor = cast.learner(), cast.actor(credit=100)
    run_steps(learner, actor, 0, 1)
    first = server.service.ledger.books()["trained"]
    assert learner.train(0)["books"]["trained"] == first
    run_steps(learner, actor, 1, 2)
    assert server.service.versions.count == 3
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1]


def test_the_run_does_not_wait_for_an_evaluator_that_leaves(cast, server):
    learner, actor, evaluator = cast.learner(), cast.actor(credit=100), cast.join("evaluator", "evaluator")
    run_steps(learner, actor, 0, 3)
    learner.send("done")
    actor.until("stop")
    for peer in (evaluator, learner, actor):
        peer.close()
    assert exit_code(server) == 0
    assert "the evaluator has left" in server.service.account.reason


def test_a_stop_does_not_wait_for_the_last_evaluation(cast, server):
    learner, actor, evaluator = cast.learner(), cast.actor(credit=100), cast.join("evaluator", "evaluator")
    monitor = cast.join("monitor", "launcher")
    run_steps(learner, actor, 0, 3)
    learner.send("done")
    actor.until("stop")
    monitor.send("stop", reason="Ctrl-C")
    assert learner.until("stop")[0]["error"] is False
    for peer in (evaluator, learner, actor):
        peer.close()
    assert exit_code(server) == 0
    account = server.service.account
    assert account.status == "completed"
    assert account.reason == "all steps are trained; the last evaluation was not waited for: Ctrl-C"


def test_stop_reaches_all_ranks_at_the_same_step_then_a_checkpoint_then_all_end(tmp_path):
    settings = config()
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        zero, one, actor = cast.learner(0, 2), cast.learner(1, 2), cast.actor()
        monitor = cast.join("monitor", "launcher")
        finish(actor, actor.tickets(4))
        zero.request("next", "shard", step=0)
        monitor.send("stop", reason="Ctrl-C")
        eventually(lambda: server.service.ending.phase == "stopping")
        one.request("next", "shard", step=0)  # rank 0 has it: rank 1 must get it, too
        zero.train(0)
        for rank in (one, zero):
            with pytest.raises(Stopped, match="Ctrl-C"):
                rank.request("next", "shard", step=1)
        one.close()
        header, _ = zero.request("snapshot", "snapshot", path=str(tmp_path / "checkpoints" / "step_1"))
        assert header["ok"] is True
        zero.send("done", stopped=True)
        stop, _ = actor.until("stop")
        assert stop["error"] is False
        zero.close()
        actor.close()
        assert exit_code(server) == 0
        assert server.service.account.status == "stopped"


def test_a_fatal_message_ends_the_run_with_its_sentence(cast, server, tmp_path):
    learner, actor = cast.learner(), cast.actor()
    actor.send("fatal", reason="the verifier is broken")
    for peer in (learner, actor):
        stop, _ = peer.until("stop")
        assert (stop["error"], stop["reason"]) == (True, "the verifier is broken")
        peer.close()
    assert exit_code(server) == 1
    assert json.loads((tmp_path / "books.json").read_text())["reason"] == "the verifier is broken"


def test_a_learner_that_dies_does_not_end_the_run_unless_it_stays_away(tmp_path):
    settings = config(learner={"step_deadline_s": 1.0})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, actor = cast.learner(), cast.actor(credit=8)
        monitor = cast.join("monitor", "launcher")
        tickets = actor.tickets(4)
        learner.close()
        assert monitor.until("status", lambda h: not h["learner"])[0]["status"] == "running"
        finish(actor, tickets)  # what the bound admits goes on
        stop, _ = monitor.until("stop")
        assert stop["error"] is True
        assert stop["reason"].startswith("no learner was connected for 1 s (learner.step_deadline_s) at step 0")


def test_another_life_of_the_learner_takes_the_place_of_the_one_before(cast, server):
    old = cast.learner()
    new = cast.learner(group="second")
    with pytest.raises(HandshakeError, match="another life of the learner group has taken over"):
        old.until("never")
    actor = cast.actor()
    finish(actor, actor.tickets(4))
    assert new.request("next", "shard", step=0)[0]["step"] == 0


def test_the_watchdog_ends_a_run_that_accepts_nothing_with_the_table(tmp_path):
    settings = config(buffer={"watchdog_s": 0.2, "watchdog_rounds": 2})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        cast.learner()
        actor = cast.actor("lazy", credit=1)
        actor.tickets(1)
        assert actor.until("cancel")[0]["tickets"] == [[0, 0]]
        actor.send("credit", count=1)
        stop, _ = actor.until("stop")
        assert stop["error"] is True
        assert "no group was accepted for 0.2 s, round 2 of 2" in stop["reason"]
        assert "lazy                 ordinal 0 attempt 1 open" in stop["reason"]
        actor.close()


def test_a_learner_that_lives_but_never_ends_its_step_ends_the_run(tmp_path):
    settings = config(learner={"step_deadline_s": 0.6})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner = cast.learner()  # beats go on from its thread
        stop, _ = learner.until("stop")
        assert stop["error"] is True
        assert "the learner made no progress at step 0 for 0.6 s" in stop["reason"]
        assert "ranks: rank 0" in stop["reason"]


def test_a_learner_that_waits_for_data_is_not_taken_for_hung(tmp_path):
    settings = config(learner={"step_deadline_s": 1.0}, buffer={"watchdog_s": 2.0, "watchdog_rounds": 1})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner = cast.learner()
        learner.send("next", step=0)
        stop, _ = learner.until("stop")
        assert "no group was accepted" in stop["reason"]


# ---------------------------------------------------------------- resume


def test_a_snapshot_outside_the_run_folder_is_refused(cast, tmp_path):
    learner = cast.learner()
    header, _ = learner.request("snapshot", "snapshot", path=str(tmp_path.parent / "elsewhere"))
    assert header["ok"] is False
    assert "not inside" in header["detail"]
    assert not (tmp_path.parent / "elsewhere").exists()


def test_a_resumed_server_trains_each_ordinal_exactly_once(tmp_path):
    settings = config(steps=4)
    checkpoint = tmp_path / "checkpoints" / "step_2"
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, actor = cast.learner(), cast.actor(credit=100)
        run_steps(learner, actor, 0, 2)
        assert learner.request("snapshot", "snapshot", path=str(checkpoint))[0]["ok"]
        run_steps(learner, actor, 2, 3)  # trained after the checkpoint: lost with the crash
    with running(settings, tmp_path, checkpoint) as server, Cast(server, settings) as cast:
        learner, actor = cast.learner(start=2), cast.actor(credit=100, live=2)
        run_steps(learner, actor, 2, 4)
        learner.send("done")
        actor.until("stop")
        learner.close()
        actor.close()
        assert exit_code(server) == 0
    rows = lines(tmp_path / "batches.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert sorted(o for row in rows for o in row["ordinals"]) == list(range(8))
    assert json.loads((tmp_path / "books.json").read_text())["books"]["trained"] == 8


def test_a_resumed_server_keeps_all_lines_but_those_that_it_writes_again(tmp_path):
    settings = config(steps=4)
    checkpoint = tmp_path / "checkpoints" / "step_1"
    text = "one line\u2028to JSON, two\x85or three to Unicode"
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, actor, evaluator = cast.learner(), cast.actor(credit=100), cast.join("evaluator", "evaluator")
        for version in range(3):  # of the last one the resumed run makes other weights
            if version:
                run_steps(learner, actor, version - 1, version)
            evaluator.send("eval", version=version, metrics={"accuracy": 0.5}, samples=[{"completion": text}])
            if version == 1:
                assert learner.request("snapshot", "snapshot", path=str(checkpoint))[0]["ok"]
        eventually(lambda: len(server.service.account.evals) == 3)
        beats = len((tmp_path / "timeline.jsonl").read_text().split("\n")) - 1
    known = json.loads((checkpoint / "ledger.json").read_text())
    redone = [known["next_ordinal"], *(ordinal for ordinal, *_ in known["open"])]
    kept = [{"ordinal": 0, "prompt": text}]
    rows = [*kept, *({"ordinal": ordinal, "prompt": "lost with the crash"} for ordinal in redone)]
    with open(tmp_path / "samples.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with open(tmp_path / "timeline.jsonl", "a", encoding="utf-8") as file:
        file.write('{"name": "a", "sp')  # cut short by the crash
    Server(settings, tmp_path, Limits(num_tasks=16), NoWeights(), checkpoint).close()
    folder = RunFolder(tmp_path)
    assert folder.samples == kept
    evals = [json.loads(line) for line in (tmp_path / "evals.jsonl").read_text().split("\n") if line]
    assert [(row["version"], row["samples"]) for row in evals] == [(v, [{"completion": text}]) for v in (0, 1)]
    content = (tmp_path / "timeline.jsonl").read_text()
    assert content == "" or content.endswith("}\n")
    assert len(folder.timeline) >= beats


def test_a_run_that_ends_without_an_evaluator_says_that_the_last_evaluation_is_missing(cast, server):
    learner, actor = cast.learner(), cast.actor(credit=100)
    run_steps(learner, actor, 0, 3)
    learner.send("done")
    stop, _ = learner.until("stop")
    assert (stop["error"], stop["reason"]) == (
        False,
        "all steps are trained; the last evaluation is missing: no evaluator is connected",
    )


def test_a_checkpoint_that_is_not_there_is_a_sentence(settings, tmp_path):
    with pytest.raises(ConfigError, match="cannot resume"):
        Server(settings, tmp_path, Limits(num_tasks=4), NoWeights(), tmp_path / "none")


# ---------------------------------------------------------------- the process


@pytest.mark.real
def test_the_process_serves_ends_in_order_on_sigint_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config()))
    command = [sys.executable, "-m", "async_rl.buffer.server", str(path), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        note = tmp_path / "run" / "server.json"
        eventually(note.exists)
        told = json.loads(note.read_text())
        assert told["pid"] == process.pid
        with Client(told["address"], "learner", "learner0", config().contract_hash()) as learner:
            welcome = learner.connect(10.0)
            assert welcome["run_id"] == told["run_id"]
            assert welcome["weights_address"].startswith("tcp://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            with pytest.raises(Stopped, match="interrupted"):
                learner.request("next", "shard", step=0)
            learner.send("done", stopped=True)
        assert process.wait(10.0) == 0
    finally:
        process.kill()
        output, _ = process.communicate()
    assert "Traceback" not in output
    assert json.loads((tmp_path / "run" / "books.json").read_text())["status"] == "stopped"


@pytest.mark.real
def test_a_wrong_configuration_is_one_sentence_and_exit_code_one(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config(buffer={"bind": "tcp://0.0.0.0:*"})))
    command = [sys.executable, "-m", "async_rl.buffer.server", str(path), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("async-rl: buffer.bind")
    assert "Traceback" not in done.stderr
