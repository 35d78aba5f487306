"""The rollout loop between fakes: a server that hands out messages, an engine and verifiers that answer at once."""

import os

import numpy as np
import pytest
from loop_fakes import Receiver, Server, acks, cancel, manifest, version

from actors.engines.base import Completion
from actors.players.answers import Answers
from actors.players.requests import Requests
from actors.players.scoring import Scoring
from actors.players.submission import SAMPLE_CHARACTERS
from actors.players.work import Failed
from actors.receiver import Prepared
from actors.rollout import Rollout
from actors.streak import MAX_FAILURES
from actors.swap import MAX_COMMIT_FAILURES
from actors.verifiers.pool import Verdict
from async_rl.config import parse_config
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.protocol import Ticket
from async_rl.tasks import Problem
from async_rl.timer import StateTimer
from async_rl.wire import encode_groups, unpack_header

SIZE = 2


class Engine:
    """Completes every request in the step after it was submitted."""

    def __init__(self, broken=0):
        self.version, self.queue, self.aborted, self.broken, self.calls = -1, [], [], broken, []
        self.proven, self.last_pause_s = False, 0.25

    @property
    def num_running(self):
        return sum(r.num_samples for r in self.queue)

    def fileno(self):
        return None

    def submit(self, requests):
        if len(requests[0].prompt) > 3:
            raise ValueError("too long")
        self.queue += requests

    def abort(self, ids):
        self.aborted += ids
        self.queue = [r for r in self.queue if r.id not in ids]

    def step(self, timeout_s):
        done, self.queue = self.queue, []
        return [
            Completion(
                request_id=r.id,
                sample=s,
                tokens=np.asarray([7, s], np.int32),
                logprobs=np.asarray([-1.0, -2.0], np.float32),
                versions=np.full(2, self.version, np.int32),
                finish_reason="stop",
            )
            for r in done
            for s in reversed(range(r.num_samples))
        ]

    def sleep(self):
        assert not self.queue
        self.calls.append("sleep")
        self.proven = False

    def wake(self):
        self.calls.append("wake")

    def load_weights(self, published, data):
        self.calls.append(published.version)
        self.proven = not self.broken
        if self.broken:
            self.broken -= 1
            raise WeightsError("torn")
        self.version = published.version
        return published.checksum


class Verifiers:
    """Verdicts come when they are released."""

    next_deadline = None

    def __init__(self, rewards=(0.0, 1.0), outcome="ok", hold=False):
        self.rewards, self.outcome, self.hold, self.calls = list(rewards), outcome, hold, []

    def submit(self, key, prompts, completions, columns):
        self.calls.append((key, prompts, completions, columns))

    def poll(self):
        if self.hold:
            return []
        calls, self.calls = self.calls, []
        rewards = self.rewards if self.outcome == "ok" else None
        return [Verdict(key=key, rewards=rewards, outcome=self.outcome, detail="why") for key, *_ in calls]

    def filenos(self):
        return []


def tickets(*ordinals, attempt=0):
    wire = [Ticket(o, attempt, o % 2, SIZE, 0, 60.0).to_wire() for o in ordinals]
    return [({"type": "tickets", "tickets": wire}, [])]


def answers(engine, verifiers, encode, decode=str):
    return Answers(Requests(engine, 16, 1.0), Scoring(verifiers) if verifiers else None, encode, decode)


CONFIG = {"sampling": {"group_size": SIZE}, "actors": {"slots": 8}, "buffer": {"groups_per_step": 4}}


def roll(
    script,
    engine=None,
    verifiers=None,
    first=0,
    prepare=None,
    decode=lambda ids: " ".join(map(str, ids)),
    config=CONFIG,
    player=None,
):
    config = parse_config(config)
    server = Server(script)
    receiver = Receiver()
    engine = engine or Engine()
    if prepare:
        prepare(receiver)
    rollout = Rollout(
        config=config,
        name="actor",
        client=server,
        engine=engine,
        receiver=receiver,
        player=player
        or answers(
            engine,
            Verifiers() if verifiers is None else verifiers,
            lambda problem: (5, 6) if problem.prompt == "1+1=" else (5,),
            decode,
        ),
        problems=[Problem("1+1=", {"answer": "2"}), Problem("2+2=", {"answer": "4"})],
        timer=StateTimer(),
    )
    return rollout.run(manifest(first)), server, rollout, receiver


def test_a_ticket_becomes_a_scored_group_in_sample_order():
    verifiers = Verifiers(hold=True)
    script = [[], tickets(4), [], lambda: setattr(verifiers, "hold", False) or [], [], []]
    stop, server, rollout, _ = roll(script, verifiers=verifiers)
    assert (stop.reason, stop.error) == ("end of the script", False)
    (group,) = server.groups
    assert (group.ordinal, group.attempt, group.task_index) == (4, 0, 0)
    assert group.arrays["tokens"].tolist() == [5, 6, 7, 0, 5, 6, 7, 1]
    assert group.arrays["loss_mask"].tolist() == [0, 0, 1, 1] * 2
    assert group.arrays["versions"].tolist() == [-1, -1, 0, 0] * 2
    assert group.rewards.tolist() == [0.0, 1.0]
    assert group.meta["completions"] == ["7 0", "7 1"]  # ordinal 4 is the first of a step, whose text is kept
    assert rollout.counts["generated_tokens"] == 4


def test_verifiers_get_the_columns_the_ids_and_the_finish_reasons():
    seen = []
    verifiers = Verifiers()
    submit = verifiers.submit
    verifiers.submit = lambda *call: seen.append(call) or submit(*call)
    roll([[], tickets(1), [], []], verifiers=verifiers)
    (_, prompts, completions, columns) = seen[0]
    assert (prompts, completions) == (["2+2="] * 2, ["7 0", "7 1"])
    assert columns == {
        "answer": ["4", "4"],
        "completion_ids": [[7, 0], [7, 1]],
        "finish_reasons": ["stop", "stop"],
    }


def test_an_old_attempt_with_the_verifiers_is_not_mistaken_for_the_new_one():
    verifiers = Verifiers(hold=True)
    release = lambda: setattr(verifiers, "hold", False) or []  # noqa: E731
    _, server, _, _ = roll([[], tickets(2), [], tickets(2, attempt=1), [], release, [], []], verifiers=verifiers)
    assert [(g.ordinal, g.attempt) for g in server.groups] == [(2, 0), (2, 1)]


def test_a_cancelled_ticket_is_dropped_but_not_its_successor():
    engine = Engine()
    late = cancel((3, 0))
    _, server, _, _ = roll([[], tickets(3) + late, tickets(3, attempt=1) + late, [], []], engine=engine)
    assert engine.aborted == [3]
    assert [(g.ordinal, g.attempt) for g in server.groups] == [(3, 1)]


class Slow(Engine):
    """Completes one sample a step, those of the oldest request first; remembers under which version each was begun."""

    def __init__(self):
        super().__init__()
        self.left, self.begun = [], []

    @property
    def num_running(self):
        return len(self.left)

    def submit(self, requests):
        self.left += [(r.id, s) for r in requests for s in range(r.num_samples)]
        self.begun += [(r.id, self.version) for r in requests]

    def step(self, timeout_s):
        done, self.left = self.left[:1], self.left[1:]
        return [
            Completion(
                request_id=i,
                sample=s,
                tokens=np.asarray([7], np.int32),
                logprobs=np.asarray([-1.0], np.float32),
                versions=np.full(1, self.version, np.int32),
                finish_reason="stop",
            )
            for i, s in done
        ]


def test_slots_are_refilled_as_they_get_free_and_not_only_when_a_whole_group_is_done():
    engine = Slow()
    # 8 slots and groups of 2: five groups fill them, one of them waits
    _, server, _, _ = roll([[], tickets(0, 1, 2, 3, 4), [], [], []], engine=engine)
    # 9, 8, 7, 6, 5 samples are left after each turn: a group is asked for when less than a whole one waits
    assert server.of("credit") == [{"count": 5}, {"count": 1}, {"count": 2}, {"count": 3}]


def drained():
    return CONFIG | {"actors": {"slots": 8, "weight_updates": "drained"}}


def test_drained_weights_are_taken_once_all_running_samples_have_ended_and_nothing_begins_before():
    engine = Slow()
    script = [[], tickets(0, 9), version(1), tickets(1), [], [], [], [], []]
    _, server, _, _ = roll([*script], engine=engine, config=drained())
    assert engine.calls == [0, 1]
    assert engine.begun == [(0, 0), (9, 0), (1, 1)]
    assert [sorted({int(v) for v in g.arrays["versions"] if v >= 0}) for g in server.groups] == [[0], [0], [1]]
    in_flight = Slow()
    _, server, _, _ = roll([*script], engine=in_flight)
    assert in_flight.begun == [(0, 0), (9, 0), (1, 1)]
    assert [sorted({int(v) for v in g.arrays["versions"] if v >= 0}) for g in server.groups] == [[0, 1], [1], [1]]


def test_drained_the_newest_of_several_versions_is_taken_and_a_held_back_ticket_can_be_cancelled():
    engine = Slow()
    script = [[], tickets(0), version(1), version(2) + tickets(1, 2) + cancel((2, 0)), [], [], [], []]
    _, server, _, _ = roll(script, engine=engine, config=drained())
    assert engine.calls == [0, 2]
    assert engine.begun == [(0, 0), (1, 2)]
    assert engine.aborted == []
    assert [g.ordinal for g in server.groups] == [0, 1]


def test_a_version_is_live_with_its_checksum_and_credit_follows():
    _, server, _, _ = roll([[], version(1), []])
    live = server.of("live")
    assert [(m["version"], m["checksum"], m["transfer_s"], m["pause_s"]) for m in live] == [
        (0, manifest(0).checksum, 0.5, 0.25),
        (1, manifest(1).checksum, 0.5, 0.25),
    ]
    assert server.of("credit") == [{"count": 5}]  # 8 slots hold 4 groups of 2, and one more waits


def test_unproven_weights_are_fetched_again_and_nothing_is_decoded_before():
    engine = Engine(broken=2)
    _, server, rollout, receiver = roll([[], tickets(0), [], [], []], engine=engine)
    assert receiver.fetched == [0, 0, 0]
    assert rollout.counts["weights_refused"] == 2
    assert [m["version"] for m in server.of("live")] == [0]
    assert len(server.groups) == 1


def test_a_version_that_changed_nothing_leaves_the_proven_one_before_at_work():
    class Picky(Engine):
        def load_weights(self, published, data):
            if published.version == 1:
                raise WeightsError("of another model")
            return super().load_weights(published, data)

    _, server, rollout, _ = roll([[], [*version(1), *tickets(0)], [], []], engine=Picky())
    assert rollout.counts["weights_refused"] > 0
    assert [m["version"] for m in server.of("live")] == [0]
    assert [g.oldest_version for g in server.groups] == [0]


def test_an_engine_that_never_holds_what_is_published_is_an_error():
    with pytest.raises(WeightsError, match=f"{MAX_COMMIT_FAILURES} versions in a row could not be committed"):
        roll([[]] * 20, engine=Engine(broken=99))


def test_an_engine_that_dies_while_it_is_idle_is_an_error_at_once():
    class Dead(Engine):
        def fileno(self):
            return self.descriptor

        def step(self, timeout_s):
            raise AsyncRLError("its process ended")

    engine = Dead()
    engine.descriptor = os.eventfd(1)
    with pytest.raises(AsyncRLError, match="its process ended"):
        roll([[]] * 3, engine=engine)


def test_slots_that_were_overwritten_meanwhile_are_no_fault_of_the_engine_however_often():
    def overtake(receiver):  # the learner writes the next version over the prepared one
        fetch = receiver.fetch

        def overtaken(published):
            fetch(published)
            receiver.prepared = Prepared(manifest=published, data=memoryview(b"torn"), transfer_s=0.5, path="shm")

        receiver.fetch = overtaken

    engine = Engine(broken=MAX_COMMIT_FAILURES + 2)
    _, server, rollout, _ = roll([[]] * 20, engine=engine, prepare=overtake)
    assert rollout.counts["weights_refused"] == MAX_COMMIT_FAILURES + 2
    assert [m["version"] for m in server.of("live")] == [0]


def test_the_text_that_is_sent_along_fits_into_a_header_however_long_the_completions_are():
    _, server, _, _ = roll([[], tickets(0), [], [], []], decode=lambda ids: "x" * (20 << 20))
    message = encode_groups("submit", server.groups)
    assert unpack_header(message[0])["type"] == "submit"
    assert [len(c) for c in server.groups[0].meta["completions"]] == [SAMPLE_CHARACTERS // SIZE] * SIZE


@pytest.mark.parametrize(
    ("verifiers", "reason"),
    [
        (Verifiers(outcome="timeout"), "verifier_timeout"),
        (Verifiers(rewards=[1.0, float("nan")]), "verifier_bad_reward"),
    ],
)
def test_what_cannot_be_scored_is_given_up_and_often_in_a_row_ends_the_run(verifiers, reason):
    ordinals = range(MAX_FAILURES)
    _, server, _, _ = roll([[], *[tickets(o) for o in ordinals], [], []], verifiers=verifiers)
    failed = server.of("fail")
    assert [f["ordinal"] for f in failed] == list(ordinals)
    assert {(f["reason"], f["final"]) for f in failed} == {(reason, True)}
    (fatal,) = server.of("fatal")
    assert f"failed {MAX_FAILURES} times in a row" in fatal["reason"]
    assert server.groups == []


def test_groups_that_the_server_refuses_one_after_the_other_end_the_run():
    refused = ["refused"] * (MAX_FAILURES - 1)
    between = [acks("accepted"), acks("filtered", reason="zero_variance")]
    _, server, _, _ = roll([[], acks(*refused), between[0], acks(*refused), between[1], acks(*refused)])
    assert server.of("fatal") == []
    no_use = acks("filtered", reason="verifier_timeout")  # what we gave up ourselves says nothing about our groups
    _, server, _, _ = roll([[], acks(*refused), no_use, acks("late", "refused", "refused")])
    (fatal,) = server.of("fatal")
    assert fatal["reason"] == "the server refused 16 groups in a row (bad_shape); the last: ordinal 1 attempt 0"


def test_a_prompt_that_does_not_fit_is_given_up_for_good():
    server = Server([])
    config, engine = parse_config({"sampling": {"group_size": SIZE}}), Engine()
    rollout = Rollout(
        config=config,
        name="actor",
        client=server,
        engine=engine,
        receiver=Receiver(),
        player=answers(engine, Verifiers(), lambda problem: (5,) * 9),
        problems=[Problem("long", {})],
        timer=StateTimer(),
    )
    server.script = [[], [({"type": "tickets", "tickets": [Ticket(0, 0, 0, SIZE, 0, 60.0).to_wire()]}, [])], []]
    rollout.run(manifest(0))
    assert [(f["ordinal"], f["reason"], f["final"]) for f in server.of("fail")] == [(0, "prompt_refused", True)]
    assert rollout.in_flight() == []


def test_where_scorers_give_the_rewards_nothing_is_verified_here():
    config = CONFIG | {"reward": {"placement": "scorer"}}
    _, server, _, _ = roll([[], tickets(1), [], []], verifiers=False, config=config)
    (group,) = server.groups
    assert np.isnan(group.rewards).all()
    assert group.meta["finish_reasons"] == ["stop", "stop"]


def colocated():
    return CONFIG | {"actors": {"slots": 8, "placement": "colocated"}, "buffer": {"max_staleness": 0}}


def test_on_a_shared_device_the_engine_sleeps_between_its_work_and_the_next_version():
    engine, verifiers = Engine(), Verifiers(hold=True)
    release = lambda: setattr(verifiers, "hold", False) or []  # noqa: E731
    script = [[], [], tickets(0), [], [], release, [], version(1), [], tickets(1), [], [], version(1), [], []]
    _, server, _, _ = roll(script, engine=engine, verifiers=verifiers, config=colocated())
    assert engine.calls == [0, "sleep", "wake", 1, "sleep", "wake", 1]  # not before the first tickets
    assert [kind for kind, _ in server.sent if kind in ("live", "asleep")] == ["live", "asleep"] * 2 + ["live"]
    assert [g.ordinal for g in server.groups] == [0, 1]


def test_tickets_that_cross_its_message_are_left_to_the_server():
    engine = Engine()
    script = [[], tickets(0), [], [], tickets(1), cancel((1, 0)), []]
    _, server, rollout, _ = roll(script, engine=engine, config=colocated())
    assert [g.ordinal for g in server.groups] == [0]
    assert engine.queue == rollout.in_flight() == []


def test_an_empty_list_of_tickets_lets_an_actor_sleep_that_is_awake_for_nothing():
    engine = Engine()
    _, server, _, _ = roll([[], [], tickets(), [], version(1), [], []], engine=engine, config=colocated())
    assert engine.calls == [0, "sleep", "wake", 1]
    assert [kind for kind, _ in server.sent if kind in ("live", "asleep")] == ["live", "asleep", "live"]


class Scripted:
    """A player that fails or finishes a job as its ordinal says."""

    refused, busy, next_deadline, unfinished = 0, False, None, 0

    def __init__(self, outcomes):
        self.outcomes, self.jobs = outcomes, []

    def begin(self, job):
        self.jobs.append(job)

    def take(self, completions):
        pass

    def poll(self):
        jobs, self.jobs = self.jobs, []
        return [Failed(job, "environment", *self.outcomes[job.id], final=job.id % 2 == 0) for job in jobs]

    def filenos(self):
        return []


def test_environments_that_fail_are_reported_and_many_times_in_a_row_end_the_run():
    player = Scripted([("timeout", "slow"), ("lost", "a neighbour")] * MAX_FAILURES)
    # two fail in the same moment, which is one failure of one process
    turns = [tickets(2 * i, 2 * i + 1) for i in range(MAX_FAILURES)]
    _, server, rollout, _ = roll([[], *turns[:-1], []], player=player)
    assert [(f["reason"], f["final"]) for f in server.of("fail")[:2]] == [("env_timeout", True), ("env_lost", False)]
    assert server.of("fatal") == []
    assert rollout.counts["environment_failures"] == 2 * len(turns) - 2
    _, server, _, _ = roll([[], *turns, []], player=player)
    (fatal,) = server.of("fatal")
    assert fatal["reason"] == "the environment failed 16 times in a row (lost); the last: a neighbour"


def test_what_is_sampled_depends_on_the_draw_and_not_on_how_often_the_ticket_was_lost():
    seeds = []

    class Seen(Engine):
        def submit(self, requests):
            seeds.extend(r.seed for r in requests)
            super().submit(requests)

    wire = [Ticket(6, attempt, 0, SIZE, 0, 60.0, draw).to_wire() for attempt, draw in ((0, 0), (3, 0), (4, 1))]
    roll([[], *([({"type": "tickets", "tickets": [one]}, [])] for one in wire), [], []], engine=Seen())
    assert seeds[0] == seeds[1]
    assert seeds[2] != seeds[0]
    assert [seed[1:] for seed in seeds] == [(6, 0), (6, 0), (6, 1)]
