from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from buffer_helpers import make

from async_rl.data import age, is_correct, make_group, oldest_version, token_trajectory


def trajectory(versions=(3, 4), reward=1.0):
    return token_trajectory(
        prompt=[7, 8], completion=[9] * len(versions), logprobs=[-0.5] * len(versions), versions=versions, reward=reward
    )


def test_a_token_trajectory_masks_the_prompt_everywhere():
    t = trajectory()
    assert t.tokens.tolist() == [7, 8, 9, 9]
    assert t.loss_mask.tolist() == [0, 0, 1, 1]
    assert t.logprobs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert t.versions.tolist() == [-1, -1, 3, 4]
    assert [a.dtype.name for a in t.arrays.values()] == ["int32", "uint8", "float32", "int32"]


def test_age_is_counted_from_the_oldest_sampled_token_of_the_whole_group():
    group = make_group(ordinal=0, attempt=0, task_index=0, trajectories=[trajectory((5, 6)), trajectory((3, 7))])
    assert group.oldest_version == 3
    assert age(group, 7) == 4
    assert age(trajectory((5, 6)), 7) == 2
    assert age(trajectory((7,)), 7) == 0


def test_what_sampled_nothing_has_no_age():
    with pytest.raises(ValueError, match="no age"):
        oldest_version(np.array([-1, -1], np.int32))


def test_a_group_concatenates_and_gives_its_trajectories_back_as_views():
    first, second = trajectory((1, 2), 0.25), trajectory((2, 2, 3), 1.0)
    group = make_group(ordinal=4, attempt=1, task_index=9, trajectories=[first, second], meta={"actor": "a"})
    assert (group.ordinal, group.attempt, group.task_index, len(group)) == (4, 1, 9, 2)
    assert group.lengths == (4, 5)
    assert group.num_sampled == 5
    assert group.rewards.dtype == np.float32
    back = list(group.trajectories)
    for one, other in zip((first, second), back, strict=True):
        assert one.reward == other.reward
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name])
            assert np.shares_memory(other.arrays[name], group.arrays[name])


def test_bytes_are_those_of_all_arrays():
    # 2 trajectories of 3 tokens: int32 + uint8 + float32 + int32 = 13 bytes a token, and 2 float32 rewards
    assert make(0, prompt=2, versions=(0,)).nbytes == 6 * 13 + 8


def test_groups_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make(0).ordinal = 3  # type: ignore[misc]


def test_a_reward_of_one_or_more_is_correct():
    assert is_correct(np.asarray([2.0, 1.0, 0.999, -1.0, np.nan], np.float32)).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]
