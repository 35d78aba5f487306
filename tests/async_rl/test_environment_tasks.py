"""The problems that environments bring."""

import itertools

import pytest

from async_rl.config import TaskConfig
from async_rl.errors import ConfigError
from async_rl.tasks import load_task
from async_rl.tasks.calculator import compute
from async_rl.tasks.frozenlake import distances, neighbour, picture


def load(environment, **fields):
    return load_task(TaskConfig(environment=environment, **fields), 0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"), ("2-3", "-1"), ("(2+3)*4", "20"), ("7/2", "7/2"), ("1/0", "error"),
        ("", "error"), ("2++3", "error"), ("-3", "error"), ("2 3", "error"), ("0x10", "error"), ("1e9", "error"),
    ],
)  # fmt: skip
def test_the_calculator_computes_exactly_or_says_error(expression, value):
    assert compute(expression) == value


def test_calculator_problems_have_three_operands_and_right_answers():
    data = load("calculator")
    assert len(data.heldout) == 500
    for problem in data.train[:200]:
        text = problem.prompt.removesuffix("=")
        operands = text.replace("-", "+").replace("*", "+").split("+")
        assert [len(o) for o in operands] == [2, 2, 2]
        assert str(eval(text)) == problem.columns["answer"]


def test_held_out_expressions_are_not_trained_in_another_order_either():
    data = load("calculator")
    operands = lambda p: tuple(sorted("".join(c if c.isdigit() else " " for c in p.prompt).split()))  # noqa: E731
    assert not {operands(p) for p in data.train} & {operands(p) for p in data.heldout}


def test_every_secret_lies_in_the_range_that_is_named_and_halving_finds_it():
    data = load("guess")
    for problem in itertools.chain(data.train, data.heldout):
        low, high = map(int, problem.prompt.removeprefix("guess ").removesuffix(": ").split("-"))
        assert low <= problem.columns["secret"] <= high
        assert high - low + 1 == 2**4 - 1  # four guesses are enough


def test_every_lake_has_a_way_and_no_map_is_both_trained_and_held_out():
    data = load("gymnasium:FrozenLake-v1")
    maps = [tuple(p.columns["make"]["desc"]) for p in itertools.chain(data.train, data.heldout)]
    assert len(set(maps)) == len(maps) == 3000
    assert all(6 <= distances(desc)[0] <= 14 for desc in maps)


def test_distances_and_neighbours_on_a_map_by_hand():
    desc = ["SFH", "HFF", "FFG"]
    assert distances(desc) == [4, 3, None, None, 2, 1, 2, 1, 0]
    assert [neighbour(4, action, 3, 3) for action in range(4)] == [3, 7, 5, 1]
    assert [neighbour(0, action, 3, 3) for action in range(4)] == [0, 3, 1, 0]  # the edge holds
    assert picture(desc, 4) == "..O/OA./..G"
    assert distances(["SH", "HG"])[0] is None


def test_other_gymnasium_environments_differ_by_their_seeds():
    data = load("gymnasium:Taxi-v3", holdout=100)
    assert len(data.heldout) == 100
    assert {p.columns["seed"] for p in [*data.train, *data.heldout]} == set(range(2500))


def test_data_of_the_user_takes_the_place_of_the_problems(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(f'{{"prompt": "guess {i}: ", "secret": {i}}}\n' for i in range(10)))
    data = load("guess", data=str(file), name="jsonl")
    assert (len(data.train), len(data.heldout)) == (8, 2)
    assert data.train[0].prompt == f"guess {data.train[0].columns['secret']}: "


def test_an_unknown_environment_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"task.environment = 'calulator': .* did you mean 'calculator'\?"):
        load("calulator")
