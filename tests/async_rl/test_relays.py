"""The buffer server's decision: which hosts are told to pull from which."""

from types import SimpleNamespace

import pytest

from async_rl.buffer.post import Post
from async_rl.buffer.relays import Relays
from async_rl.buffer.roster import Roster, Session
from async_rl.config import WeightsConfig
from async_rl.errors import WireError
from async_rl.wire import unpack_header


class World:
    def __init__(self, fanout=2, path="auto"):
        self.roster, self.post, self.leads = Roster(), Post(), {}
        self.versions = SimpleNamespace(newest=SimpleNamespace(host="learner"))
        self.relays = Relays(WeightsConfig(relay=fanout, path=path), self.roster, self.post, self.versions)

    def join(self, name, host=None, key="", *, address=None, relays=True):
        session = Session(
            identity=name.encode(), name=name, role="actor", rank=0, world=1, pid=1, host=host or name, heard=0.0, seq=0
        )
        self.roster.join(session)
        if relays:
            address = f"tcp://{name}:1" if address is None else address
            self.relays.register(session, {"type": "relay", "address": address, "key": key})
        return session

    def told(self):
        """The newest parents by name."""
        self.relays.answer()
        found = {}
        for identity, frames in self.post.take():
            header = unpack_header(frames[0])
            assert header["type"] == "parents"
            found[identity.decode()] = header["parents"]
            self.leads[identity.decode()] = header["leads"]
        return found


def test_the_first_host_pulls_from_the_learner_and_the_next_from_it():
    world = World(fanout=1)
    world.join("a")
    assert world.told() == {"a": [["", -1]]}
    world.join("b")
    assert world.told() == {"b": [["tcp://a:1", 0]]}  # a is told nothing new


def test_processes_of_one_host_pull_from_the_same_parents_and_one_of_them_sends_on():
    world = World(fanout=1)
    world.join("a")
    world.join("b1", host="b")
    world.join("b2", host="b")
    world.join("c")
    assert world.told() == {
        "a": [["", -1]],
        "b1": [["tcp://a:1", 0]],
        "b2": [["tcp://a:1", 0]],
        "c": [["tcp://b1:1", 1]],
    }
    assert world.leads == {"a": True, "b1": True, "b2": False, "c": True}


def test_a_host_that_leaves_is_left_out():
    world = World(fanout=1)
    sessions = [world.join(name) for name in "abc"]
    world.told()
    world.roster.leave(sessions[1], "silent")
    world.relays.update()
    assert world.told() == {"c": [["tcp://a:1", 0]]}
    world.relays.update()
    assert world.told() == {}


def test_a_host_that_comes_back_is_told_anew_and_comes_last():
    world = World(fanout=1)
    sessions = [world.join(name) for name in "abc"]
    world.told()
    world.roster.leave(sessions[0], "silent")
    world.relays.update()
    assert world.told() == {"b": [["", -1]], "c": [["tcp://b:1", 0]]}
    again = world.join("a")
    assert again.relay == "tcp://a:1"
    assert world.told() == {"a": [["tcp://c:1", 1]]}
    world.relays.update()
    assert world.told() == {}


def test_a_host_that_is_late_comes_last():
    world = World(fanout=1)
    first = world.join("a")
    world.join("b")
    world.told()
    first.fenced = True
    world.relays.update()
    assert world.told() == {"a": [["tcp://b:1", 0]], "b": [["", -1]]}


def test_hosts_with_other_keys_have_trees_of_their_own():
    world = World(fanout=1)
    world.join("a", key="k")
    world.join("b", key="l")
    world.join("c", key="k")
    assert world.told() == {"a": [["", -1]], "b": [["", -1]], "c": [["tcp://a:1", 0]]}


def test_the_learner_s_host_and_who_does_not_send_on_are_no_part_of_it():
    world = World()
    world.join("a", host="learner")
    world.join("b", relays=False)
    world.join("c", address="")
    world.relays.update()
    assert world.told() == {"a": [], "c": []}  # who has asked is answered: it waits for that
    assert world.leads == {"a": True, "c": True}


def test_a_process_that_cannot_listen_has_the_parents_of_its_host():
    world = World(fanout=1)
    world.join("a")
    world.join("b1", host="b")
    world.join("b2", host="b", address="")
    assert world.told() == {"a": [["", -1]], "b1": [["tcp://a:1", 0]], "b2": [["tcp://a:1", 0]]}
    assert world.leads == {"a": True, "b1": True, "b2": False}


def test_hosts_do_not_relay_to_each_other_over_loopback():
    world = World(fanout=1)
    world.join("a", address="tcp://127.0.0.1:7000")
    world.join("b", address="tcp://[::1]:7000")
    world.join("c")
    assert world.told() == {"a": [["", -1]], "b": [["", -1]], "c": [["", -1]]}


def test_many_who_come_at_once_cost_each_of_the_others_one_message():
    world = World(fanout=4)
    for number in range(20):
        world.join(f"h{number}")
    world.told()
    world.relays.update()
    world.told()
    for number in range(20, 30):
        world.join(f"h{number}")
    assert set(world.told()) == {f"h{number}" for number in range(20, 30)}
    world.relays.update()
    assert len(world.post.take()) < 30
    world.relays.update()
    assert world.post.take() == []


def test_the_learner_s_host_counts_where_its_memory_is_not_used():
    world = World(fanout=1, path="zmq")
    world.join("a", host="learner")
    assert world.told() == {"a": [["", -1]]}


def test_without_relays_nobody_is_told_anything():
    world = World(fanout=0)
    world.join("a")
    assert world.told() == {}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"address": 7},
        {"address": "http://a:1"},
        {"address": "tcp://" + "a" * 400 + ":1"},
        {"address": "tcp://a:1", "key": 1},
        {"address": "tcp://a"},
        {"address": "tcp://a:b"},
        {"address": "tcp://:1"},
    ],
)
def test_what_is_no_address_is_refused(fields):
    world = World()
    session = world.join("a", relays=False)
    with pytest.raises(WireError):
        world.relays.register(session, {"type": "relay", **fields})
    assert session.relay == ""
