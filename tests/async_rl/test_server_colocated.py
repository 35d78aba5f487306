"""Actors and learner that take turns on a device: a step goes out when the actors that worked have said asleep."""

from __future__ import annotations

import pytest
from buffer_helpers import answer
from server_helpers import Cast, Raw, config, eventually, finish, hello, manifest, running

from async_rl.wire import pack_header


def colocated(**sections):
    buffer = {"max_staleness": 0, **sections.pop("buffer", {})}
    return config(actors={"placement": "colocated"}, buffer=buffer, **sections)


@pytest.fixture
def settings():
    return colocated()


def told(peer):
    """Everything sent before was handled: the answer to a question came back."""
    peer.send("fail", ordinal=99, attempt=0, reason="x", detail="", final=False)
    peer.until("ack", lambda h: h["results"][0][0] == 99)


def no_shard(learner):
    return not any(h["type"] == "shard" for h, _ in learner.receive(0.05))


def test_a_complete_step_is_held_until_every_actor_that_worked_is_asleep(cast):
    learner, one, two = cast.learner(), cast.actor("one", credit=1), cast.actor("two", credit=1)
    cast.actor("joining", credit=0, live=None)  # holds nothing up
    learner.send("next", step=0)
    for actor in (one, two):
        finish(actor, actor.tickets(1))
    one.send("asleep")
    told(one)
    assert no_shard(learner)
    two.send("asleep")
    learner.until("shard")
    learner.train(0)
    # A new version wakes them; that it is live gives them work.
    for actor in (one, two):
        assert actor.until("version", lambda h: h["manifest"]["version"] == 1)
        actor.go_live(1)
        actor.send("credit", count=1)
    assert sorted(t.ordinal for actor in (one, two) for t in actor.tickets(1)) == [2, 3]


def test_who_is_awake_for_nothing_is_told_to_sleep_before_the_learner_trains_on_its_device(cast):
    learner, busy = cast.learner(), cast.actor("busy", credit=2)
    tickets = busy.tickets(2)
    idle = cast.actor("idle")
    assert idle.until("tickets")[0]["tickets"] == []
    finish(busy, tickets)
    busy.send("asleep")
    learner.send("next", step=0)
    told(busy)
    assert no_shard(learner)
    idle.send("asleep")
    learner.until("shard")
    late = cast.actor("late")  # its device is taken
    assert late.until("tickets")[0]["tickets"] == []
    late.send("asleep")
    told(late)
    assert not any(h["type"] in ("tickets", "version") for h, _ in late.receive(0.05)), "it is told once"
    learner.train(0)
    for actor in (busy, idle, late):
        assert actor.until("version", lambda h: h["manifest"]["version"] == 1)


def test_a_sleeper_is_woken_though_another_actor_joins_and_never_gets_ready(cast):
    cast.learner()
    cast.actor("joining", credit=0, live=None)
    actor = cast.actor("one", credit=1)
    finish(actor, actor.tickets(1))
    actor.send("asleep")
    assert actor.until("version", lambda h: h["manifest"]["version"] == 0), "its step lacks a group"


def test_without_turns_nobody_is_waited_for(tmp_path):
    settings = config(buffer={"max_staleness": 0})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, actor = cast.learner(), cast.actor()
        finish(actor, actor.tickets(2))
        learner.request("next", "shard", step=0)


def test_a_dead_actor_is_not_waited_for(cast):
    learner, one, two = cast.learner(), cast.actor("one", credit=1), cast.actor("two", credit=1)
    learner.send("next", step=0)
    for actor in (one, two):
        finish(actor, actor.tickets(1))
    one.send("asleep")
    told(one)
    assert no_shard(learner)
    cast.join("monitor", "launcher").send("dead", name="two")
    learner.until("shard")


def test_a_sleeper_gets_no_tickets_and_is_woken_by_its_own_version_when_a_group_is_lacking(cast, server):
    cast.learner()
    one, two = cast.actor("one", credit=1), cast.actor("two", credit=1)
    finish(one, one.tickets(1))
    one.send("asleep")
    one.send("credit", count=5)  # after it: what is said before may be answered before
    told(one)
    (ticket,) = two.tickets(1)
    two.send("fail", ordinal=ticket.ordinal, attempt=0, reason="prompt_refused", detail="", final=True)
    two.until("ack")
    assert server.service.ledger.issued == 2, "one is asleep, two is awake but took no more"
    two.send("asleep")
    for actor in (one, two):
        assert actor.until("version", lambda h: h["manifest"]["version"] == 0)
    one.go_live(0)
    assert [t.ordinal for t in one.tickets(1)] == [2]
    told(one)
    assert not any(h["type"] == "version" for h, _ in one.receive(0.05)), "it is told once"


def test_tickets_that_cross_an_asleep_are_taken_back(cast, server):
    learner, actor = cast.learner(), cast.actor(credit=2)
    (first, second) = actor.tickets(2)
    finish(actor, [first])
    actor.send("asleep")
    assert actor.until("cancel")[0]["tickets"] == [[second.ordinal, 0]]
    assert server.service.ledger.failed == {"asleep": 1}
    actor.until("version", lambda h: True)
    learner.send("next", step=0)
    actor.go_live(0)
    actor.send("credit", count=2)
    (again,) = actor.tickets(1)
    assert (again.ordinal, again.attempt) == (second.ordinal, 1)
    assert actor.submit(answer(again))[0][2] == "accepted"
    told(actor)
    assert no_shard(learner)
    actor.send("asleep")
    learner.until("shard")


def test_an_actor_that_worked_is_waited_for_after_a_break_too_but_not_another_process_of_its_name(
    cast, server, settings
):
    learner = cast.learner()
    live = pack_header({"type": "live", "version": 0, "checksum": manifest(0).checksum})
    with Raw(server.address) as raw, Raw(server.address) as again, Raw(server.address) as other:
        raw.ask(hello(settings, name="one"))
        raw.send(live)
        assert raw.ask(pack_header({"type": "credit", "count": 1}))["type"] == "tickets"
        again.ask(hello(settings, name="one"))  # the same process: its ticket is lost, but it may use the device
        two = cast.actor("two", credit=2)
        finish(two, two.tickets(2))
        two.send("asleep")
        learner.send("next", step=0)
        told(two)
        assert server.service._actors.in_use() == ["one"]
        assert no_shard(learner)
        assert other.ask(hello(settings, name="one", pid=2))["type"] == "welcome"
        learner.until("shard")


def test_an_actor_that_never_sleeps_ends_the_run_by_name(tmp_path):
    settings = colocated(buffer={"watchdog_s": 0.5, "watchdog_rounds": 1})
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, actor = cast.learner(), cast.actor("restless")
        finish(actor, actor.tickets(2))
        learner.send("next", step=0)
        stop, _ = learner.until("stop")
        assert "restless has not given its device back: it never said asleep" in stop["reason"]
        eventually(lambda: server.service.account.status == "failed")
