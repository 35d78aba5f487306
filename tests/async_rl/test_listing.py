"""Problems of a user's class: whatever that class does becomes a sentence, in time."""

import pytest

from async_rl.config import TaskConfig
from async_rl.errors import ConfigError
from async_rl.tasks import listing, load_task
from async_rl.tasks.listing import check_repeats, list_problems

pytestmark = pytest.mark.real

USER_MODULE = """
import os, random, sys, time
from async_rl.tasks import Problem

def problems(of):
    return type(of.__name__, (), {"problems": staticmethod(of)})

@problems
def Good():
    print("noise")
    for i in range(20):
        columns = {"number": 1 << 80, "list": [i, None, 0.5]}
        yield i // 2, Problem(f"p{i}", columns, ({"role": "system", "content": "s"},))

@problems
def Hashed():
    return [(word, Problem(word, {})) for word in {"one", "two", "three", "four", "five", "six", "seven"}]

@problems
def Random():
    return [(i, Problem(str(random.random()), {})) for i in range(20)]

@problems
def Raises():
    raise RuntimeError("no data")

@problems
def Exits():
    sys.exit(3)

@problems
def Vanishes():
    os._exit(3)

@problems
def Hangs():
    if os.fork() == 0:
        time.sleep(1000)
    time.sleep(1000)

@problems
def Odd():
    return ["p"]

@problems
def NotText():
    return [(1, Problem(3, {}))]

@problems
def NotPlain():
    return [(1, Problem("p", {"set": {1}}))]

@problems
def NotAName():
    return [(1, Problem("p", {"structure": {1: 2}}))]

@problems
def NoKey():
    return [([], Problem("p", {}))]

class Bare: ...
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_problems.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_class_of_the_user_brings_its_problems_and_its_families_stay_together():
    found = list_problems("user_problems:Good")
    assert [key for key, _ in found] == [i // 2 for i in range(20)]
    problem = found[3][1]
    assert (problem.prompt, problem.columns) == ("p3", {"number": 1 << 80, "list": [3, None, 0.5]})
    assert problem.before == ({"role": "system", "content": "s"},)
    data = load_task(TaskConfig(environment="user_problems:Good"), 0)
    assert (len(data.train), len(data.heldout)) == (16, 4)
    check_repeats("user_problems:Good")


def test_an_order_of_hashes_is_the_same_in_every_process():
    check_repeats("user_problems:Hashed")


def test_problems_that_differ_from_process_to_process_are_refused():
    with pytest.raises(ConfigError, match=r"gives others each time it is called \(from problem 0 on\)"):
        check_repeats("user_problems:Random")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "RuntimeError: no data"),
        ("Exits", "SystemExit: 3"),
        ("Vanishes", "the process ended with exit code 3"),
        ("Bare", "AttributeError: .* write it as a static method, or set task.data"),
        ("Missing", "AttributeError: module 'user_problems' has no attribute 'Missing'"),
        ("Odd", r"must yield \(key, async_rl.tasks.Problem\), got 'p'"),
        ("NotText", "problem 0: its prompt is int, not text"),
        ("NotPlain", r"problem 0: column 'set' holds \{1\}"),
        ("NotAName", "problem 0: column 'structure' holds"),
        ("NoKey", "unhashable type: 'list'"),
    ],
)
def test_what_a_class_does_wrong_is_a_sentence(name, message):
    with pytest.raises(
        ConfigError, match=rf"^task.environment = 'user_problems:{name}': {name}.problems\(\).*{message}"
    ):
        list_problems(f"user_problems:{name}")


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        list_problems("no_such_module:Thing")


def test_a_class_that_hangs_is_ended_with_all_it_started(monkeypatch):
    monkeypatch.setattr(listing, "LIMIT_S", 1.0)
    with pytest.raises(ConfigError, match=r"they took longer than 1 s; make fewer, or set task\.data"):
        list_problems("user_problems:Hangs")


def test_an_endless_generator_is_cut(monkeypatch):
    monkeypatch.setattr(listing, "MOST", 3)
    with pytest.raises(ConfigError, match="there are more than 3; an endless generator must be cut"):
        list(listing.rows_of((i, listing.Problem("p", {})) for i in range(10)))
