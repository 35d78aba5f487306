"""Fragments in the buffer: what is refused and counted, how a batch is measured and split, what survives a resume."""

from dataclasses import replace

import numpy as np
import pytest
from control_groups import SPACES, N, T, control_config, control_limits, episodes, fragment
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.buffer import journal
from async_rl.buffer.batch_stats import batch_stats
from async_rl.buffer.control_rules import ControlRules, episodes_of
from async_rl.buffer.episode_window import EpisodeWindow
from async_rl.buffer.judge import judge
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.records import Entry, Rules
from async_rl.buffer.sharding import split
from async_rl.control.spaces import Action, Spaces
from async_rl.data import Group, age
from async_rl.errors import WireError
from async_rl.wire import decode_groups, encode_groups, unpack_header


def rules_of(config, spaces=SPACES) -> Rules:
    return Rules.from_config(config, control_limits(config, spaces))


RULES = rules_of(control_config())
GRPO = rules_of(control_config(algorithm={"name": "grpo"}, episodes={"group_size": 2, "max_steps": 3, "tasks": 4}))


def verdict(group: Group, rules: Rules = RULES, newest: int = 0, **entry) -> tuple[str, str]:
    fields = {"ordinal": 0, "attempt": 0, "task_index": 0, "actor": "a", "version": 0, "deadline": 9, "issued_at": 0.0}
    answer = judge(group, Entry(**{**fields, **entry}), rules, newest)
    return answer.outcome, answer.reason


def test_a_sound_fragment_and_sound_episodes_are_accepted():
    assert verdict(fragment()) == ("accepted", "")
    assert verdict(fragment(num_envs=5)) == ("accepted", "")  # an actor may have more environments than another
    assert verdict(fragment(**{"final_obs/policy": None, "final_obs/camera": None})) == ("accepted", "")
    assert verdict(episodes(), GRPO) == ("accepted", "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"versions": np.full((T, N), -1, np.int32)}, "nothing_sampled"),
        ({"versions": np.full((T, N), 1, np.int32)}, "version_from_the_future"),
        ({"versions": np.zeros((T, N), np.float32)}, "bad_shape"),
        ({"versions": np.full((T, N), np.inf, np.float32)}, "bad_shape"),
        ({"versions": np.zeros((T, N, 1), np.int32)}, "bad_shape"),
        ({"obs/policy": np.zeros((T, N, 5), np.float32)}, "bad_shape"),
        ({"obs/camera": np.zeros((T, N, 2, 2, 3), np.float32)}, "bad_shape"),
        ({"last_obs/policy": None}, "missing_array"),
        ({"final_obs/camera": None}, "missing_array"),
        ({"final_obs/policy": np.zeros((2, 4), np.float32)}, "bad_shape"),
        ({"actions": np.full((T, N, 2), 2, np.int32)}, "action_outside_space"),
        ({"actions": np.full((T, N, 2), -1, np.int32)}, "action_outside_space"),
        ({"actions": np.ones((T, N, 2), np.float32)}, "bad_shape"),
        ({"logprobs": np.full((T, N), np.nan, np.float32)}, "bad_logprobs"),
        ({"step_rewards": np.full((T, N), np.inf, np.float32)}, "not_finite"),
        ({"obs/policy": np.full((T, N, 4), np.nan, np.float32)}, "not_finite"),
        ({"terminated": np.ones((T, N), np.bool_)}, "terminated_and_truncated"),
        ({"episode_returns": None}, "missing_array"),
        ({"episode_returns": np.zeros((1, 1), np.float32)}, "bad_shape"),
        ({"episode_lengths": np.array([9.0], np.float32)}, "bad_shape"),
        ({"episode_returns": np.array([np.nan], np.float32)}, "not_finite"),
        ({"episode_returns": np.zeros(9, np.float32), "episode_lengths": np.ones(9, np.int32)}, "wrong_episodes"),
        ({"episode_returns": np.zeros(0, np.float32), "episode_lengths": np.ones(0, np.int32)}, "wrong_episodes"),
        ({"episode_lengths": np.array([-9], np.int32)}, "wrong_episodes"),
        ({"step_rewards": np.full((T, N), 1e20, np.float32)}, "too_large"),
        ({"obs/policy": np.full((T, N, 4), -3e38, np.float32)}, "too_large"),
        ({"hidden/actor0": np.zeros((1, N, 4), np.float32)}, "unknown_array"),
        ({"obs/other": np.zeros((T, N, 4), np.float32)}, "unknown_array"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_reason(changes, reason):
    assert verdict(fragment(**changes)) == ("refused", reason)


def test_episodes_of_a_group_are_told_for_each_of_its_trajectories():
    for told, reason in ((2, ""), (1, "wrong_episodes"), (3, "wrong_episodes")):
        group = episodes()
        arrays = {"episode_returns": np.zeros(told, np.float32), "episode_lengths": np.ones(told, np.int32)}
        assert verdict(replace(group, arrays={**group.arrays, **arrays}), GRPO)[1] == reason


def test_a_ticket_holds_for_fragments_too():
    assert verdict(fragment(), task_index=3) == ("refused", "wrong_task")
    assert verdict(fragment(version=1), newest=2, version=2) == ("refused", "version_older_than_ticket")
    assert verdict(replace(fragment(), lengths=(1, 2))) == ("refused", "wrong_group_size")
    longer = rules_of(control_config(env={"horizon": 4}))
    assert verdict(fragment(), longer) == ("refused", "wrong_horizon")
    assert verdict(episodes(lengths=(2, 4)), GRPO) == ("refused", "too_long")
    assert verdict(replace(episodes(), rewards=np.array([0, np.nan], np.float32)), GRPO) == ("filtered", "bad_reward")


def test_a_recurrent_policy_needs_its_hidden_state():
    policy = {"network": "lstm", "rnn_hidden": 5, "rnn_layers": 2, "hidden": [4]}
    names = [f"hidden/{owner}{i}" for owner in ("actor", "critic") for i in range(2)]
    states = {name: np.zeros((2, N, 5), np.float32) for name in names}
    rules = rules_of(control_config(policy=policy))
    assert verdict(fragment(**states), rules) == ("accepted", "")
    assert verdict(fragment(), rules) == ("refused", "missing_array")
    assert verdict(fragment(**{**states, names[3]: np.zeros((2, N, 6), np.float32)}), rules) == ("refused", "bad_shape")
    shared = rules_of(control_config(policy={**policy, "encoder": "shared"}))
    assert verdict(fragment(**{name: states[name] for name in names[:2]}), shared) == ("accepted", "")


def test_continuous_actions_are_real_numbers_without_bounds():
    spaces = Spaces(
        observations=SPACES.observations, action=Action(kind="continuous", size=2, low=(-1, -1), high=(1, 1))
    )
    rules = rules_of(control_config(), spaces)
    assert verdict(fragment(actions=np.full((T, N, 2), 7.5, np.float32)), rules) == ("accepted", "")
    assert verdict(fragment(), rules) == ("refused", "bad_shape")
    assert verdict(fragment(actions=np.full((T, N, 2), np.nan, np.float32)), rules) == ("refused", "not_finite")


NAMES = sorted(fragment().arrays)
DTYPES = ["int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bool"]


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from([*NAMES, "episode_extra", "hidden/x"]),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=5),
    fill=st.sampled_from([-1, 0, 1, 200]),
    lengths=st.sampled_from([(3,), (1, 2), (2,)]),
    grpo=st.booleans(),
)
def test_whatever_an_actor_sends_is_judged_and_counted_without_a_crash(name, dtype, shape, fill, lengths, grpo):
    base = episodes() if grpo else replace(fragment(), lengths=lengths)
    hostile = np.full(shape, fill, np.int64).astype(dtype)
    group = replace(base, arrays={**base.arrays, name: hostile}, rewards=np.zeros(len(base.lengths), np.float32))
    frames = encode_groups("submit", [group])
    try:
        (received,) = decode_groups(unpack_header(frames[0]), frames[1:])
    except WireError:
        return
    rules = GRPO if grpo else RULES
    books = Ledger(rules, lambda ordinal: 0)
    ticket = books.issue("a", 0, 0.0)
    assert ticket is not None
    outcome = books.submit("a", received, 0.0).outcome
    assert outcome in ("accepted", "refused")
    if outcome == "accepted":
        batch_stats([received], 0)
        split([received], 1, 1)


def test_steps_are_counted_where_an_action_counted():
    assert fragment().num_sampled == T * N - 1  # one step only reset its environment
    assert episodes().num_sampled == 5  # each step once, though each part of its action has a version


def test_a_batch_is_measured_over_steps():
    fresh, old = fragment(version=4), fragment(version=2, step_rewards=np.full((T, N), 2.0, np.float32))
    stats = batch_stats([fresh, old], 4)
    assert stats.ages == {0: 5, 2: 5}
    # 0 ... 5 without 4, the reward of the reset step, and five times 2
    assert stats.reward == pytest.approx((11 + 10) / 10)
    assert stats.to_plain()["age"] == {"mean": 1.0, "max": 2, "histogram": {"0": 5, "2": 5}}
    assert "accuracy" not in stats.to_plain()
    groups = batch_stats([episodes(version=1), episodes(version=3)], 3)
    assert (groups.ages, groups.reward) == ({0: 5, 2: 5}, 0.5)


def test_fragments_go_to_ranks_by_their_size_and_each_rank_gets_one():
    groups = [fragment(i, num_envs=n) for i, n in enumerate((2, 8, 2, 4))]
    parts = split(groups, 1, 2)
    assert [[g.ordinal for g in shard.groups] for shard in parts.shards] == [[1], [0, 2, 3]]
    assert parts.costs == [[[24], [6, 6, 12]]]
    assert parts.counts == [{"groups": 4, "sequences": 4, "steps": 3 * 16 - 4}]
    assert [len(shard.groups) for shard in split([fragment(0), fragment(1, num_envs=9)], 1, 2).shards] == [1, 1]


def test_the_window_holds_the_last_hundred_episodes_and_counts_all():
    window = EpisodeWindow()
    assert (window.mean_return, window.mean_length, window.count) == (None, None, 0)
    window.add(np.full(30, 1000.0, np.float32), np.full(30, 1, np.int32))
    window.add(np.arange(100, dtype=np.float32), np.full(100, 7, np.int32))
    assert (window.mean_return, window.mean_length, window.count) == (49.5, 7.0, 130)
    window.add(np.full(50, 100.0, np.float32), np.full(50, 9, np.int32))
    assert window.mean_return == pytest.approx((sum(range(50, 100)) + 50 * 100) / 100)
    assert (window.mean_length, window.count) == (8.0, 180)
    again = EpisodeWindow()
    again.restore(window.to_plain())
    assert (again.mean_return, again.mean_length, again.count) == (window.mean_return, 8.0, 180)


def test_episodes_come_from_what_ended_in_a_fragment_or_from_the_group_itself():
    returns, lengths = episodes_of(fragment(), ControlRules.from_config(control_config(), SPACES))
    assert (returns.tolist(), lengths.tolist()) == ([7.0], [9])
    assert GRPO.control is not None
    returns, lengths = episodes_of(episodes(), GRPO.control)
    assert (returns.tolist(), lengths.tolist()) == ([0.0, 1.0], [2, 3])


def test_fragments_and_the_window_survive_a_checkpoint(tmp_path):
    books = Ledger(RULES, lambda ordinal: 0)
    for ordinal in range(3):
        assert books.issue("a", 0, 0.0) is not None
        books.submit("a", fragment(ordinal), 0.0)
    assert books.deliver() is not None  # two are with the learner, one is ready
    journal.save(journal.freeze(books), tmp_path)
    back = journal.thaw(journal.load(tmp_path), RULES, lambda ordinal: 0)
    assert back.books() == {**books.books(), "ready": 3, "delivered": 0}
    assert (back.tally.episodes.count, back.tally.episodes.mean_return) == (3, 7.0)
    delivery = back.deliver()
    assert delivery is not None
    assert [g.ordinal for g in delivery.groups] == [0, 1]
    for name, array in fragment().arrays.items():
        assert np.array_equal(delivery.groups[0].arrays[name], array), name
    assert age(delivery.groups[0], 2) == 2
