"""The table of the vision-language-action preset: starts, gripper, ends, pictures, and the judge of its episodes."""

import numpy as np
import pytest
import torch

from actors.control.environments.factory import make_environment
from actors.control.worlds.grid import CLOSE, COLOURS, OPEN, STAY, WORDS, PickAndPlace, demonstrations, reward
from async_rl.config import parse_control
from async_rl.control.spaces import Observation

RED, GREEN, BLUE = COLOURS.values()


def table(gripper=(0, 0), blocks=((1, 0), (2, 0)), places=((3, 3), (0, 3)), **kwargs):
    """One table of 4 × 4 with everything at given (column, row); the first block and place are named. Block 0 is red, 1
    green; place 0 blue, 1 red."""
    env = PickAndPlace(1, **kwargs)
    env._gripper[0], env._block[0], env._place[0] = gripper, blocks, places
    env._block_colour[0], env._place_colour[0] = (0, 1), (2, 0)
    return env


def play(env, *actions):
    """Outcomes of actions of the only table: observations, reward, terminated, truncated each."""
    return [tuple(x[0] if not isinstance(x, dict) else x for x in env.step(np.array([a]))[:4]) for a in actions]


def best(observations):
    """What a perfect arm does: reads the state."""
    state = observations["state"].astype(np.int64)
    holds = state[:, 6] > 0
    there = np.where(holds[:, None], state[:, 4:6], state[:, 2:4])
    return np.concatenate([there, np.where(holds, OPEN, CLOSE)[:, None]], 1)


def test_a_perfect_arm_solves_every_scene_in_two_steps():
    env = PickAndPlace(500)
    seen, _ = env.reset(seed=1)
    seen, rewards, terminated, truncated, _ = env.step(best(seen))
    assert not np.stack([rewards, terminated, truncated]).any()
    _, rewards, terminated, truncated, _ = env.step(best(seen))
    assert np.stack([rewards == 1, terminated, ~truncated]).all()


def test_equal_seeds_start_alike_and_one_seed_for_all_starts_them_differently():
    env = PickAndPlace(6)
    alike, _ = env.reset(seed=[5, 5, 5, 9, 9, 5])
    for array in alike.values():
        assert (array[[1, 2, 5]] == array[0]).all()
        assert (array[4] == array[3]).all()
    assert (alike["image"][3] != alike["image"][0]).any()
    again = PickAndPlace(6, seed=3).reset(seed=[9] * 6)[0]
    assert (again["image"][0] == alike["image"][3]).all()
    different, _ = env.reset(seed=5)
    assert len({image.tobytes() for image in different["image"]}) == 6


def test_all_scenes_have_distinct_cells_and_colours():
    env = PickAndPlace(300, size=3, blocks=3)
    cells = np.concatenate([env._gripper[:, None], env._block, env._place], 1)
    assert all(len({tuple(cell) for cell in scene}) == 7 for scene in cells)
    for colours in (env._block_colour, env._place_colour):
        assert all(sorted(scene) == [0, 1, 2] for scene in colours)
    assert 0 <= cells.min() <= cells.max() == 2


def test_the_instruction_names_block_and_place_in_words():
    seen = play(table(), (0, 0, STAY))[0][0]
    assert [WORDS[token] for token in seen["instruction"][0]] == ["put", "red block", "on", "blue place"]


def test_the_gripper_takes_what_lies_below_and_carries_it():
    env = table()
    after_miss, after_take, after_carry = play(env, (0, 1, CLOSE), (1, 0, CLOSE), (2, 2, STAY))
    assert after_miss[0]["state"][0].tolist() == [0, 1, 1, 0, 3, 3, 0]
    assert after_take[0]["state"][0].tolist() == [1, 0, 1, 0, 3, 3, 1]
    assert after_carry[0]["state"][0].tolist() == [2, 2, 2, 2, 3, 3, 1]


def test_the_arm_feels_where_it_is_and_whether_it_holds_any_block():
    outcomes = play(table(), (2, 3, STAY), (2, 0, CLOSE), (1, 1, OPEN))
    felt = [outcome[0]["arm"][0].tolist() for outcome in outcomes]
    assert felt == [pytest.approx([2 / 3, 1, 0]), pytest.approx([2 / 3, 0, 1]), pytest.approx([1 / 3, 1 / 3, 0])]


def test_a_block_is_not_let_go_onto_another():
    env = table()
    *_, refused, free = play(env, (1, 0, CLOSE), (2, 0, OPEN), (3, 1, OPEN))
    assert refused[0]["state"][0].tolist() == [2, 0, 2, 0, 3, 3, 1]
    assert free[0]["state"][0].tolist() == [3, 1, 3, 1, 3, 3, 0]


@pytest.mark.parametrize(
    ("actions", "rewards"),
    [
        ([(1, 0, CLOSE), (3, 3, OPEN)], [0, 1]),  # the named block on the named place
        ([(1, 0, CLOSE), (0, 3, OPEN)], [0, 0]),  # on the other place
        ([(2, 0, CLOSE), (3, 3, OPEN)], [0, 0]),  # the other block on the named place
        ([(1, 0, CLOSE), (3, 3, STAY)], [0, 0]),  # over its place, but not let go
    ],
)
def test_only_the_named_block_let_go_on_the_named_place_is_a_success(actions, rewards):
    outcomes = play(table(), *actions)
    assert [outcome[1] for outcome in outcomes] == rewards
    assert [outcome[2] for outcome in outcomes] == [r == 1 for r in rewards]


def test_an_episode_is_truncated_after_its_last_step_and_the_step_after_it_only_starts_anew():
    env = table(max_steps=3)
    outcomes = play(env, *[(0, 0, STAY)] * 3, (3, 3, CLOSE))
    assert [outcome[3] for outcome in outcomes] == [False, False, True, False]
    assert not any(outcome[2] for outcome in outcomes)
    assert outcomes[2][0]["state"][0].tolist() == [0, 0, 1, 0, 3, 3, 0]  # what the episode ended in
    assert env._steps[0] == 0


def test_a_success_in_the_last_step_is_no_truncation():
    assert play(table(max_steps=2), (1, 0, CLOSE), (3, 3, OPEN))[-1][2:] == (True, False)


def test_tables_that_have_ended_start_anew_while_the_others_go_on():
    env = PickAndPlace(2, max_steps=9)
    seen, _ = env.reset(seed=2)
    first = best(seen)
    first[1] = [0, 0, STAY]
    seen, *_ = env.step(first)
    second = best(seen)
    second[1] = [1, 1, STAY]
    seen, rewards, *_ = env.step(second)
    assert rewards.tolist() == [1, 0]
    seen, rewards, *_ = env.step(np.array([[2, 2, OPEN], [2, 3, STAY]]))
    assert rewards.tolist() == [0, 0]
    assert env._steps.tolist() == [0, 3]
    assert seen["state"][1, :2].tolist() == [2, 3]


def test_the_picture_shows_places_blocks_and_the_gripper():
    image = play(table(), (0, 1, STAY))[0][0]["image"][0].astype(int)
    assert image[13, 13].tolist() == [c // 2 for c in BLUE]  # place 0, in (3, 3)
    assert image[13, 1].tolist() == [c // 2 for c in RED]  # place 1, in (0, 3)
    assert image[1, 5].tolist() == list(RED)  # the middle of block 0, in (1, 0)
    assert image[0, 4].tolist() == image[12, 8].tolist()  # its corner is the table's
    assert image[1, 9].tolist() == list(GREEN)
    assert [image[4, 0].tolist(), image[7, 3].tolist()] == [[255] * 3] * 2  # the open gripper's corners, in (0, 1)
    assert image[5, 0].tolist() != [255] * 3


def test_a_closed_gripper_looks_different_and_hides_a_block_under_the_one_it_holds():
    image = play(table(), (1, 0, CLOSE), (2, 0, STAY))[1][0]["image"][0]
    assert image[1, 9].tolist() == list(RED)
    assert (image[0:4, 8] == 255).all()


def test_the_picture_does_not_tell_which_block_is_named():
    env = table()
    image = env._image()
    for array in (env._block, env._block_colour, env._place, env._place_colour):
        array[:] = array[:, ::-1].copy()
    assert np.array_equal(image, env._image())


def test_the_rendered_picture_shows_the_goal_above_the_table():
    (picture,) = table().render()
    assert picture.dtype == np.uint8
    zoom = picture.shape[1] // 16
    assert picture.shape == (20 * zoom, 16 * zoom, 3)
    assert picture[2 * zoom, 2 * zoom].tolist() == list(RED)
    assert picture[2 * zoom, 10 * zoom].tolist() == [c // 2 for c in BLUE]


def judged(*actions):
    env = table()
    seen = [env._observe()["state"][0]]
    outcomes = play(env, *actions)
    seen += [outcome[0]["state"][0] for outcome in outcomes]
    rewards = np.array([outcome[1] for outcome in outcomes], np.float32)
    return reward({"rewards": rewards, "obs/state": np.stack(seen[:-1]), "final_obs/state": seen[-1]})


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ([(1, 0, CLOSE), (3, 3, OPEN)], 1.0),
        ([(1, 0, CLOSE), (3, 3, STAY), (0, 0, OPEN)], 0.5),
        ([(1, 0, CLOSE), (0, 3, OPEN)], 0.25),
        ([(0, 1, STAY), (1, 0, OPEN)], 0.1),
        ([(2, 0, CLOSE), (3, 3, OPEN)], 0.0),
    ],
)
def test_the_judge_says_how_far_an_episode_came(actions, expected):
    assert judged(*actions) == expected


def test_hovering_over_the_block_before_the_first_step_is_worth_nothing():
    env = table(gripper=(1, 0))
    seen = env._observe()["state"][0]
    outcome = play(env, (0, 0, STAY))[0]
    assert reward({"rewards": np.zeros(1), "obs/state": seen[None], "final_obs/state": outcome[0]["state"][0]}) == 0


def test_demonstrations_show_where_to_reach_and_nothing_about_the_gripper():
    shown = demonstrations(1500, 3, size=5)
    state, arm, acts = shown["obs/state"], shown["obs/arm"], shown["actions"]
    assert shown["obs/image"].shape == (1500, 20, 20, 3)
    assert (acts.dtype, acts.shape) == (np.int32, (1500, 3))
    carries, empty = state[:, 6] > 0, arm[:, 2] == 0
    assert (acts[carries, :2] == state[carries, 4:6]).all()
    assert (acts[empty, :2] == state[empty, 2:4]).all()
    assert 0 < (~carries & ~empty).mean() < 0.1  # slips have left another block in the gripper
    assert 0.2 < carries.mean() < 0.8
    assert all(abs((acts[rows, 2] == choice).mean() - 1 / 3) < 0.1 for rows in (carries, empty) for choice in range(3))
    assert all((a == b).all() for a, b in zip(shown.values(), demonstrations(1500, 3, size=5).values(), strict=True))
    assert (shown["obs/state"] != demonstrations(1500, 4, size=5)["obs/state"]).any()


def test_the_run_makes_it_from_its_id_with_its_groups():
    config = parse_control(
        {
            "domain": "control",
            "env": {"id": "actors.control.worlds.grid:PickAndPlace", "kwargs": {"size": 5, "max_steps": 7}},
            "algorithm": {"name": "grpo"},
            "policy": {"device": "cpu"},
        }
    )
    env = make_environment(config, 4, 0, "actor0")
    groups = {"image": Observation((20, 20, 3), "uint8"), "instruction": Observation((4,), "int32")}
    assert env.spaces.observations == groups | {"arm": Observation((3,)), "state": Observation((7,))}
    assert (env.spaces.action.choices, env.spaces.max_episode_steps) == ((5, 5, 3), 7)
    alike = env.reset_alike(11)
    assert all(torch.equal(array, array[:1].expand_as(array)) for array in alike.values())
    outcome = env.step(torch.zeros(4, 3, dtype=torch.int32))
    assert outcome.observations["image"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("kwargs", "message"), [({"blocks": 4}, "3 colours"), ({"size": 2, "blocks": 2}, "do not fit")]
)
def test_a_table_that_cannot_be_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        PickAndPlace(1, **kwargs)
