"""The server and its actors: tickets, credit, leases, lost actors, versions that are live."""

from __future__ import annotations

import pytest
from buffer_helpers import answer
from server_helpers import Cast, Raw, config, eventually, finish, hello, manifest, running

from async_rl.wire import pack_header


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


def test_a_silent_actor_is_let_go_after_a_period(server, settings, cast):
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
