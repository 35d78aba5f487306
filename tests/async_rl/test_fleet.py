"""Commands on a cluster that is simulated: places, deaths, moves, scaling, each by hand and without waiting."""

from itertools import pairwise
from pathlib import Path

import pytest

from async_rl.errors import AsyncRLError
from async_rl.launch import fleet as fleets
from async_rl.launch.fleet import Fleet
from async_rl.launch.fleet_rules import FleetRules
from async_rl.launch.places import Ended, Lost, Started, Task

KILLED = Ended(exit_code=-9, sentence=None, told="was ended by SIGKILL on n1")
SAID_WHY = Ended(exit_code=1, sentence="no such model", told="ended with exit code 1 on n1")
DONE = Ended(exit_code=0, sentence=None, told="ended with exit code 0 on n1")
NODE_LOST = Lost(told="its Ray worker or node is gone (x)")
PLACE_S = 120.0


class FakeLife:
    def __init__(self, cluster, task, resources):
        self.cluster, self.task, self.resources = cluster, task, resources
        self.is_placed = False
        self.reports = []
        self.asked_to_stop = 0
        self.is_removed = False

    def poll(self):
        assert not self.is_removed
        if self.reports:
            return self.reports.pop(0)
        if not self.is_placed and self.cluster.free >= 1:
            self.cluster.free -= 1
            self.is_placed = True
            port = self.task.port or self.cluster.next_port
            return Started(pid=1, host="n1", address=f"n1:{port}" if self.task.listens else "")
        return None

    def stop(self):
        self.asked_to_stop += 1
        self.reports.append(Ended(exit_code=143, sentence=None, told="ended with exit code 143"))

    def remove(self):
        assert not self.is_removed, "once"
        self.is_removed = True
        self.cluster.free += self.is_placed


class FakeCluster:
    def __init__(self, free):
        self.free = free
        self.next_port = 5000
        self.begun = []

    def begin(self, task, resources):
        self.begun.append(FakeLife(self, task, resources))
        return self.begun[-1]

    def room(self):
        return f"{self.free} places are free"

    def of(self, name):
        """Lives of a name, in order."""
        return [life for life in self.begun if life.task.name.endswith(name)]


class FakeTasks:
    def learner(self, index, address):
        port = int(address.rpartition(":")[2] or 0)
        return self._task(f"learner{index or ''}", (address,), index == 0, port)

    def worker(self, name, role, address):
        return self._task(name, (role, address))

    def _task(self, name, command, listens=False, port=0):
        return Task(name=name, command=command, listens=listens, port=port, log=Path("log"), work=Path("/"), needs=())


class World:
    def __init__(self, free=10, **rules):
        self.cluster = FakeCluster(free)
        self.notes, self.dead = [], []
        given = {"least": 2, "most": 6, "learners": 1, "scorers": ()} | rules
        resources = {"learner": {"CPU": 2.0}, "worker": {"CPU": 1.0, "GPU": 1.0}}
        self.fleet = Fleet(
            self.cluster, FakeTasks(), FleetRules(**given, **resources), "run", self.notes.append, self.dead.append
        )

    def started(self):
        """The learner serves and the least actors run, at second 2."""
        self.fleet.begin(0.0)
        self.fleet.turn(0.0)
        self.fleet.serve(1.0)
        self.fleet.turn(1.0)
        self.fleet.turn(2.0)
        return self

    def running(self):
        return sorted(n for n, m in self.fleet.members.items() if m.life is not None and m.life.is_placed)

    def names(self):
        return sorted(m.name for m in self.fleet.actors())


def test_workers_begin_when_the_server_answers_and_serve_its_address():
    world = World(scorers=("reward",))
    world.fleet.begin(0.0)
    world.fleet.turn(0.0)
    assert world.fleet.address == "n1:5000"
    assert world.running() == ["learner"]
    world.fleet.serve(1.0)
    world.fleet.turn(1.0)
    assert world.running() == ["learner", "run.actor0", "run.actor1", "run.reward0"]
    assert world.cluster.of("actor0")[0].task.command == ("actor", "n1:5000")
    assert world.cluster.of("reward0")[0].resources == {"CPU": 1.0, "GPU": 1.0}


def test_further_learner_hosts_begin_once_the_first_has_an_address():
    world = World(learners=3)
    world.fleet.begin(0.0)
    world.fleet.turn(0.0)
    world.fleet.turn(0.0)
    assert world.running() == ["learner", "learner1", "learner2"]
    assert world.cluster.of("learner2")[0].task.command == ("n1:5000",)


@pytest.mark.parametrize("end", [KILLED, NODE_LOST])
def test_an_actor_that_dies_is_told_and_replaced_in_another_place(end):
    world = World().started()
    world.cluster.of("actor1")[0].reports = [end]
    world.fleet.turn(10.0)
    assert world.dead == ["run.actor1"]
    assert world.cluster.of("actor1")[0].is_removed
    world.fleet.turn(10.9)
    assert len(world.cluster.of("actor1")) == 1, "a second before the first restart"
    world.fleet.turn(11.0)
    world.fleet.turn(11.1)
    assert world.running() == ["learner", "run.actor0", "run.actor1"]
    assert world.fleet.members["run.actor1"].lives.restarts == 1


def test_an_actor_that_said_why_is_given_up_and_the_others_go_on():
    world = World().started()
    world.cluster.of("actor1")[0].reports = [SAID_WHY]
    world.fleet.turn(10.0)
    world.fleet.turn(500.0)
    assert world.names() == ["run.actor0"]
    assert len(world.cluster.of("actor1")) == 1
    world.cluster.of("actor0")[0].reports = [SAID_WHY]
    with pytest.raises(AsyncRLError, match="no other actor is left"):
        world.fleet.turn(501.0)


def test_an_actor_that_lost_its_server_is_not_to_blame():
    world = World().started()
    world.fleet.praise(["run.actor0"])
    world.cluster.of("learner")[0].reports = [NODE_LOST]
    world.cluster.of("actor0")[0].reports = [SAID_WHY]
    world.fleet.turn(10.0)
    assert not world.fleet.members["run.actor0"].lives.given_up
    assert not world.fleet.is_serving


def test_a_learner_that_dies_is_resumed_and_actors_stay_where_its_address_is_the_same():
    world = World().started()
    world.cluster.of("learner")[0].reports = [KILLED]
    world.fleet.turn(10.0)
    assert world.fleet.address == ""
    world.fleet.turn(11.0)
    world.fleet.turn(11.1)
    second = world.cluster.of("learner")[1]
    assert second.task.port == 5000, "the port that it had"
    world.fleet.serve(12.0)
    world.fleet.turn(12.0)
    assert len(world.cluster.of("actor0")) == 1
    assert world.running() == ["learner", "run.actor0", "run.actor1"]


def test_actors_move_to_a_learner_that_comes_back_elsewhere():
    world = World().started()
    world.cluster.of("learner")[0].reports = [NODE_LOST]
    world.fleet.turn(10.0)
    world.fleet.turn(11.0)
    world.cluster.begun[-1].task = Task(
        name="learner", command=(), listens=True, port=7000, log=Path("log"), work=Path("/"), needs=()
    )
    world.fleet.turn(11.1)
    assert world.fleet.address == "n1:7000"
    assert world.cluster.of("actor0")[0].is_removed, "its server is gone, and with it all that it held"
    world.fleet.turn(11.2)
    assert world.running() == ["learner"], "they wait until the server answers"
    world.fleet.serve(12.0)
    assert world.names() == ["run.actor0", "run.actor1"], "they are still wanted"
    for now in (12.1, 12.2, 12.3):
        world.fleet.turn(now)
    assert world.running() == ["learner", "run.actor0", "run.actor1"]
    assert world.cluster.of("actor0")[1].task.command == ("actor", "n1:7000")


def test_workers_make_room_for_a_learner_that_finds_no_other_place():
    world = World(free=3).started()
    world.cluster.of("learner")[0].reports = [NODE_LOST]
    world.cluster.free = -1  # its node is gone, with its place
    world.fleet.turn(10.0)
    world.fleet.turn(11.0)
    assert world.cluster.of("learner")[1].task.port == 5000
    world.fleet.turn(11.0 + fleets.YIELD_S)
    assert world.running() == ["run.actor0", "run.actor1"]
    world.fleet.turn(11.1 + fleets.YIELD_S)
    world.fleet.turn(11.2 + fleets.YIELD_S)
    assert world.running() == ["learner"]
    assert world.names() == ["run.actor0", "run.actor1"], "they are still wanted"
    world.fleet.serve(30.0)
    for now in (30.0, 30.1):
        world.fleet.turn(now)
    assert world.running() == ["learner", "run.actor0"], "there is room for one, and the other waits"


def test_the_run_ends_with_the_learner():
    world = World().started()
    world.cluster.of("actor0")[0].reports = [DONE]
    world.cluster.of("learner")[0].reports = [DONE]
    world.fleet.turn(10.0)
    assert world.fleet.end == DONE
    assert world.fleet.is_over
    world.cluster.of("actor1")[0].reports = [KILLED]
    world.fleet.turn(20.0)
    world.fleet.turn(30.0)
    assert world.running() == [], "nobody is replaced"
    world.fleet.close()
    assert all(life.is_removed for life in world.cluster.begun)
    assert world.cluster.free == 10


def test_a_learner_that_said_why_ends_the_run_with_its_words():
    world = World().started()
    world.cluster.of("learner")[0].reports = [SAID_WHY]
    with pytest.raises(AsyncRLError, match=r"learner is given up.*exit code 1"):
        world.fleet.turn(10.0)


def test_a_learner_that_keeps_dying_is_given_up_after_three_restarts():
    world = World().started()
    for lives in range(1, 4):
        world.cluster.of("learner")[-1].reports = [KILLED]
        world.fleet.turn(200.0 * lives)
        world.fleet.turn(200.0 * lives + 100)
    world.cluster.of("learner")[-1].reports = [KILLED]
    with pytest.raises(AsyncRLError, match="learner is given up"):
        world.fleet.turn(1000.0)
    assert len(world.cluster.of("learner")) == 4


def test_asked_to_stop_the_learner_ends_and_nobody_is_replaced():
    world = World().started()
    world.fleet.stop()
    world.fleet.turn(10.0)
    assert world.cluster.of("learner")[0].asked_to_stop == 1
    assert world.fleet.end is not None
    assert world.fleet.end.exit_code == 143


# ---------------------------------------------------------------- scaling


def test_up_and_down():
    world = World().started()
    world.fleet.scale(4, 10.0)
    world.fleet.turn(10.0)
    assert world.names() == ["run.actor0", "run.actor1", "run.actor2", "run.actor3"]
    world.fleet.scale(2, 20.0)
    assert [life.asked_to_stop for life in world.cluster.of("actor3")] == [1]
    assert world.names() == ["run.actor0", "run.actor1"]
    world.fleet.turn(20.0)
    assert world.running() == ["learner", "run.actor0", "run.actor1"]
    assert world.cluster.free == 7
    assert sorted(world.dead) == ["run.actor2", "run.actor3"]
    world.fleet.scale(3, 30.0)
    assert world.names() == ["run.actor0", "run.actor1", "run.actor2"], "the first free name"


def test_an_actor_that_does_not_leave_is_ended():
    world = World().started()
    world.fleet.scale(1, 10.0)
    life = world.cluster.of("actor1")[0]
    life.reports = []  # it does not listen
    world.fleet.turn(10.0 + fleets.LEAVE_S)
    assert not life.is_removed
    world.fleet.turn(10.1 + fleets.LEAVE_S)
    assert life.is_removed
    assert "run.actor1" not in world.fleet.members


def test_one_more_actor_without_room_is_withdrawn_and_tried_again_later():
    world = World(free=3).started()
    world.fleet.scale(4, 10.0)
    world.fleet.turn(10.0)
    assert world.running() == ["learner", "run.actor0", "run.actor1"]
    world.fleet.turn(10.1 + PLACE_S)
    assert world.names() == ["run.actor0", "run.actor1"]
    now = 10.1 + PLACE_S
    assert world.fleet.most(now) == 2
    assert world.fleet.most(now + fleets.RETRY_S) == 6
    assert "0 places are free; going on with 3 actors" in " ".join(world.notes)


# ---------------------------------------------------------------- room


def test_no_room_for_the_learner_is_an_error_that_says_what_is_free():
    world = World(free=0)
    world.fleet.begin(0.0)
    world.fleet.turn(PLACE_S)
    with pytest.raises(AsyncRLError, match=r"no place for learner \(2 CPU\) within 120 s: 0 places are free"):
        world.fleet.turn(PLACE_S + 0.1)


def test_no_room_for_the_least_actors_is_an_error():
    world = World(free=2).started()
    with pytest.raises(AsyncRLError, match=r"no place for run.actor1 \(1 CPU, 1 GPU\).*--actor-gpus"):
        world.fleet.turn(PLACE_S + 2)


def test_after_a_node_was_lost_the_run_waits_for_room():
    world = World(free=3).started()
    world.cluster.free = -1  # the node is gone with its places
    world.cluster.of("actor1")[0].reports = [NODE_LOST]
    for now in (10.0, 11.0, 12.1 + PLACE_S):
        world.fleet.turn(now)
    assert "waiting for it" in world.notes[-1]
    world.cluster.free = 1
    world.fleet.turn(200.0)
    assert world.running() == ["learner", "run.actor0", "run.actor1"]


def test_without_any_actor_for_long_the_run_ends():
    world = World(free=3).started()
    world.cluster.free = -9
    for name in ("actor0", "actor1"):
        world.cluster.of(name)[0].reports = [NODE_LOST]
    world.fleet.turn(10.0)
    world.fleet.turn(20.0)
    with pytest.raises(AsyncRLError, match="no actor has lived for 10 minutes"):
        world.fleet.turn(21.0 + fleets.LONELY_S)


def test_asked_to_stop_before_the_learner_has_a_place_the_run_is_over_at_once():
    world = World(free=0)
    world.fleet.begin(0.0)
    world.fleet.turn(1.0)
    world.fleet.stop()
    assert world.fleet.end is not None
    assert world.cluster.begun[0].is_removed


def test_who_has_no_place_at_the_end_is_not_waited_for():
    world = World(free=2).started()
    world.cluster.free = -5
    world.cluster.of("learner")[0].reports = [DONE]
    world.fleet.turn(3.0)
    assert not world.fleet.dismiss(), "actor0 has not left yet"
    assert world.cluster.of("actor1")[0].is_removed
    world.cluster.of("actor0")[0].reports = [DONE]
    assert world.fleet.dismiss()


def test_an_actor_that_dies_at_once_again_and_again_is_given_up_after_waits_of_one_two_and_four_seconds():
    world = World().started()
    lives, now, begun = world.cluster.of("actor1"), 10.0, []
    while len(world.names()) == 2:
        for life in world.cluster.of("actor1")[len(begun) :]:
            begun.append(round(now, 1))
            life.reports = [KILLED]
        now += 0.1
        world.fleet.turn(now)
        assert now < 60
    assert [round(b - a) for a, b in pairwise(begun)] == [1, 2, 4]
    assert len(world.cluster.of("actor1")) == 4 > len(lives)
    assert "run.actor1: was ended by SIGKILL on n1; is given up" in world.notes
    assert world.running() == ["learner", "run.actor0"]


def test_in_place_of_an_actor_that_was_given_up_another_one_is_tried_after_a_while():
    world = World().started()
    world.cluster.of("actor1")[0].reports = [SAID_WHY]
    world.fleet.turn(10.0)
    assert world.fleet.most(10.0 + fleets.RETRY_S - 1) == 1
    assert world.fleet.most(10.0 + fleets.RETRY_S) == 6
    world.fleet.scale(2, 10.0 + fleets.RETRY_S)
    world.fleet.turn(10.0 + fleets.RETRY_S)
    assert world.running() == ["learner", "run.actor0", "run.actor2"], "a name is not used for another one"


def test_further_learner_hosts_follow_the_first_to_its_new_address():
    world = World(learners=2).started()
    world.fleet.turn(3.0)
    assert world.cluster.of("learner1")[0].task.command == ("n1:5000",)
    world.cluster.of("learner")[0].reports = [NODE_LOST]
    world.fleet.turn(10.0)
    world.fleet.turn(11.0)
    world.cluster.begun[-1].task = Task(
        name="learner", command=(), listens=True, port=7000, log=Path("log"), work=Path("/"), needs=()
    )
    world.fleet.turn(11.1)
    world.fleet.turn(11.2)
    world.fleet.turn(11.3)
    assert [life.task.command for life in world.cluster.of("learner1")] == [("n1:5000",), ("n1:7000",)]
    assert "learner1" in world.running(), "it does not wait for the server, which waits for its ranks"


@pytest.mark.parametrize("end", [SAID_WHY, KILLED])
def test_a_further_learner_host_that_lost_the_first_is_not_to_blame(end):
    world = World(learners=2).started()
    world.fleet.turn(3.0)
    world.cluster.of("learner")[0].reports = [NODE_LOST]
    world.cluster.of("learner1")[0].reports = [end]
    world.fleet.turn(10.0)
    for now in (11.0, 11.1, 12.0, 12.1):
        world.fleet.turn(now)
    assert {"learner", "learner1"} <= set(world.running())


def test_a_further_learner_host_that_cannot_begin_ends_the_run():
    world = World(learners=2).started()
    world.fleet.turn(3.0)
    world.cluster.of("learner1")[0].reports = [Lost(told="/shared/run is not there on node n2", hopeless=True)]
    with pytest.raises(AsyncRLError, match=r"learner1 is given up.*is not there on node n2"):
        world.fleet.turn(10.0)


def test_an_actor_that_lives_but_does_not_move_is_replaced():
    world = World().started()
    world.fleet.end_silent("run.actor1", "lives but has been silent for over 60 s", 10.0)
    world.fleet.end_silent("learner", "its host looks after it", 10.0)
    world.fleet.end_silent("host7-actor-12", "somebody started it by hand", 10.0)
    assert world.dead == ["run.actor1"]
    assert world.cluster.of("actor1")[0].is_removed
    world.fleet.turn(11.0)
    world.fleet.turn(11.1)
    assert world.running() == ["learner", "run.actor0", "run.actor1"]


def test_an_actor_that_is_to_leave_does_not_follow_the_learner():
    world = World(least=1).started()
    world.fleet.scale(2, 5.0)
    world.fleet.turn(5.0)
    world.fleet.scale(1, 6.0)
    world.cluster.of("actor1")[0].reports = []  # it takes its time
    world.cluster.of("learner")[0].reports = [NODE_LOST]
    world.fleet.turn(10.0)
    world.cluster.next_port = 7000
    world.fleet.turn(11.0)
    world.cluster.begun[-1].task = Task(
        name="learner", command=(), listens=True, port=7000, log=Path("log"), work=Path("/"), needs=()
    )
    for now in (11.1, 11.2):
        world.fleet.turn(now)
    world.fleet.serve(12.0)
    for now in (12.0, 12.1):
        world.fleet.turn(now)
    assert world.running() == ["learner", "run.actor0"]
    assert "run.actor1" not in world.fleet.members


def test_a_scorer_without_a_twin_that_is_given_up_ends_the_run():
    world = World(scorers=("reward", "reference")).started()
    world.cluster.of("reward0")[0].reports = [SAID_WHY]
    with pytest.raises(AsyncRLError, match=r"run\.reward0 is given up, and no other reward is left"):
        world.fleet.turn(10.0)


def test_a_learner_that_is_lost_while_it_stops_is_told():
    world = World().started()
    world.cluster.of("learner")[0].stop = lambda: None
    world.fleet.stop()
    world.cluster.of("learner")[0].reports = [NODE_LOST]
    with pytest.raises(AsyncRLError, match="gone before its last checkpoint: its Ray worker or node"):
        world.fleet.turn(10.0)
