"""The environments that ship, played by hand."""

import asyncio

import pytest

from actors.environments.base import Turn
from actors.environments.calculator import Calculator
from actors.environments.guess import Guess
from actors.environments.gymnasium_text import GymnasiumText
from actors.environments.worker import load_environment
from actors.verifiers.worker import LoadError
from async_rl.config import TaskConfig
from async_rl.tasks import load_task
from learner.warmup.demonstrations import EXPERTS


def play(environment, columns, *answers):
    """First observation, then what each answer gave."""

    async def episode():
        first = await environment.reset(columns, seed=0)
        turns = [await environment.act(answer) for answer in answers]
        await environment.close()
        return first, turns

    return asyncio.run(episode())


def test_the_calculator_computes_what_is_in_brackets_and_judges_the_rest():
    columns = {"prompt": "2+3*4=", "answer": "14"}
    first, turns = play(Calculator(), columns, "[3*4]", "[2+12", "[import os]", " [1-20] ", "14")
    assert first == "2+3*4="
    assert turns == [
        Turn("12", 0.0, False),
        Turn("", 0.0, True),  # no call, so it is an answer, and a wrong one
        Turn("error", 0.0, False),
        Turn("-19", 0.0, False),
        Turn("", 1.0, True),
    ]


@pytest.mark.parametrize("call", ["[9**9**9**9]", "[" + "9*" * 150 + "9]", "[" + "(" * 90 + "]", "[__import__('os')]"])
def test_the_calculator_never_executes_and_never_works_long(call):
    _, turns = play(Calculator(), {"prompt": "1+1=", "answer": "2"}, call)
    assert turns == [Turn("error", 0.0, False)]


def test_a_guess_is_told_the_direction_and_the_right_one_ends_it():
    columns = {"prompt": "guess 12-26: ", "low": 12, "secret": 20}
    first, turns = play(Guess(), columns, "19", "22", "two", "9" * 50, " 20 ")
    assert first == "guess 12-26: "
    assert [(t.observation, t.reward, t.done) for t in turns] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        ("number?", 0.0, False),
        ("number?", 0.0, False),
        ("", 1.0, True),
    ]


def test_frozen_lake_is_shown_as_a_map_and_walked_by_numbers():
    pytest.importorskip("gymnasium")
    columns = {"prompt": "", "make": {"desc": ["SFFF", "FHFH", "FFFH", "HFFG"], "is_slippery": False}}
    first, turns = play(GymnasiumText("FrozenLake-v1"), columns, "1", "north", "7", "1", "2", "1", "2", "2")
    assert first == "A.../.O.O/...O/O..G"
    assert [t.observation for t in turns[:4]] == [
        "..../AO.O/...O/O..G",
        "actions: 0-3",
        "actions: 0-3",
        "..../.O.O/A..O/O..G",
    ]
    assert [t.reward for t in turns] == [0, 0, 0, 0, 0, 0, 0, 1]
    assert [t.done for t in turns] == [False] * 7 + [True]


def test_a_hole_ends_the_walk_without_reward():
    pytest.importorskip("gymnasium")
    columns = {"prompt": "", "make": {"desc": ["SFFF", "FHFH", "FFFH", "HFFG"], "is_slippery": False}}
    _, turns = play(GymnasiumText("FrozenLake-v1"), columns, "2", "1")
    assert [(t.reward, t.done) for t in turns] == [(0.0, False), (0.0, True)]


def test_states_without_a_map_are_numbers_and_the_problems_seed_decides():
    pytest.importorskip("gymnasium")
    first, turns = play(GymnasiumText("CliffWalking-v1"), {"prompt": "", "seed": 3}, "0")
    assert (first, turns[0].observation, turns[0].reward) == ("36", "24", -1.0)  # up from the lower left of 4 × 12


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("gymnasium:Pendulum-v1", "must be a number from 0"),
        ("gymnasium:NoSuchThing-v0", "cannot make 'NoSuchThing-v0'"),
        ("no_such_module:Thing", "no module 'no_such_module'"),
        ("actors.environments.base:Thing", "no class 'Thing'"),
        ("actors.environments.base:Turn", "it has no reset and no act"),
    ],
)
def test_what_cannot_be_played_is_said_at_the_start(environment, message):
    pytest.importorskip("gymnasium")
    with pytest.raises(LoadError, match=message):
        load_environment(environment)


@pytest.mark.parametrize("environment", sorted(EXPERTS))
def test_the_experts_demonstrations_are_what_the_environments_say_and_solve_them(environment):
    pytest.importorskip("gymnasium")
    data = load_task(TaskConfig(environment=environment), 0)
    for problem in data.train[:20]:
        shown = EXPERTS[environment](problem)
        columns = {**problem.columns, "prompt": problem.prompt}
        first, turns = play(load_environment(environment)(), columns, *shown.turns)
        assert first == shown.prompt
        assert [t.observation for t in turns[:-1]] == list(shown.observations)
        assert [t.done for t in turns] == [False] * (len(turns) - 1) + [True]
        assert sum(t.reward for t in turns) == 1.0
