"""Scaling by hunger: shares of waiting by hand, thresholds on both sides, a simulated run that comes to rest."""

from itertools import pairwise

import pytest

from async_rl.launch.hunger import Appetite, Hunger, hunger, wanted


def client(name, role, pid=1, state="training", **seconds):
    return {"name": name, "role": role, "pid": pid, "host": "h", "state": state, "seconds": seconds}


def test_the_shares_are_those_of_the_time_between_two_looks_without_start_up():
    before = [
        client("learner0", "learner", starting=9.0, training=10.0, waiting_data=5.0),
        client("a", "actor", generating=20.0),
    ]
    after = [
        client("learner0", "learner", starting=99.0, training=13.0, waiting_data=6.0),  # 1 of 4 seconds
        client("a", "actor", generating=23.0, waiting_ticket=2.0),  # 2 of 5
    ]
    assert hunger(before, after) == Hunger(learner=0.25, actors=0.4)


def test_the_shares_of_several_processes_are_weighted_by_their_time():
    before = [client(n, r, training=0.0) for n, r in (("l0", "learner"), ("a", "actor"), ("b", "actor"))]
    after = [
        client("l0", "learner", training=1.0),
        client("a", "actor", generating=1.0, waiting_ticket=1.0),
        client("b", "actor", generating=6.0),
    ]
    assert hunger(before, after) == Hunger(learner=0.0, actors=1 / 8)


def test_a_process_that_began_another_life_is_left_out():
    before = [client("l0", "learner", training=1.0), client("a", "actor", pid=1, generating=50.0)]
    after = [client("l0", "learner", training=2.0), client("a", "actor", pid=2, waiting_ticket=3.0)]
    assert hunger(before, after) is None  # no actor was there at both looks


@pytest.mark.parametrize(
    ("count", "learner", "actors", "aim"),
    [
        (2, 0.40, 0.0, 4),  # 2 / 0.6 = 3.3
        (4, 0.20, 0.0, 5),  # 4 / 0.8 = 5
        (4, 0.11, 0.0, 5),  # 4 / 0.89 = 4.5
        (3, 0.90, 0.0, 6),  # 30 would do: no more than twice as many at once
        (4, 0.10, 0.0, 4),  # at the threshold: nothing
        (4, 0.50, 0.5, 4),  # both wait, as with a bound of 0: more actors would wait, too
        (4, 0.00, 0.40, 3),  # one less: 1 - 4 * 0.6 / 3 = 0.2 to spare
        (4, 0.00, 0.35, 4),  # 1 - 4 * 0.65 / 3 = 0.13
        (2, 0.00, 0.58, 1),  # 1 - 2 * 0.42 = 0.16
        (2, 0.00, 0.57, 2),  # 0.14
        (4, 0.05, 0.60, 4),  # the learner is not quite fed
        (8, 0.50, 0.0, 10),  # the most
        (1, 0.00, 1.0, 1),  # the least
    ],
)
def test_the_wanted_number_by_hand(count, learner, actors, aim):
    assert wanted(count, Hunger(learner=learner, actors=actors), least=1, most=10) == aim


class Run:
    """A learner that could use what ``need`` actors make; time passes in seconds."""

    def __init__(self, need):
        self.need = need
        self.learner = {"training": 0.0, "waiting_data": 0.0}
        self.actors = {}

    def turn(self, count):
        eats = min(1.0, count / self.need)
        self.learner["training"] += eats
        self.learner["waiting_data"] += 1 - eats
        self.actors = {i: self.actors.get(i, {"generating": 0.0, "waiting_ticket": 0.0}) for i in range(count)}
        for seconds in self.actors.values():
            busy = min(1.0, self.need / count)
            seconds["generating"] += busy
            seconds["waiting_ticket"] += 1 - busy

    def clients(self):
        learner = client("learner0", "learner", **self.learner)
        return [learner, *(client(f"actor{i}", "actor", **s) for i, s in self.actors.items())]


def names(count):
    return [f"actor{i}" for i in range(count)]


def play(run, appetite, count, seconds, began=0):
    """Numbers of actors, one a second."""
    counts = []
    for now in range(began, began + seconds):
        run.turn(count)
        count = appetite.look(run.clients(), names(count), 16, float(now))
        counts.append(count)
    return counts


@pytest.mark.parametrize(
    ("need", "start", "rest"), [(5.0, 1, 5), (5.5, 2, 6), (3.0, 10, 4), (0.5, 4, 1), (40.0, 1, 16)]
)
def test_a_run_comes_to_rest_and_stays_there(need, start, rest):
    counts = play(Run(need), Appetite(1, window_s=5.0), start, 400)
    assert counts[-1] == rest
    assert set(counts[200:]) == {rest}
    rises = [b - a for a, b in pairwise(counts)]
    assert all(r >= 0 for r in rises) or all(r <= 0 for r in rises), "it never turns back"


def test_one_window_changes_nothing_and_two_do():
    counts = play(Run(4.0), Appetite(1, window_s=5.0), 2, 30)
    assert counts[:10] == [2] * 10  # looked at from second 0, told at 5 and at 10
    assert counts[10] == 4  # twice as many


def test_a_run_that_changes_is_followed_in_both_directions():
    run, appetite = Run(6.0), Appetite(1, window_s=5.0)
    counts = play(run, appetite, 1, 150)
    assert counts[-1] == 6
    run.need = 2.0
    assert play(run, appetite, 6, 200, began=150)[-1] == 3  # 1 - 3 / 3 * ... two would have nothing to spare


def test_nothing_is_measured_while_an_actor_is_on_its_way():
    run, appetite = Run(8.0), Appetite(1, window_s=5.0)
    for now in range(50):
        run.turn(2)
        clients = run.clients()
        clients[-1]["state"] = "starting"
        assert appetite.look(clients, names(2), 16, float(now)) == 2
    assert appetite.last is None


def test_actors_that_were_started_by_hand_do_not_stand_for_those_that_are_awaited():
    run, appetite = Run(8.0), Appetite(1, window_s=5.0)
    for now in range(50):
        run.turn(2)
        by_hand = client("host-actor-1", "actor", generating=float(now))
        assert appetite.look([run.clients()[0], by_hand, *run.clients()[1:2]], names(2), 16, float(now)) == 2
    assert appetite.last is None, "one of the two has not come yet"


def test_a_cluster_without_room_counts_more_than_the_least_number():
    run, appetite = Run(8.0), Appetite(3, window_s=5.0)
    for now in range(50):
        run.turn(2)
        assert appetite.look(run.clients(), names(2), 2, float(now)) == 2
    assert appetite.look(run.clients(), names(2), 16, 50.0) == 2
    for now in range(51, 80):
        run.turn(2)
        aim = appetite.look(run.clients(), names(2), 16, float(now))
        if aim != 2:
            break
    assert aim == 4, "twice as many, once there is room"


def test_least_and_most_the_same_is_a_fixed_number():
    for need in (1.0, 50.0):
        assert set(play(Run(need), Appetite(16, window_s=5.0), 16, 200)) == {16}
