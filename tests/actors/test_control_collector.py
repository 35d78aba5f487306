"""Fragments against brute force: single environments that are stepped one by one, and sequences computed anew."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from control_fakes import SPACES, Counting, control, published

from actors.control.collector import Collector, EnvironmentFault
from actors.control.policy import Policy
from async_rl.control.fragment import check_control_group
from async_rl.control.networks import build_actor
from async_rl.protocol import Ticket
from learner.control.rollout import stack_fragments


def ticket(ordinal=0, attempt=0):
    return Ticket(ordinal, attempt, 0, 1, 0, 60.0)


def make(config, environment, seed=3):
    torch.manual_seed(7)
    policy = Policy(config, environment.spaces, torch.device("cpu"))
    policy.load_weights(*published(build_actor(config, environment.spaces)))
    return Collector(config, environment, policy, seed), policy


def fragment(collector, ordinal=0):
    collector.begin(ticket(ordinal))
    while True:
        collector.step()
        group = collector.finished()
        if group is not None:
            return group


def test_a_fragment_of_the_counting_environment_is_what_one_writes_down_by_hand():
    environment = Counting()
    collector, _ = make(control(), environment)
    first, second = fragment(collector, 5), fragment(collector, 6)
    assert check_control_group(first, SPACES, 4, episodes=False) == ""
    a, b = first.arrays, second.arrays
    # environment 0 ends (truncated) every 2nd step, 1 (terminated) every 3rd, 2 (truncated) every 4th
    assert a["step_rewards"].T.tolist() == [[1, 2, 1, 2], [1, 2, 3, 1], [1, 2, 3, 4]]
    assert a["truncated"].T.tolist() == [[False, True, False, True], [False] * 4, [False, False, False, True]]
    assert a["terminated"].T.tolist() == [[False] * 4, [False, False, True, False], [False] * 4]
    assert a["obs/policy"][:, :, 1].T.tolist() == [[0, 1, 0, 1], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert a["last_obs/policy"].tolist() == [[[0, 0], [1, 1], [2, 0]]]
    assert a["final_obs/policy"].tolist() == [[0, 2], [0, 2], [2, 4]]  # steps in order, environments within
    assert a["final_obs/extra"].shape == (3, 3)
    assert a["episode_returns"].tolist() == [3, 6, 3, 10]
    assert a["episode_lengths"].tolist() == [2, 3, 2, 4]
    # over the border: environment 1 had made one step of its episode
    assert b["obs/policy"][0].tolist() == a["last_obs/policy"][0].tolist()
    assert b["step_rewards"][:, 1].tolist() == [2, 3, 1, 2]
    assert b["episode_returns"].tolist() == [3, 6, 3, 10]
    assert (first.ordinal, first.lengths, first.rewards.tolist()) == (5, (4,), [pytest.approx(23 / 12)])
    assert not np.shares_memory(a["step_rewards"], b["step_rewards"])


def test_steps_that_only_reset_have_no_version_and_belong_to_no_episode():
    collector, _ = make(control(env={"horizon": 6}), Counting(lazy=True))
    first, second = (fragment(collector).arrays for _ in range(2))
    assert first["versions"].T.tolist() == [[0, 0, -1, 0, 0, -1], [0, 0, 0, -1, 0, 0], [0, 0, 0, 0, -1, 0]]
    assert first["final_obs/policy"].tolist() == [[0, 2], [2, 4], [0, 2]]
    assert sorted(first["episode_returns"].tolist()) == [3, 3, 6, 10]
    assert sorted(first["episode_lengths"].tolist()) == [2, 2, 3, 4]
    # environment 1 goes on with its 3rd step, ends and is reset in the next
    assert second["versions"][:, 1].tolist() == [0, -1, 0, 0, 0, -1]
    assert second["episode_lengths"].tolist() == [3, 2, 4, 2, 3]


def test_a_fragment_in_which_no_action_counted_is_gathered_anew():
    collector, _ = make(control(env={"horizon": 1}), Counting(lazy=True))
    fragments = [fragment(collector).arrays for _ in range(60)]
    # every 3rd, 4th and 5th step only resets an environment: the 60th all three, so what is sent is the 61st
    assert [row["versions"][0].tolist() for row in fragments[58:]] == [[0, 0, 0], [0, 0, 0]]
    assert sum(row["episode_lengths"].sum() for row in fragments) == 40 + 45 + 48
    assert fragments[59]["obs/policy"][0, :, 1].tolist() == [0, 0, 0]


def test_an_end_in_the_last_step_of_a_fragment_masks_the_first_of_the_next():
    collector, _ = make(control(env={"horizon": 2}), Counting(lazy=True))
    fragment(collector)
    assert fragment(collector).arrays["versions"][0].tolist() == [-1, 0, 0]


def test_an_environment_that_does_not_tell_sends_no_final_observations_where_something_was_truncated():
    collector, _ = make(control(), Counting(tells=False))
    group = fragment(collector)
    assert not any(name.startswith("final_obs") for name in group.arrays)
    assert check_control_group(group, SPACES, 4, episodes=False) == ""


def test_actions_are_sent_as_the_policy_chose_them_though_the_environment_clips_in_place():
    environment = Counting()
    collector, _ = make(control(), environment)
    group = fragment(collector)
    assert np.array_equal(group.arrays["actions"], torch.stack(environment.actions).numpy())
    assert np.abs(group.arrays["actions"]).min() > 0


def test_each_step_has_the_version_that_made_it():
    config = control()
    collector, policy = make(config, Counting())
    collector.begin(ticket())
    collector.step()
    torch.manual_seed(8)
    policy.load_weights(*published(build_actor(config, SPACES), version=1))
    for _ in range(3):
        collector.step()
    group = collector.finished()
    assert group.arrays["versions"].T.tolist() == [[0, 1, 1, 1]] * 3
    assert group.oldest_version == 0


def test_a_dropped_ticket_leaves_environments_and_running_episodes_where_they_are():
    collector, _ = make(control(), Counting())
    collector.begin(ticket(0))
    for _ in range(3):
        collector.step()
    collector.drop()
    assert collector.finished() is None
    group = fragment(collector, 1)
    assert group.arrays["step_rewards"].T.tolist() == [[2, 1, 2, 1], [1, 2, 3, 1], [4, 1, 2, 3]]
    assert group.arrays["episode_returns"].tolist() == [3, 10, 3, 6]  # those begun before the drop are whole
    assert group.arrays["episode_lengths"].tolist() == [2, 4, 2, 3]


@pytest.mark.parametrize(
    ("poison", "sentence"),
    [
        (lambda s: s.observations["policy"].__setitem__((1, 0), torch.nan), r"group 'policy', index \[1, 0\], is nan"),
        (lambda s: s.rewards.__setitem__(2, torch.inf), r"rewards, index \[2\], is inf"),
        (lambda s: s.final_observations["policy"].__setitem__((0, 1), -torch.inf), r"final .*index \[0, 1\], is -inf"),
    ],
)
def test_numbers_that_are_none_are_named_and_everything_begins_anew(poison, sentence):
    environment = Counting()
    environment.poison = {2: poison}
    collector, _ = make(control(), environment)
    collector.begin(ticket())
    collector.step()
    with pytest.raises(EnvironmentFault, match=f"environment here:Counting: .*{sentence}, after step 1"):
        collector.step()
    assert collector.finished() is None
    assert len(set(environment.seeds)) == 2  # other starts than before
    assert fragment(collector).arrays["obs/policy"][0, :, 1].tolist() == [0, 0, 0]


def scattered(environment, **wrong):
    """The second step gives other arrays."""
    step = environment.step
    environment.step = lambda actions: replace(
        step(actions), **{k: f(torch.ones(3)) for k, f in wrong.items() if environment.num_steps == 2}
    )


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"rewards": lambda x: x[:1]}, r"rewards are \[1\] of float32 instead of \[3\]"),
        ({"rewards": lambda x: x.mean()}, r"rewards are \[\] of"),
        ({"rewards": lambda x: x.double()}, r"rewards are \[3\] of float64"),
        ({"truncated": lambda x: x[:1].bool()}, r"truncated are \[1\] of bool"),
        ({"observations": lambda x: {"policy": x[:, None], "extra": None}}, r"group 'policy' are \[3, 1\] of float32"),
        ({"observations": lambda x: {"policy": torch.ones(3, 2)}}, r"group 'extra' are missing"),
    ],
)
def test_arrays_that_would_spread_over_rows_are_refused_by_name(wrong, sentence):
    environment = Counting()
    collector, _ = make(control(), environment)
    scattered(environment, **wrong)
    collector.begin(ticket())
    collector.step()
    with pytest.raises(EnvironmentFault, match=f"{sentence}.*, after step 1 of a fragment") as fault:
        collector.step()
    assert fault.value.reason == "environment_wrong_shape"
    assert len(set(environment.seeds)) == 2  # all begins anew


def test_huge_but_finite_numbers_are_let_through():
    environment = Counting()
    environment.poison = {1: lambda s: s.rewards.fill_(3e38)}
    collector, _ = make(control(), environment)
    collector.begin(ticket())
    collector.step()


def test_equal_seeds_draw_equal_actions_and_others_do_not():
    draw = [fragment(make(control(), Counting(), seed)[0]).arrays["actions"] for seed in (3, 3, 4)]
    assert np.array_equal(draw[0], draw[1])
    assert not np.array_equal(draw[0], draw[2])


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("network", "encoder"), [("gru", "separate"), ("lstm", "separate"), ("gru", "shared")])
def test_log_probabilities_of_a_recurrent_policy_are_those_of_the_learners_sequence(network, encoder, lazy):
    config = control(
        env={"horizon": 5}, policy={"network": network, "rnn_hidden": 6, "encoder": encoder, "std": "state"}
    )
    environment = Counting(lazy=lazy)
    torch.manual_seed(1)
    policy = Policy(config, SPACES, torch.device("cpu"))
    policy.version, policy.proven = 0, True
    collector = Collector(config, environment, policy, 3)
    num_states = {"gru": 1, "lstm": 2}[network] * (1 if encoder == "shared" else 2)
    for _ in range(3):  # over two borders
        rollout = stack_fragments([fragment(collector)], torch.device("cpu"))
        assert len(rollout.states) == num_states
        own = tuple(array for name, array in rollout.states.items() if name.startswith("actor"))
        with torch.no_grad():
            x = policy.actor.observe(rollout.obs)
            features, after = policy.actor.sequence(x, own, rollout.resets)
            logprobs = policy.actor.distribution(features).log_prob(rollout.actions)
        torch.testing.assert_close(logprobs[rollout.acted], rollout.logprobs[rollout.acted], atol=1e-5, rtol=0)
        assert (after[0] - own[0]).abs().max() > 1e-3  # it has a memory at all


def single_environments(config, name, seed):
    """The same environments, one by one, as gymnasium's own documentation would reset them."""
    import gymnasium

    from actors.control.environments.seeds import environment_seeds, process_seed

    own = environment_seeds(process_seed(seed, name), config.env.num_envs)
    each = [gymnasium.make("CartPole-v1", max_episode_steps=12) for _ in own]
    return each, [env.reset(seed=s)[0] for env, s in zip(each, own, strict=True)]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_cart_poles_of_gymnasium_agree_with_a_loop_over_single_environments(autoreset):
    pytest.importorskip("gymnasium")
    from actors.control.environments.factory import make_environment

    config = control(
        env={
            "id": "gymnasium:CartPole-v1",
            "kwargs": {"max_episode_steps": 12},
            "num_envs": 4,
            "horizon": 25,
            "vectorization": "sync",
            "autoreset": autoreset,
        }
    )
    environment = make_environment(config, 4, 0, "actor0")
    collector, _ = make(config, environment, seed=11)
    singles, now = single_environments(config, "actor0", 11)
    ended, totals = [False] * 4, [[0.0, 0] for _ in range(4)]
    num_truncated = num_terminated = 0
    for _ in range(3):
        group = fragment(collector)
        assert check_control_group(group, environment.spaces, 25, episodes=False) == ""
        a, finals, episodes = group.arrays, [], []
        for t in range(25):
            for i, env in enumerate(singles):
                np.testing.assert_array_equal(a["obs/policy"][t, i], now[i].astype(np.float32))
                if ended[i]:  # next_step: this step only resets
                    now[i], _ = env.reset()
                    ended[i] = False
                    assert (a["versions"][t, i], a["step_rewards"][t, i]) == (-1, 0)
                    assert (a["terminated"][t, i], a["truncated"][t, i]) == (False, False)
                    continue
                now[i], reward, terminated, truncated, _ = env.step(int(a["actions"][t, i, 0]))
                truncated = truncated and not terminated
                outcome = (a["versions"][t, i], a["step_rewards"][t, i], a["terminated"][t, i], a["truncated"][t, i])
                assert outcome == (0, reward, terminated, truncated)
                totals[i] = [totals[i][0] + reward, totals[i][1] + 1]
                if truncated:
                    finals.append(now[i].astype(np.float32))
                if terminated or truncated:
                    episodes.append(tuple(totals[i]))
                    totals[i] = [0.0, 0]
                    num_truncated, num_terminated = num_truncated + truncated, num_terminated + terminated
                    if autoreset == "next_step":
                        ended[i] = True
                    else:
                        now[i], _ = env.reset()
        np.testing.assert_array_equal(a["last_obs/policy"][0], np.stack(now).astype(np.float32))
        np.testing.assert_array_equal(a["final_obs/policy"], np.stack(finals))
        told = zip(a["episode_returns"].tolist(), a["episode_lengths"].tolist(), strict=True)
        assert list(told) == episodes
    assert min(num_truncated, num_terminated) >= 3
    environment.close()
