"""Environments in real child processes: everything that user code can do wrong becomes a counted outcome."""

import os
import time

import pytest

from actors.environments.base import Turn
from actors.environments.pool import EnvironmentPool
from async_rl.errors import ConfigError

pytestmark = pytest.mark.real

USER_MODULE = '''
import asyncio, os, time
from actors.environments.base import Turn

class Obedient:
    """Does what the text says."""

    async def reset(self, columns, seed):
        self.file = columns.get("file")
        if columns.get("start") == "fail":
            raise RuntimeError("no start")
        return f"{columns['prompt']} {seed}"

    async def act(self, text):
        order, _, value = text.partition(" ")
        if order == "raise":
            raise KeyError("no such " + value)
        if order == "exit":
            raise SystemExit(3)
        if order == "cancelled":
            raise asyncio.CancelledError("a task that it awaited was cancelled")
        if order == "vanish":
            os._exit(3)
        if order == "block":
            time.sleep(1000)
        if order == "await":
            await asyncio.sleep(1000)
        if order == "slow":
            await asyncio.sleep(float(value))
        if order == "grind":
            time.sleep(float(value))
        if order == "return":
            return eval(value, {"Turn": Turn, "nan": float("nan")})
        print("something for the log")
        return Turn(f"pid {os.getpid()}", 0.25, order == "end")

    async def close(self):
        if self.file:
            with open(self.file, "a") as file:
                file.write("closed\\n")

class Half:
    async def reset(self, columns, seed): ...
'''


@pytest.fixture
def make_pool(tmp_path):
    (tmp_path / "user_environment.py").write_text(USER_MODULE)
    pools = []

    def make(timeout_s=30.0, workers=1, name="Obedient"):
        pools.append(EnvironmentPool(f"user_environment:{name}", timeout_s, workers, tmp_path))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def gather(pool, count, timeout_s=30.0):
    """Replies by episode."""
    replies, deadline = [], time.monotonic() + timeout_s
    while len(replies) < count:
        assert time.monotonic() < deadline, f"{len(replies)} of {count} replies"
        replies += pool.wait(1.0)
    return {r.episode: r for r in replies}


def opened(pool, count, **columns):
    """Episodes that have been reset."""
    episodes = [pool.open({"prompt": "p", **columns}, seed=i) for i in range(count)]
    replies = gather(pool, count)
    assert [replies[e].turn for e in episodes] == [Turn(f"p {i}", 0.0, False) for i in range(count)]
    return episodes


def test_many_episodes_are_played_side_by_side_and_closed_at_their_end(make_pool, tmp_path):
    pool, log = make_pool(), tmp_path / "closed"
    one, two = opened(pool, 2, file=str(log))
    pool.act(one, "slow 0.3")
    pool.act(two, "go")
    (first,) = pool.wait(10.0)  # two is not held up by one
    assert first.episode == two
    assert gather(pool, 1)[one].turn.reward == 0.25
    pool.drop(one)
    pool.drop(two)
    again = opened(pool, 1)  # whoever is asked after the close has seen it
    pool.act(again[0], "end")
    assert gather(pool, 1)[again[0]].turn.done
    assert log.read_text() == "closed\n" * 2
    assert pool.pending == 0


@pytest.mark.parametrize(
    ("order", "outcome", "detail"),
    [
        ("raise thing", "error", "KeyError: 'no such thing'"),
        ("exit", "error", "SystemExit"),
        ("cancelled", "error", "CancelledError: a task that it awaited was cancelled"),
        ("return None", "bad_result", "act returned NoneType, not a Turn"),
        ("return Turn(3, 0.0, False)", "bad_result", "int as the observation"),
        ("return Turn('x', nan, False)", "bad_result", "reward nan, not a finite number"),
        ("return Turn('x', 'one', False)", "bad_result", "reward 'one', not a finite number"),
        ("return Turn('x', 1e39, False)", "bad_result", "too large"),
        ("return Turn(chr(0xD800), 0.0, False)", "bad_result", "half of a surrogate pair"),
    ],
)
def test_a_fault_ends_its_own_episode_alone(make_pool, order, outcome, detail):
    pool = make_pool()
    bad, good = opened(pool, 2)
    pool.act(bad, order)
    pool.act(good, "go")
    replies = gather(pool, 2)
    assert (replies[bad].outcome, replies[bad].turn) == (outcome, None)
    assert detail in replies[bad].detail
    assert replies[good].outcome == "ok"


def test_what_awaits_for_too_long_is_given_up_and_its_neighbours_go_on(make_pool):
    pool = make_pool(timeout_s=0.5)
    slow, good = opened(pool, 2)
    pool.act(slow, "await")
    replies = gather(pool, 1)
    assert (replies[slow].outcome, replies[slow].detail) == ("timeout", "the environment took longer than 0.5 s")
    pool.act(good, "go")
    assert gather(pool, 1)[good].outcome == "ok"


def test_what_blocks_is_killed_its_neighbours_are_lost_and_the_pool_regrows(make_pool):
    pool = make_pool(timeout_s=0.5)
    stuck, idle = opened(pool, 2)
    pool.act(stuck, "block")
    replies = gather(pool, 2)
    assert (replies[stuck].outcome, replies[idle].outcome) == ("timeout", "lost")
    assert "blocked its process for longer than 0.5 s" in replies[stuck].detail
    pool.act(idle, "go")  # its end was not known yet: nothing comes of it
    (fresh,) = opened(pool, 1)
    pool.act(fresh, "go")
    assert gather(pool, 1)[fresh].outcome == "ok"


def test_work_that_blocks_for_less_than_the_limit_may_add_up_to_more(make_pool):
    pool = make_pool(timeout_s=0.5)
    episodes = opened(pool, 12)
    for episode in episodes:
        pool.act(episode, "grind 0.25")  # 3 s in all, and the parent allows a silence of 1.5 s
    assert {r.outcome for r in gather(pool, 12).values()} == {"ok"}


def test_a_child_that_ends_fails_its_call_and_loses_the_rest(make_pool):
    pool = make_pool(workers=2)
    episodes = opened(pool, 4)
    for episode in episodes:
        pool.act(episode, "go")
    pids = {e: r.turn.observation for e, r in gather(pool, 4).items()}
    assert len(set(pids.values())) == 2
    victim = episodes[0]
    neighbours = [e for e in episodes[1:] if pids[e] == pids[victim]]
    pool.act(victim, "vanish")
    replies = gather(pool, 2)
    assert {e: r.outcome for e, r in replies.items()} == {victim: "died", neighbours[0]: "lost"}
    assert next(iter(replies)) == victim  # the suspect comes first
    others = [e for e in episodes if e not in replies]
    for episode in others:
        pool.act(episode, "go")
    assert {r.outcome for r in gather(pool, 2).values()} == {"ok"}


def test_a_dropped_episode_is_cancelled_in_the_middle_of_a_call(make_pool, tmp_path):
    pool, log = make_pool(timeout_s=0.5), tmp_path / "closed"
    (episode,) = opened(pool, 1, file=str(log))
    pool.act(episode, "await")
    pool.poll()
    pool.drop(episode)
    assert pool.pending == 0
    deadline = time.monotonic() + 20.0
    while not log.exists() and time.monotonic() < deadline:  # the close comes between other calls
        opened(pool, 1)
    assert log.read_text() == "closed\n"


def test_a_reset_may_fail_too(make_pool):
    pool = make_pool()
    episode = pool.open({"prompt": "p", "start": "fail"}, seed=0)
    assert gather(pool, 1)[episode].outcome == "error"


def test_nothing_is_left_behind(make_pool):
    pool = make_pool()
    (episode,) = opened(pool, 1)
    pool.act(episode, "go")
    pid = int(gather(pool, 1)[episode].turn.observation.split()[1])
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [("Half", "it has no act and no close"), ("Obedent", "no class 'Obedent'; did you mean 'Obedient'")],
)
def test_an_environment_that_cannot_be_had_is_a_sentence_at_the_start(make_pool, name, message):
    with pytest.raises(ConfigError, match=f"task.environment = 'user_environment:{name}'.*{message}"):
        make_pool(name=name)
