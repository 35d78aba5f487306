"""The buffer server's decision: who takes part in the broadcast of a version, with which rank."""

from collections import Counter

import pytest
from server_helpers import config
from server_helpers import manifest as published
from service_helpers import Bench

from async_rl.buffer.broadcasts import Broadcasts
from async_rl.buffer.post import Post
from async_rl.buffer.roster import Roster, Session
from async_rl.config import WeightsConfig
from async_rl.errors import WeightsError, WireError
from async_rl.weights.manifest import Manifest, combine
from async_rl.weights.offer import Offer
from async_rl.wire import unpack_header


def manifest(version, epoch=0):
    return Manifest(
        version=version,
        epoch=epoch,
        run_id="r",
        tensors=(),
        nbytes=0,
        chunk_bytes=4,
        chunks=(),
        checksum=combine(()),
        segment="",
        host="",
    )


class World:
    def __init__(self, path="broadcast"):
        self.roster, self.post, self.counts = Roster(), Post(), Counter()
        self.broadcasts = Broadcasts(WeightsConfig(path=path), self.roster, self.post, self.counts)

    def join(self, name, *devices, live=0):
        session = Session(
            identity=name.encode(), name=name, role="actor", rank=0, world=1, pid=1, host=name, heard=0.0, seq=0
        )
        self.roster.join(session)
        session.live = live
        self.broadcasts.register(session, {"type": "receives", "devices": list(devices or [f"cuda:{name}"])})
        return session

    def publish(self, version, epoch=0, device="cuda:learner", store="h:1"):
        """Group and world as the learner is told them, and ranks by actor."""
        header = {"type": "trained", "sends": {"store": store, "device": device}}
        answer = self.broadcasts.offer(header, manifest(version, epoch))["broadcast"]
        ranks = {}
        for identity, frames in self.post.take():
            told = unpack_header(frames[0])
            assert told["type"] == "offer"
            offer = Offer.from_wire(told)
            assert (offer.store, offer.order) == (store, (epoch, version))
            assert (offer.group, offer.world) == (answer["group"], answer["world"])
            ranks[identity.decode()] = offer.rank
        return answer["group"], answer["world"], ranks

    def hear(self, version, missing=(), error="", epoch=0):
        self.broadcasts.hear(
            {"type": "broadcast", "epoch": epoch, "version": version, "missing": list(missing), "error": error}
        )


def test_actors_have_the_ranks_behind_the_learner_s_in_the_order_in_which_they_came():
    world = World()
    world.join("a")
    world.join("b", "cuda:b0", "cuda:b1")
    world.join("c")
    group, size, ranks = world.publish(1)
    assert (size, ranks) == (5, {"a": 1, "b": 2, "c": 4})
    world.hear(1)
    assert world.publish(2) == (group, 5, ranks)
    assert world.counts == {"offered": 6, "sent": 1}


def test_members_that_change_make_another_communicator():
    world = World()
    first = world.join("a")
    groups = [world.publish(1)[0]]
    world.join("b")
    groups.append(world.publish(2)[0])
    world.roster.leave(first, "dead")
    group, size, ranks = world.publish(3)
    assert (size, ranks) == (2, {"b": 1})
    assert len({*groups, group}) == 3
    again = world.join("a")  # its next process
    assert world.publish(4)[2] == {"b": 1, "a": 2}
    again.fenced = True
    assert world.publish(5)[2] == {"b": 1}


def test_who_holds_no_version_yet_or_cannot_receive_is_left_out():
    world = World()
    world.join("starting", live=-1)
    world.join("pulls")
    world.roster.named("pulls").devices = ()
    group, size, ranks = world.publish(1)
    assert (size, ranks) == (1, {})
    assert group


def test_who_missed_a_version_is_left_out_until_it_holds_it():
    world = World()
    world.join("a")
    slow = world.join("slow")
    group, _, _ = world.publish(3)
    world.hear(3, missing=[2], error="1 of 2 did not come in 30 s")
    assert world.broadcasts.notices() == [
        "slow missed the broadcast of version 3, and takes part again once it holds it"
    ]
    after, size, ranks = world.publish(4)
    assert (size, ranks, after != group) == (2, {"a": 1}, True)
    slow.live = 2
    assert world.publish(5)[2] == {"a": 1}
    slow.live = 3
    assert world.publish(6)[2] == {"a": 1, "slow": 2}
    assert world.broadcasts.notices() == []
    assert world.counts["failed"] == 1


def test_after_the_run_has_gone_back_nothing_is_waited_for():
    world = World()
    slow = world.join("slow")
    world.publish(9)
    world.hear(9, missing=[1], error="late")
    slow.live = 4
    assert world.publish(4, epoch=1)[2] == {"slow": 1}


def test_another_life_of_the_learner_has_another_communicator():
    world = World()
    world.join("a")
    groups = [world.publish(1)[0], world.publish(2)[0], world.publish(2, store="h:2")[0]]
    assert groups[0] == groups[1] != groups[2]


def test_a_transfer_that_broke_costs_nobody_its_place_but_the_communicator_is_another_one():
    world = World()
    world.join("a")
    world.join("b")
    group, _, ranks = world.publish(1)
    world.hear(1, error="a block of 7 bytes failed")
    after, _, same = world.publish(2)
    assert same == ranks
    assert after != group


def test_a_device_that_is_in_the_communicator_already_or_of_another_kind_pulls():
    world = World()
    world.join("a")
    world.join("beside", "cuda:a")
    world.join("with_learner", "cuda:learner")
    world.join("twice", "cuda:x", "cuda:x")
    world.join("cpu", "cpu:host/1")
    world.join("b")
    assert world.publish(1)[1:] == (3, {"a": 1, "b": 2})
    assert [notice.partition(" ")[0] for notice in world.broadcasts.notices()] == [
        "beside",
        "with_learner",
        "twice",
        "cpu",
    ]
    assert world.publish(2, device="cpu:host/0")[2] == {"cpu": 1}


def test_a_word_about_a_version_that_another_server_offered_is_passed_over():
    world = World()
    world.join("a")
    group, _, _ = world.publish(1)
    world.hear(0, error="late")
    assert world.publish(2)[0] == group


def test_without_broadcasts_nothing_is_offered():
    header = {"type": "trained", "sends": {"store": "h:1", "device": "cuda:0"}}
    assert World("auto").broadcasts.offer(header, manifest(1)) == {}
    assert World().broadcasts.offer({"type": "trained"}, manifest(1)) == {}  # a learner that cannot send


def test_the_server_offers_before_it_announces_and_counts_what_arrived(tmp_path):
    bench = Bench(config(weights={"path": "broadcast"}), tmp_path)
    bench.learner()
    for name in ("a", "pulls"):
        bench.join("actor", name)
        bench.live(name, 0)
    bench.say("a", "receives", devices=["cpu:a"])
    bench.read("a"), bench.read("pulls")
    bench.join("learner", "m", group="h", step=0)  # its next life publishes the start version again
    sends = {"store": "127.0.0.1:7", "device": "cpu:l"}
    told = bench.say("m", "trained", step=-1, manifest=published(0).to_wire(), stats={}, sends=sends)
    (answer,) = [header for header in told if header["type"] == "trained"]
    offer, version = [header for header in bench.read("a") if header["type"] in ("offer", "version")]
    assert [header["type"] for header in bench.read("pulls")] == ["version"]
    assert (offer["type"], version["type"], offer["rank"], offer["world"]) == ("offer", "version", 1, 2)
    assert answer["broadcast"] == {"group": offer["group"], "world": 2}
    assert (offer["store"], offer["version"]) == ("127.0.0.1:7", version["manifest"]["version"])
    assert offer["deadline_s"] == 30.0
    facts = {"transfer_s": 0.0, "commit_s": 0.0, "broadcast": True}
    bench.say("a", "live", version=0, epoch=0, checksum=published(0).checksum, **facts)
    bench.say("m", "broadcast", epoch=0, version=0, missing=[], error="")
    weights = bench.service.versions.to_plain()
    assert [weights[f"broadcasts_{name}"] for name in ("sent", "failed", "offered", "received")] == [1, 0, 1, 1]
    bench.say("m", "broadcast", epoch=0, version=0, missing=[1], error="1 of 1 did not come in 30 s")
    bench.tick(1.0, beating=("a", "pulls", "m"))
    assert bench.service.account.notices == [
        "a missed the broadcast of version 0, and takes part again once it holds it"
    ]
    bench.kill()


@pytest.mark.parametrize("devices", [None, "cuda:0", [1], [""], ["x" * 400], ["x"] * 2000])
def test_what_names_no_devices_is_refused(devices):
    world = World()
    session = world.join("a")
    with pytest.raises(WireError):
        world.broadcasts.register(session, {"type": "receives", "devices": devices})


@pytest.mark.parametrize("sends", [3, {"store": 1, "device": "d"}, {"store": "s"}, {"store": "s" * 400, "device": "d"}])
def test_a_learner_that_does_not_say_where_to_meet_is_refused(sends):
    with pytest.raises(WireError):
        World().broadcasts.offer({"type": "trained", "sends": sends}, manifest(1))


@pytest.mark.parametrize(("field", "value"), [("epoch", float("inf")), ("rank", "x"), ("deadline_s", None)])
def test_an_offer_with_impossible_numbers_is_refused_as_one(field, value):
    told = {"epoch": 0, "version": 1, "store": "h:1", "group": "g", "rank": 1, "world": 2, "deadline_s": 3.0}
    assert Offer.from_wire(told).order == (0, 1)
    with pytest.raises(WeightsError, match="malformed offer"):
        Offer.from_wire({**told, field: value})
