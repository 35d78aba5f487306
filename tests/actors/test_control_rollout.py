"""The loop of a control actor between fakes: a server that hands out messages, a policy and a gatherer that count."""

import numpy as np
import pytest
import torch
from control_fakes import SPACES, Counting, control, published
from loop_fakes import Receiver, Server, acks, cancel, manifest, version

from actors.control.collector import Collector, EnvironmentFault
from actors.control.policy import Policy
from actors.control.rollout import Rollout
from actors.streak import MAX_FAILURES
from actors.swap import MAX_COMMIT_FAILURES
from async_rl.control.fragment import check_control_group
from async_rl.control.networks import build_actor
from async_rl.data import Group
from async_rl.errors import WeightsError
from async_rl.protocol import Ticket
from async_rl.timer import StateTimer


class Holder:
    """A policy that takes every version but the first ``broken``."""

    last_pause_s = 0.0

    def __init__(self, broken=0):
        self.version, self.proven, self.broken = -1, False, broken

    def load_weights(self, announced, data):
        self.proven = not self.broken
        if self.broken:
            self.broken -= 1
            raise WeightsError("torn")
        self.version = announced.version
        return announced.checksum


class Gatherer:
    """Two steps a group; ``faults`` of them fail."""

    def __init__(self, policy, faults=0):
        self.policy, self.faults = policy, faults
        self.ticket, self.calls = None, []

    def begin(self, ticket):
        assert self.ticket is None
        self.ticket, self.versions = ticket, []
        self.calls.append(("begin", ticket.ordinal))

    def step(self):
        assert self.policy.proven
        if self.faults:
            self.faults -= 1
            self.ticket = None
            raise EnvironmentFault("observations, index [0], is nan")
        self.versions.append(self.policy.version)

    def finished(self):
        if self.ticket is None or len(self.versions) < 2:
            return None
        ticket, self.ticket = self.ticket, None
        versions = np.repeat(np.asarray(self.versions, np.int32)[:, None], 3, 1)
        return Group(
            ordinal=ticket.ordinal,
            attempt=ticket.attempt,
            task_index=0,
            lengths=(2,),
            arrays={"versions": versions, "actions": np.zeros((2, 3, 4), np.float32)},
            rewards=np.zeros(1, np.float32),
        )

    def drop(self):
        self.calls.append(("drop", self.ticket.ordinal))
        self.ticket = None


def tickets(*ordinals, attempt=0):
    return [({"type": "tickets", "tickets": [Ticket(o, attempt, 0, 1, 0, 60.0).to_wire() for o in ordinals]}, [])]


def roll(script, policy=None, faults=0, first=0, timer=None, receiver=None):
    server, policy = Server(list(script)), policy or Holder()
    gatherer, receiver = Gatherer(policy, faults), receiver or Receiver()
    rollout = Rollout(
        config=control(buffer={"heartbeat_s": 0.05}),
        name="actor0",
        client=server,
        policy=policy,
        receiver=receiver,
        gatherer=gatherer,
        timer=timer or StateTimer(),
    )
    stop = rollout.run(None if first is None else manifest(first))
    return stop, server, rollout, gatherer


def test_tickets_become_groups_one_after_the_other():
    stop, server, rollout, gatherer = roll([[], tickets(4, 5), [], [], []])
    assert (stop.reason, stop.error) == ("end of the script", False)
    assert [(g.ordinal, g.attempt) for g in server.groups] == [(4, 0), (5, 0)]
    assert gatherer.calls == [("begin", 4), ("begin", 5)]
    assert rollout.counts["env_steps"] == 2 * 6  # 2 steps of 3 environments each
    assert server.groups[0].meta["actor"] == "actor0"
    assert rollout.in_flight() == []


def test_it_asks_for_two_tickets_and_for_another_as_soon_as_one_group_is_sent():
    _, server, _, _ = roll([[], tickets(0, 1), [], [], []])
    assert [c["count"] for c in server.of("credit")] == [2, 1, 2]


def test_it_holds_what_it_says_in_the_beat():
    _, _, rollout, _ = roll([[], tickets(7, 8, attempt=2)])
    assert [row[:2] for row in rollout.in_flight()] == [[7, 2], [8, 2]]
    assert (rollout.info()["version"], rollout.info()["groups"]) == (0, 0)


def test_nothing_is_sampled_and_no_ticket_asked_for_before_a_version_is_proven():
    _, server, _, gatherer = roll([[], tickets(0), [], []], first=None)
    assert gatherer.calls == server.of("credit") == server.of("live") == []


def test_versions_are_swapped_in_between_two_steps_and_said_to_be_live():
    _, server, _, _ = roll([tickets(0), version(1), [], []])
    assert server.groups[0].arrays["versions"][:, 0].tolist() == [0, 1]
    assert [(m["version"], m["checksum"], m["transfer_s"]) for m in server.of("live")] == [
        (0, manifest(0).checksum, 0.5),
        (1, manifest(1).checksum, 0.5),
    ]


def test_a_policy_whose_read_back_failed_waits_for_the_next_version():
    _, server, rollout, _ = roll([tickets(0), [], [], [], []], policy=Holder(broken=2))
    assert [m["version"] for m in server.of("live")] == [0]
    assert rollout.counts["weights_refused"] == 2
    assert len(server.groups) == 1
    with pytest.raises(WeightsError, match=f"{MAX_COMMIT_FAILURES} versions in a row"):
        roll([[]] * 20, policy=Holder(broken=99))


@pytest.mark.parametrize("waiting", [False, True])
def test_a_cancelled_ticket_is_dropped_wherever_it_is_and_another_attempt_stays(waiting):
    ordinals = (3, 4) if waiting else (4, 3)
    _, server, _, gatherer = roll([[], tickets(*ordinals), cancel((4, 0)), [], [], []])
    assert [g.ordinal for g in server.groups] == [3]
    assert (("drop", 4) in gatherer.calls) is not waiting
    _, server, _, _ = roll([[], tickets(4), cancel((4, 1)), [], []])
    assert [g.ordinal for g in server.groups] == [4]


def test_a_fresh_attempt_replaces_the_old_one():
    _, server, _, gatherer = roll([tickets(4, 5), tickets(4, attempt=1), [], [], [], [], []])
    assert [(g.ordinal, g.attempt) for g in server.groups] == [(5, 0), (4, 1)]
    assert gatherer.calls == [("begin", 4), ("drop", 4), ("begin", 5), ("begin", 4)]


def test_a_fault_of_the_environment_gives_the_ticket_back_and_again_and_again_ends_the_run():
    number = MAX_FAILURES
    script = [turn for ordinal in range(number) for turn in (tickets(ordinal), [])]
    _, server, rollout, _ = roll([*script, tickets(99), [], []], faults=number)
    assert [(f["ordinal"], f["reason"], f["final"]) for f in server.of("fail")] == [
        (ordinal, "environment_not_finite", False) for ordinal in range(number)
    ]
    (fatal,) = server.of("fatal")
    assert fatal["reason"] == (
        f"the environment failed {number} times in a row (environment_not_finite); "
        "the last: observations, index [0], is nan"
    )
    assert rollout.counts["environment_failures"] == number
    assert [g.ordinal for g in server.groups] == [99]


def test_faults_with_groups_in_between_end_nothing():
    number = MAX_FAILURES
    script = [turn for ordinal in range(2 * number + 2) for turn in (tickets(ordinal), [], [])]
    policy = Holder()
    server, gatherer = Server(script), Gatherer(policy)
    steps = 0
    step = gatherer.step

    def sometimes():
        nonlocal steps
        steps += 1
        gatherer.faults = int(steps % 3 == 0)  # each second group fails
        step()

    gatherer.step = sometimes
    Rollout(
        config=control(),
        name="actor0",
        client=server,
        policy=policy,
        receiver=Receiver(),
        gatherer=gatherer,
        timer=StateTimer(),
    ).run(manifest(0))
    assert len(server.of("fail")) > number
    assert server.of("fatal") == []


def test_a_server_that_refuses_one_group_after_the_other_ends_the_run():
    refused = ["refused"] * (MAX_FAILURES - 1)
    _, server, _, _ = roll([[], acks(*refused, "accepted"), acks(*refused)])
    assert server.of("fatal") == []
    _, server, _, _ = roll([[], acks(*refused), acks("failed", "refused", "refused")])
    assert [f["reason"] for f in server.of("fatal")] == [
        f"the server refused {MAX_FAILURES} groups in a row (bad_shape); the last: ordinal 1 attempt 0"
    ]


def test_its_states_are_told_apart():
    class Clock:
        now = 0.0

        def __call__(self):
            self.now += 1.0
            return self.now

    timer = StateTimer(clock=Clock())
    roll([[], [], tickets(0), [], []], first=None, timer=timer)
    assert set(timer.seconds) <= {"starting", "waiting_weights"}
    timer = StateTimer(clock=Clock())
    roll([[], tickets(0), [], [], []], timer=timer)
    assert set(timer.seconds) == {"starting", "paused", "generating", "waiting_ticket"}


def test_stop_ends_it_with_the_servers_sentence():
    stop, *_ = roll([[({"type": "stop", "reason": "the learner died", "error": True}, [])]])
    assert (stop.reason, stop.error) == ("the learner died", True)


def test_with_the_real_parts_fragments_come_out_that_the_server_takes():
    config = control()
    policy = Policy(config, SPACES, torch.device("cpu"))
    first, data = published(build_actor(config, SPACES))
    server = Server([tickets(0, 1), *[[]] * 9])
    Rollout(
        config=config,
        name="actor0",
        client=server,
        policy=policy,
        receiver=Receiver(data),
        gatherer=Collector(config, Counting(), policy, 1),
        timer=StateTimer(),
    ).run(first)
    assert [g.ordinal for g in server.groups] == [0, 1]
    assert [check_control_group(g, SPACES, 4, episodes=False) for g in server.groups] == ["", ""]
    assert server.of("live")[0]["checksum"] == first.checksum
