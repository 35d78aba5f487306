"""Scorers: the loop between fakes, the reference against brute force, rewards from tokens, and real processes."""

import numpy as np
import pytest
import torch
from loop_fakes import Readable

from actors.scorers.main import Scorer
from actors.scorers.reference import ReferenceStage, reference_logprobs
from actors.scorers.reward import RewardStage
from actors.scorers.stage import Failure
from actors.scorers.token_batches import token_batches
from actors.streak import MAX_FAILURES
from actors.verifiers.pool import Verdict
from async_rl.data import Annotation, Trajectory, make_group, token_trajectory
from async_rl.tasks import Problem
from async_rl.timer import StateTimer
from async_rl.wire import encode_groups, unpack_header
from learner.warmup.main import build_model


def group(ordinal, completions=((7, 8), (9,)), prompt=(3, 4), attempt=0, **meta):
    return make_group(
        ordinal=ordinal,
        attempt=attempt,
        task_index=ordinal,
        trajectories=[
            token_trajectory(prompt=prompt, completion=c, logprobs=[-1.0] * len(c), versions=[0] * len(c), reward=0.0)
            for c in completions
        ],
        meta=meta,
    )


def annotation(item, stage="reward"):
    values = np.ones(len(item.lengths), np.float32)
    return Annotation(ordinal=item.ordinal, attempt=item.attempt, stage=stage, values=values)


# -- the loop


class Server(Readable):
    """Hands out the turns of a script, then stops; a turn is a list of groups to lease, a header, or a function."""

    def __init__(self, *script):
        super().__init__()
        self.script, self.sent, self.annotations = list(script), [], []

    def receive(self, timeout_s):
        if not self.script:
            return [({"type": "stop", "reason": "end of the script", "error": False}, [])]
        turn = self.script.pop(0)
        groups = turn() if callable(turn) else turn
        if not groups:
            return []
        if isinstance(groups, dict):
            return [(groups, [])]
        header, *frames = encode_groups("lease", groups, lease_s=10.0)
        return [(unpack_header(header), frames)]

    def send(self, kind, **fields):
        self.sent.append((kind, fields))

    def send_annotations(self, annotations):
        self.annotations.append([(a.ordinal, a.attempt) for a in annotations])

    def of(self, kind):
        return [fields for sent, fields in self.sent if sent == kind]


class Held:
    """A stage that finishes what it is told to, as it is told to."""

    next_deadline = None
    wanted = 2
    busy = False

    def __init__(self, fails=False):
        self.groups, self.done, self.fails = [], 0, fails

    def submit(self, item):
        self.groups.append(item)

    def step(self):
        ready, self.groups, self.done = self.groups[: self.done], self.groups[self.done :], 0
        if self.fails:
            return [Failure(group=g, reason="verifier_error", detail="no such thing") for g in ready]
        return [annotation(g) for g in ready]

    def filenos(self):
        return []

    def finish(self, count):
        """A turn of the server in which nothing comes and the stage finishes some groups."""

        def turn():
            self.done = count
            return []

        return turn


def scorer(server, stage):
    return Scorer("reward0", server, stage, StateTimer(), 1.0)


def test_there_is_always_a_next_group_while_one_is_in_work():
    stage = Held()
    server = Server([], [group(0), group(1)], stage.finish(1), [group(2)], stage.finish(2))
    stop = scorer(server, stage).run()
    assert stop.reason == "end of the script"
    # at first two; one more for each that is done, and none while both are held
    assert [c["count"] for c in server.of("credit")] == [2, 1, 2]
    assert server.annotations == [[(0, 0)], [(1, 0), (2, 0)]]


def test_credit_counts_down_with_what_was_leased():
    stage = Held()
    server = Server([], [group(0)], stage.finish(1), [group(1)], [group(2)])
    scorer(server, stage).run()
    # two were offered and one came: one is still offered, so the first to be done makes it two again
    assert [c["count"] for c in server.of("credit")] == [2, 2]


def test_a_group_that_cannot_be_scored_is_failed_for_good_and_makes_room():
    stage = Held(fails=True)
    server = Server([group(5, attempt=2)], stage.finish(1))
    scored = scorer(server, stage)
    scored.run()
    (fail,) = server.of("fail")
    assert fail == {"ordinal": 5, "attempt": 2, "reason": "verifier_error", "detail": "no such thing", "final": True}
    assert scored.counts == {"groups": 0, "failures": 1}
    assert scored.in_flight() == []
    assert [c["count"] for c in server.of("credit")] == [1, 2]


def test_many_failures_in_a_row_end_the_run_and_say_why():
    stage = Held(fails=True)
    turns = [turn for i in range(MAX_FAILURES + 3) for turn in ([group(i)], stage.finish(1))]
    server = Server(*turns)
    scorer(server, stage).run()
    (fatal,) = server.of("fatal")
    assert fatal["reason"].startswith("reward0: 16 groups in a row could not be scored (verifier_error)")
    assert fatal["reason"].endswith("no such thing")


def acked(ordinal, outcome, reason=""):
    return {"type": "ack", "results": [[ordinal, 0, outcome, reason]]}


def test_a_scorer_whose_annotations_are_refused_again_and_again_ends_the_run():
    stage = Held()
    turns = [turn for i in range(16) for turn in ([group(i)], stage.finish(1), acked(i, "refused", "bad_ref_logprobs"))]
    server = Server(*turns[:-1])
    scorer(server, stage).run()
    assert not server.of("fatal")
    server = Server(*turns)
    scorer(server, Held()).run()
    (fatal,) = server.of("fatal")
    assert fatal["reason"].startswith("reward0: 16 groups in a row could not be scored (bad_ref_logprobs)")
    assert "the server refused what was added to ordinal 15 attempt 0" in fatal["reason"]


def test_a_useful_annotation_among_them_begins_the_row_anew():
    for outcome in (("accepted", ""), ("filtered", "zero_variance")):
        refused = [acked(i, "refused", "bad_ref_logprobs") for i in range(30)]
        server = Server(*refused[:15], acked(99, *outcome), *refused[15:])
        scorer(server, Held()).run()
        assert not server.of("fatal")


def test_the_heartbeat_says_what_is_held_and_for_how_long():
    stage = Held()
    scored = scorer(Server([group(4, attempt=1), group(6)]), stage)
    scored.run()
    assert [held[:2] for held in scored.in_flight()] == [[4, 1], [6, 0]]
    assert all(0 <= age < 10 for _, _, age in scored.in_flight())


# -- the reference


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return build_model().eval()


def multi_turn(tokens, mask):
    size = len(tokens)
    return Trajectory(
        arrays={
            "tokens": np.asarray(tokens, np.int32),
            "loss_mask": np.asarray(mask, np.uint8),
            "logprobs": np.zeros(size, np.float32),
            "versions": np.where(np.asarray(mask) == 1, 0, -1).astype(np.int32),
        },
        reward=0.0,
    )


def brute_force(model, trajectory, temperature):
    """Each sampled token by a forward pass of exactly what came before it, from the full logits, in float64."""
    expected = np.zeros(len(trajectory.tokens))
    for t in np.flatnonzero(trajectory.loss_mask):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([trajectory.tokens[:t].tolist()])).logits[0, -1].double()
        expected[t] = (logits / temperature).log_softmax(-1)[int(trajectory.tokens[t])]
    return expected


@pytest.mark.parametrize("budget", [16_384, 12, 1])
def test_the_reference_gives_the_log_probability_of_every_sampled_token_and_0_elsewhere(model, budget):
    first = group(0, completions=((7, 8, 9), (7, 8, 9), (5,), (7, 8)))
    tools = [multi_turn([3, 4, 5, 6, 7, 8, 9], [0, 1, 1, 0, 0, 1, 0]), multi_turn([3, 4], [0, 1])]
    second = make_group(ordinal=1, attempt=0, task_index=1, trajectories=tools)
    found = reference_logprobs(model, [first, second], temperature=0.7, budget=budget)
    for item, values in zip((first, second), found, strict=True):
        assert values.dtype == np.float32
        expected = np.concatenate([brute_force(model, t, 0.7) for t in item.trajectories])
        assert values == pytest.approx(expected, abs=1e-5)
        assert (values[item.arrays["loss_mask"] == 0] == 0).all()


def test_equal_sequences_are_forwarded_once(model):
    seen = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    reference_logprobs(model, [group(0, completions=((7, 8),) * 5 + ((9, 8),))], 1.0, 16_384)
    hook.remove()
    assert seen == [(2, 3)]  # two distinct rows of four tokens, the last of which is only predicted


def test_the_reference_answers_all_that_wait_and_fails_what_it_cannot_read(model):
    stage = ReferenceStage(model, 1.0, 16_384)
    too_long = group(1, completions=((7,) * (model.config.max_position_embeddings + 1),))
    stage.submit(group(0))
    stage.submit(too_long)
    stage.submit(group(2, completions=((model.config.vocab_size,),)))
    stage.submit(group(3, attempt=4))
    assert stage.busy
    results = stage.step()
    assert not stage.busy
    assert [(a.ordinal, a.attempt, a.stage) for a in results if isinstance(a, Annotation)] == [
        (0, 0, "reference"),
        (3, 4, "reference"),
    ]
    assert [a.values.shape for a in results[:2]] == [(7,), (7,)]
    failures = [result for result in results if isinstance(result, Failure)]
    assert [f.group.ordinal for f in failures] == [1, 2]
    assert "longer than" in failures[0].detail
    assert "not in the reference's vocabulary" in failures[1].detail


def test_batches_hold_sequences_of_similar_length_under_the_budget():
    assert list(token_batches([2, 9, 3, 3], 9)) == [[1], [2, 3, 0]]  # 9, then 3 rows of 3
    assert list(token_batches([2, 9, 3, 3], 8)) == [[1], [2, 3], [0]]
    assert list(token_batches([3, 3, 3, 3], 100, most=3)) == [[0, 1, 2], [3]]
    assert list(token_batches([50], 10)) == [[0]]
    assert list(token_batches([], 10)) == []


# -- rewards


class Pool:
    next_deadline = None

    def __init__(self):
        self.calls, self.verdicts = [], []

    def submit(self, key, prompts, completions, columns):
        self.calls.append((key, prompts, completions, columns))

    def poll(self):
        verdicts, self.verdicts = self.verdicts, []
        return verdicts

    def filenos(self):
        return []


@pytest.fixture
def stage():
    problems = [Problem(prompt=f"{i}+1=", columns={"answer": str(i + 1)}) for i in range(4)]
    return RewardStage(Pool(), 1, problems, lambda ids: "".join(str(i) for i in ids))


def test_a_reward_scorer_asks_what_an_actor_would_ask(stage):
    stage.submit(group(2, finish_reasons=["stop", "length"]))
    assert stage._pool.calls == [
        (
            1,
            ["2+1=", "2+1="],
            ["78", "9"],
            {"answer": ["3", "3"], "completion_ids": [[7, 8], [9]], "finish_reasons": ["stop", "length"]},
        )
    ]
    stage._pool.verdicts = [Verdict(key=1, rewards=[1.0, 0.5], outcome="ok", detail="")]
    (found,) = stage.step()
    assert (found.ordinal, found.stage, found.values.dtype) == (2, "reward", np.float32)
    assert found.values.tolist() == [1.0, 0.5]
    assert stage.wanted == 2


def test_failed_verdicts_fail_their_group_under_the_names_that_actors_use(stage):
    for i in range(3):
        stage.submit(group(i, finish_reasons=["stop", "stop"]))
    stage._pool.verdicts = [
        Verdict(key=3, rewards=None, outcome="timeout", detail="took too long"),
        Verdict(key=1, rewards=[float("nan"), 1.0], outcome="ok", detail=""),
    ]
    found = stage.step()
    assert [(f.group.ordinal, f.reason) for f in found] == [(2, "verifier_timeout"), (0, "verifier_bad_reward")]


def test_the_same_group_may_be_leased_twice_while_the_first_call_is_open(stage):
    stage.submit(group(1, finish_reasons=["stop", "stop"]))
    stage.submit(group(1, finish_reasons=["stop", "stop"]))
    assert [call[0] for call in stage._pool.calls] == [1, 2]
    stage._pool.verdicts = [Verdict(key=k, rewards=[1.0, 0.0], outcome="ok", detail="") for k in (1, 2)]
    assert [a.ordinal for a in stage.step()] == [1, 1]


def test_a_group_without_finish_reasons_fails_and_names_the_actor(stage):
    stage.submit(group(1, actor="old"))
    (failure,) = stage.step()
    assert failure.reason == "no_finish_reasons"
    assert "'old'" in failure.detail
    assert stage.step() == []
