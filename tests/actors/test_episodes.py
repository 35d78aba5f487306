"""Episodes between a scripted engine and scripted environments: tokens, masks and versions worked out by hand."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from actors.engines.base import Completion
from actors.environments.base import Turn
from actors.environments.pool import Reply
from actors.evaluation.heldout import play
from actors.players.episodes import MAX_ATTEMPTS, Episodes
from actors.players.requests import Requests
from actors.players.scoring import Scoring
from actors.players.transcript import arrays_of
from actors.players.work import Failed, Job, Played
from actors.verifiers.pool import Verdict
from async_rl.tasks import Problem

STOP = 2


@dataclass
class Engine:
    """Samples what is scripted for a prompt, each time with a newer version."""

    script: dict
    requests: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    waiting: list = field(default_factory=list)
    version: int = 10

    @property
    def num_running(self):
        return sum(r.num_samples for r in self.waiting)

    def submit(self, requests):
        for request in requests:
            if max(request.prompt) > 100:
                raise ValueError("a token outside the vocabulary")
            self.requests.append(request)
            self.waiting.append(request)

    def abort(self, ids):
        self.aborted += ids
        self.waiting = [r for r in self.waiting if r.id not in ids]

    def step(self, timeout_s=0.0):
        asked, self.waiting = self.waiting, []
        completions = []
        for request in asked:
            answers = self.script[request.prompt]
            for sample in range(request.num_samples):
                tokens = answers[sample % len(answers)]
                completions.append(
                    Completion(
                        request_id=request.id,
                        sample=sample,
                        tokens=np.asarray(tokens, np.int32),
                        logprobs=np.asarray([-0.1 * t for t in tokens], np.float32),
                        versions=np.asarray([self.version] * (len(tokens) - 1) + [self.version + 1], np.int32),
                        finish_reason="stop" if tokens[-1] == STOP else "length",
                    )
                )
        self.version += 2
        return completions[::-1]


@dataclass
class Pool:
    """Answers at once with what is scripted for a text."""

    script: dict
    starts: list = field(default_factory=lambda: ["s"])
    opened: list = field(default_factory=list)
    acted: list = field(default_factory=list)
    dropped: list = field(default_factory=list)
    replies: list = field(default_factory=list)
    next_deadline = None

    @property
    def pending(self):
        return len(self.replies)

    def open(self, columns, seed):
        episode = len(self.opened)
        self.opened.append((dict(columns), seed))
        start = self.starts[episode % len(self.starts)]
        self.replies.append(Reply(episode=episode, turn=Turn(start, 0.0, False), outcome="ok", detail=""))
        return episode

    def act(self, episode, text):
        self.acted.append((episode, text))
        reply = self.script[text]
        turn, outcome = (reply, "ok") if isinstance(reply, Turn) else (None, reply)
        self.replies.append(Reply(episode=episode, turn=turn, outcome=outcome, detail="why"))

    def drop(self, episode):
        self.dropped.append(episode)

    def poll(self):
        replies, self.replies = self.replies, []
        return replies

    def filenos(self):
        return []


def make(engine, pool, **options):
    """Episodes whose texts are token ids: ``observe`` reads "50 51", prompts are token 9 and one per character."""
    options = {"max_turns": 3, "context": 30} | options
    return Episodes(
        Requests(engine, 4, 1.0),
        pool,
        encode=lambda problem: (9, *map(ord, problem.prompt)) if problem.prompt != "s" else (9, 8),
        observe=lambda text: tuple(map(int, text.split())),
        decode=lambda ids: " ".join(str(i) for i in ids if i != STOP),
        **options,
    )


def job(size=2, draw=0):
    return Job(id=7, problem=Problem("s", {"answer": "1"}), size=size, seed=(3, 7, draw), draw=draw)


def drive(episodes, engine, rounds=10):
    results = []
    for _ in range(rounds):
        results += episodes.poll()
        if engine.num_running:
            episodes.take(engine.step())
    return results


def test_an_episode_becomes_one_sequence_and_only_what_was_sampled_is_trained():
    # sample 0 needs two turns, sample 1 three; versions: first turn 10, 11; second 12, 13; third 14, 15
    engine = Engine(
        {
            (9, 8): [[20, STOP], [21, 22, STOP]],
            (9, 8, 20, STOP, 50, 51): [[23, STOP]],
            (9, 8, 21, 22, STOP, 52): [[24, STOP]],
            (9, 8, 21, 22, STOP, 52, 24, STOP): [[25, STOP]],
        }
    )
    pool = Pool(
        {
            "20": Turn("50 51", 0.25, False),
            "21 22": Turn("52", 0.0, False),
            "23": Turn("60", 0.5, True),
            "24": Turn("", 0.0, False),
            "25": Turn("61", 1.0, True),
        }
    )
    episodes, work = make(engine, pool, weight=2.0), job()
    episodes.begin(work)
    (played,) = drive(episodes, engine)
    assert played == Played(work, [1.5, 2.0])  # the weight is 2
    assert work.generated
    assert pool.opened == [({"answer": "1", "prompt": "s"}, pool.opened[0][1])] * 2  # both start alike
    assert sorted(pool.dropped) == [0, 1]
    lengths, arrays = arrays_of(work.transcripts)
    assert lengths == (8, 10)
    one, two = (SimpleNamespace(**{k: v[part] for k, v in arrays.items()}) for part in (slice(8), slice(8, 18)))
    assert one.tokens.tolist() == [9, 8, 20, STOP, 50, 51, 23, STOP]
    assert one.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert one.versions.tolist() == [-1, -1, 10, 11, -1, -1, 12, 13]
    np.testing.assert_allclose(one.logprobs, [0, 0, -2.0, -0.2, 0, 0, -2.3, -0.2], rtol=1e-6)
    assert two.tokens.tolist() == [9, 8, 21, 22, STOP, 52, 24, STOP, 25, STOP]
    assert two.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 1, 1]
    assert two.versions.tolist() == [-1, -1, 10, 10, 11, -1, 12, 13, 14, 15]
    assert [t.dtype.name for t in (one.tokens, one.loss_mask, one.logprobs, one.versions)] == [
        "int32",
        "uint8",
        "float32",
        "int32",
    ]
    assert work.transcripts[0].texts == ["20", "50 51", "23"]
    assert [t.end for t in work.transcripts] == ["done", "done"]


def test_the_first_turn_is_one_request_and_later_ones_have_streams_of_their_own():
    again = [[20, STOP]]
    engine = Engine({(9, 8): again, (9, 8, 20, STOP, 5): again, (9, 8, 20, STOP, 5, 20, STOP, 5): again})
    episodes, work = make(engine, Pool({"20": Turn("5", 0.0, False)})), job(draw=1)
    episodes.begin(work)
    drive(episodes, engine)
    assert [(r.id == 7, r.num_samples, r.max_new_tokens) for r in engine.requests] == [
        (True, 2, 4),
        *[(False, 1, 4)] * 4,
    ]
    assert engine.requests[0].seed == (3, 7, 1)
    assert sorted(r.seed for r in engine.requests[1:]) == [(3, 7, 1, s, t) for s in (0, 1) for t in (1, 2)]
    assert len({r.id for r in engine.requests}) == 5


def test_an_episode_ends_at_the_most_turns_at_a_cut_answer_and_where_the_context_is_full():
    go_on = Turn("5 5 5", 0.25, False)
    engine = Engine({(9, 8): [[20, STOP], [21, 21, 21, 21]], (9, 8, 20, STOP, 5, 5, 5): [[22, STOP]]})
    pool = Pool({"20": go_on, "22": go_on})
    episodes, work = make(engine, pool, max_turns=2), job()
    episodes.begin(work)
    (played,) = drive(episodes, engine)
    assert [t.end for t in work.transcripts] == ["turns", "cut"]
    assert played.rewards == [0.5, 0.0]
    assert [text for _, text in pool.acted] == ["20", "22"]  # a cut answer is none: nobody acts on it
    # after the first turn: prompt 2 + sampled 2 + observed 3 + room for 4 = 11; after the second 11 + 2 + 3 = 16
    for context, ends, turns in ((10, "context", 1), (11, "context", 2), (15, "context", 2), (16, "turns", 3)):
        engine = Engine(
            {
                (9, 8): [[20, STOP]],
                (9, 8, 20, STOP, 5, 5, 5): [[22, STOP]],
                (9, 8, 20, STOP, 5, 5, 5, 22, STOP, 5, 5, 5): [[20, STOP]],
            }
        )
        episodes, work = make(engine, Pool(pool.script), context=context), job(size=1)
        episodes.begin(work)
        drive(episodes, engine)
        (transcript,) = work.transcripts
        assert (transcript.end, len(transcript.turns)) == (ends, turns)
        assert len(transcript.tokens) <= context


@pytest.mark.parametrize(
    ("outcome", "draw", "final"),
    [
        ("error", 0, True),
        ("bad_result", 0, True),
        ("lost", MAX_ATTEMPTS, False),
        ("timeout", 0, False),
        ("died", MAX_ATTEMPTS - 2, False),
        ("died", MAX_ATTEMPTS - 1, True),
    ],
)
def test_a_fault_of_one_environment_ends_its_group(outcome, draw, final):
    engine = Engine({(9, 8): [[20, STOP], [21, STOP], [21, STOP]], (9, 8, 21, STOP, 5): [[22, STOP]]})
    pool = Pool({"20": outcome, "21": Turn("5", 0.0, False)})
    episodes, work = make(engine, pool), job(size=3, draw=draw)
    episodes.begin(work)
    episodes.poll()
    episodes.take(engine.step())  # in the order 2, 1, 0: the other two have asked for their second turn by then
    (failed,) = episodes.poll()
    assert failed == Failed(work, "environment", outcome, "why", final=final)
    assert failed.reason == f"env_{outcome}"
    assert len(engine.aborted) == 2
    assert sorted(pool.dropped) == [0, 1, 2]
    assert drive(episodes, engine) == []


def test_a_job_that_is_dropped_leaves_nothing_running():
    engine, pool = Engine({(9, 8): [[20, STOP]]}), Pool({"20": Turn("5", 0.0, False)})
    episodes = make(engine, pool)
    resetting, decoding = job(), job()
    episodes.begin(decoding)
    episodes.poll()
    episodes.drop(decoding)
    episodes.begin(resetting)
    episodes.drop(resetting)
    assert engine.aborted == [7]
    assert sorted(pool.dropped) == [0, 1, 2, 3]
    assert drive(episodes, engine) == []


def test_a_group_must_have_one_start():
    engine, pool = Engine({}), Pool({}, starts=["s", ""])
    episodes, work = make(engine, pool), job()
    episodes.begin(work)
    (failed,) = episodes.poll()
    assert (failed.reason, failed.final) == ("env_bad_result", True)
    assert "reset with equal arguments gave '' and 's'" in failed.detail


def test_what_the_model_cannot_read_is_refused():
    episodes, work = make(Engine({}), Pool({}, starts=["long"])), job()  # letters are above 100
    episodes.begin(work)
    (failed,) = episodes.poll()
    assert (failed.reason, failed.final, episodes.refused) == ("prompt_refused", True, 1)
    engine = Engine({(9, 8): [[20, STOP]]})
    episodes = make(engine, Pool({"20": Turn("101", 0.0, False)}))
    episodes.begin(work := job())
    (failed,) = drive(episodes, engine)
    assert (failed.reason, failed.job) == ("prompt_refused", work)


def test_other_sources_are_added_to_the_environments_reward():
    class Verifiers:
        next_deadline = None

        def __init__(self):
            self.calls, self.due = [], []

        def submit(self, *call):
            self.calls.append(call)
            self.due.append(call[0])

        def poll(self):
            due, self.due = self.due, []
            return [Verdict(key=key, rewards=[0.5, 0.0], outcome="ok", detail="") for key in due]

    engine = Engine({(9, 8): [[20, STOP]], (9, 8, 20, STOP, 5): [[21, STOP]]})
    pool = Pool({"20": Turn("5", 0.25, False), "21": Turn("", 1.0, True)})
    verifiers = Verifiers()
    episodes, work = make(engine, pool, scoring=Scoring(verifiers)), job()
    episodes.begin(work)
    (played,) = drive(episodes, engine, rounds=4)
    assert played.rewards == [1.75, 1.25]
    (_, prompts, texts, columns) = verifiers.calls[0]
    assert (prompts, texts) == (["s", "s"], ["20\n5\n21"] * 2)
    assert columns["completion_ids"] == [[20, STOP, 21, STOP]] * 2


def test_held_out_problems_are_played_once_each_in_order_and_failures_leave_a_gap():
    engine = Engine({(9, 8): [[20, STOP]], (9, 8, 20, STOP, 5): [[21, STOP]]})
    pool = Pool({"20": Turn("5", 0.0, False), "21": Turn("", 1.0, True)})
    act = pool.act
    pool.act = lambda episode, text: (
        act(episode, text)
        if episode != 1
        else pool.replies.append(Reply(episode=1, turn=None, outcome="died", detail="why"))
    )
    problems, looks = [Problem("s", {"n": n}) for n in range(3)], []
    results = play(make(engine, pool), engine, problems, lambda: looks.append(1))
    assert [r and r.rewards for r in results] == [[1.0], None, [1.0]]
    assert [columns["n"] for columns, _ in pool.opened] == [0, 1, 2]
    assert looks
    seeds = [seed for _, seed in pool.opened]
    again = Pool(pool.script)
    play(make(Engine(engine.script), again), Engine(engine.script), [], lambda: None)
    play(make(other := Engine(engine.script), again), other, problems, lambda: None)
    assert [seed for _, seed in again.opened] == seeds
