"""Evaluation: which episodes count, what is said of them, and the loop around it."""

import os

import numpy as np
import pytest
import torch
from control_fakes import SPACES, Counting, control, published

from actors.control.collector import EnvironmentFault
from actors.control.exams import HeldOutStarts, PlayedEpisodes, split_episodes
from actors.control.policy import Policy
from actors.evaluation.evaluator import Evaluator, Result
from actors.receiver import Prepared
from async_rl.control.networks import build_actor
from async_rl.control.spaces import Spaces
from async_rl.data import Group
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.timer import StateTimer


def exam(environment, each, config=None, seed=9):
    config = config or control()
    policy = Policy(config, environment.spaces, torch.device("cpu"), greedy=True)
    policy.load_weights(*published(build_actor(config, environment.spaces)))
    return PlayedEpisodes(config, environment, policy, each, seed)


@pytest.mark.parametrize(
    ("episodes", "split"), [(1, (1, 1)), (32, (32, 1)), (64, (64, 1)), (65, (33, 2)), (100, (50, 2)), (200, (50, 4))]
)
def test_all_environments_play_equally_many_episodes_and_hardly_more_than_asked_for(episodes, split):
    assert split_episodes(episodes) == split


@pytest.mark.parametrize("lazy", [False, True])
def test_the_first_episodes_of_each_environment_count_and_short_ones_are_not_preferred(lazy):
    # environments 0, 1, 2 have episodes of 2, 3, 4 steps with rewards 1, 2, ...: returns 3, 6, 10
    environment = Counting(lazy=lazy)
    metrics = exam(environment, 2).examine(lambda: None).metrics
    assert metrics["return"] == pytest.approx(19 / 3)
    assert metrics["return_std"] == pytest.approx(np.std([3, 6, 10]))
    assert (metrics["length"], metrics["episodes"]) == (3, 6)
    assert environment.num_steps == 2 * 4 + lazy  # the slowest environment's second episode ends


def test_each_version_plays_the_same_starts():
    environment = Counting()
    played = exam(environment, 1)
    results = [played.examine(lambda: None) for _ in range(2)]
    assert environment.seeds == [9, 9]
    assert results[0] == results[1]


def test_what_an_environment_that_cannot_be_reset_has_begun_before_does_not_count():
    environment = Counting()
    played = exam(environment, 2)
    environment.reset(0)
    environment.can_reset, environment.reset = False, lambda seed: environment._observe()  # it goes on where it stands
    first, second = (played.examine(lambda: None).metrics for _ in range(2))
    # the first exam ends in the middle of the episodes of two environments
    assert first == second
    assert first["return"] == pytest.approx(19 / 3)


def test_actions_are_the_most_likely_ones():
    environment = Counting()
    config = control(policy={"init_std": 100.0})
    played = exam(environment, 1, config)
    played.examine(lambda: None)
    assert torch.stack(environment.actions).abs().max() < 5


def test_between_two_steps_the_server_may_stop_it():
    environment = Counting()
    calls = iter([None, None, RuntimeError("stop")])

    def between():
        error = next(calls)
        if error:
            raise error

    with pytest.raises(RuntimeError, match="stop"):
        exam(environment, 5).examine(between)
    assert environment.num_steps == 2


def test_episodes_without_an_end_are_cut_off_and_count_as_they_stand():
    spaces = Spaces(observations=SPACES.observations, action=SPACES.action, max_episode_steps=3)
    environment = Counting(spaces=spaces)  # the third one takes 4 steps and more than 2 episodes' worth are not played
    metrics = exam(environment, 1).examine(lambda: None).metrics
    assert environment.num_steps == 4
    environment = Counting(num_envs=9, spaces=spaces)
    metrics = exam(environment, 1).examine(lambda: None).metrics
    assert environment.num_steps == 4
    assert metrics["episodes"] == 9
    assert metrics["return"] == pytest.approx((3 + 6 + 7 * 10) / 9)
    assert metrics["length"] == pytest.approx((2 + 3 + 7 * 4) / 9)


def test_numbers_that_are_none_end_it_with_a_sentence():
    environment = Counting()
    environment.poison = {1: lambda s: s.rewards.fill_(torch.nan)}
    with pytest.raises(EnvironmentFault, match=r"here:Counting: rewards, index \[0\], is nan, in the evaluation"):
        exam(environment, 1).examine(lambda: None)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_cart_poles_are_scored_as_single_environments_are(autoreset):
    gymnasium = pytest.importorskip("gymnasium")
    from actors.control.environments.factory import make_environment
    from actors.control.environments.seeds import environment_seeds, process_seed

    env = {"id": "gymnasium:CartPole-v1", "vectorization": "sync", "autoreset": autoreset}
    config = control(env=env)
    torch.manual_seed(0)
    environment = make_environment(config, 3, 0, "evaluator")
    played = exam(environment, 2, config, seed=5)
    metrics = played.examine(lambda: None).metrics
    returns = []
    for seed in environment_seeds(process_seed(5, "evaluator"), 3):
        single = gymnasium.make("CartPole-v1")
        now, _ = single.reset(seed=seed)
        for _ in range(2):
            returns.append(0.0)
            ended = False
            while not ended:
                policy = played._policy
                action, _, _ = policy.act({"policy": torch.from_numpy(now)[None]}, (), None)
                now, reward, terminated, truncated, _ = single.step(int(action))
                returns[-1] += reward
                ended = terminated or truncated
            now, _ = single.reset()
    assert (metrics["return"], metrics["return_std"]) == (
        pytest.approx(np.mean(returns)),
        pytest.approx(np.std(returns)),
    )
    assert (metrics["length"], metrics["episodes"]) == (pytest.approx(np.mean(returns)), 6)
    environment.close()


class Episodes:
    """A gatherer whose episodes take as many steps as their task says, scored by a list."""

    def __init__(self, scores):
        self.scores, self.begun = scores, []

    def begin(self, ticket):
        self.begun.append((ticket.task_index, ticket.group_size))
        self.steps = 0

    def step(self):
        self.steps += 1

    def finished(self):
        task = self.begun[-1][0]
        if self.steps < task % 10 + 1:
            return None
        score = np.asarray([self.scores[len(self.begun) - 1]], np.float32)
        return Group(ordinal=task, attempt=0, task_index=task, lengths=(self.steps,), arrays={}, rewards=score)


GRPO = {"algorithm": {"name": "grpo"}, "episodes": {"tasks": 20, "group_size": 2}, "eval": {"episodes": 4}}


def grpo():
    return control(**GRPO, env={"num_envs": 64, "horizon": 24})


@pytest.mark.parametrize(
    ("scores", "more"),
    [
        ([0.0, 1.0, 1.0, 0.5], {"return": 0.625, "success": 0.5}),
        ([0.0, 1.0, 3.0, 0.0], {"return": 1.0}),  # no success rate where a score is not in [0, 1]
        ([np.nan, 1.0, 0.0, 0.5], {"return": 0.5, "success": 1 / 3, "unscored": 1}),
    ],
)
def test_episodes_of_held_out_starts_are_scored_as_in_training(scores, more):
    gatherer, calls = Episodes(scores), []
    metrics = HeldOutStarts(grpo(), gatherer).examine(lambda: calls.append(1)).metrics
    assert gatherer.begun == [(20, 1), (21, 1), (22, 1), (23, 1)]
    assert metrics.pop("return_std") == pytest.approx(np.nanstd(scores))
    assert metrics == {"length": 2.5, "episodes": 4, **more}
    assert len(calls) == 10


class Line:
    """A server's end: each turn takes the next entry of the script."""

    def __init__(self, script):
        self.script, self.sent, self.descriptor = script, [], os.eventfd(1)

    def fileno(self):
        return self.descriptor

    def receive(self, timeout_s):
        return self.script.pop(0) if self.script else [({"type": "stop", "reason": "over", "error": False}, [])]

    def send(self, kind, **fields):
        self.sent.append((kind, fields))


class Receiver:
    def __init__(self, data):
        self.data, self.prepared, self.descriptor = data, None, os.eventfd(1)

    def fileno(self):
        return self.descriptor

    def fetch(self, manifest):
        self.prepared = Prepared(manifest=manifest, data=self.data, transfer_s=0.1, path="shm")

    def ready(self):
        prepared, self.prepared = self.prepared, None
        return prepared


def evaluate(script, exam, refused=False):
    config = control(eval={"every": 2}, steps=5)
    policy = Policy(config, SPACES, torch.device("cpu"), greedy=True)
    module = build_actor(config, SPACES)
    first, data = published(module)
    line = Line([[({"type": "version", "manifest": published(module, v)[0].to_wire()}, [])] for v in script])
    if refused:
        policy.load_weights = lambda manifest, data: (_ for _ in ()).throw(WeightsError("torn"))
    Evaluator(config, line, policy, Receiver(data), exam, StateTimer()).run(first, 0)
    return line.sent


def test_first_last_and_every_second_version_are_evaluated_with_the_weights_that_were_proven():
    sent = evaluate([1, 2, 3, 4, 5], lambda between: Result({"return": 1.0}))
    assert [f["version"] for kind, f in sent if kind == "live"] == [0, 2, 4, 5]
    results = [f for kind, f in sent if kind == "eval"]
    assert [f["version"] for f in results] == [0, 2, 4, 5]
    assert {tuple(f["metrics"]) for f in results} == {("return", "wall_s")}
    assert results[0]["samples"] == []


def test_a_version_that_was_overwritten_meanwhile_is_passed_over(capsys):
    assert evaluate([1], lambda between: Result({}), refused=True) == []
    assert "version 0 passed over: torn" in capsys.readouterr().out


def test_a_stop_ends_an_exam_in_the_middle_and_an_error_of_the_run_is_its_own():
    def endless(between):
        while True:
            between()

    assert [kind for kind, _ in evaluate([1], endless)] == ["live"]
    config = control()
    policy = Policy(config, SPACES, torch.device("cpu"))
    first, data = published(build_actor(config, SPACES))
    line = Line([[], [({"type": "stop", "reason": "the learner died", "error": True}, [])]])
    with pytest.raises(AsyncRLError, match="the learner died"):
        Evaluator(config, line, policy, Receiver(data), endless, StateTimer()).run(first, 0)
