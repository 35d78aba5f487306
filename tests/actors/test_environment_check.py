"""What is wrong with an environment is found before a run starts, and said in a sentence."""

import os

import pytest

from actors.environments.check import check, first_observation
from async_rl.config import parse_config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch import preflight
from async_rl.launch.task_checks import check_environment
from async_rl.tasks import Problem
from learner.warmup.main import build_model, build_tokenizer, save

pytestmark = pytest.mark.real

USER_MODULE = """
import asyncio, random
from actors.environments.base import Turn
from async_rl.tasks import Problem

class Good:
    @staticmethod
    def problems():
        return [(i, Problem(f"p{i:02d}:", {})) for i in range(20)]
    async def reset(self, columns, seed):
        return columns["prompt"]
    async def act(self, text):
        return Turn("", 1.0, True)
    async def close(self): ...

class Raises(Good):
    async def reset(self, columns, seed):
        return 1 / 0

class Plain(Good):
    def reset(self, columns, seed):
        return "not awaitable"

class Hangs(Good):
    async def reset(self, columns, seed):
        await asyncio.sleep(1000)

class Blocks(Good):
    async def reset(self, columns, seed):
        while True: ...

class Random(Good):
    async def reset(self, columns, seed):
        return str(random.random())

class Empty(Good):
    async def reset(self, columns, seed):
        return ""

class Long(Good):
    async def reset(self, columns, seed):
        return "x" * 600
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save(build_model(), build_tokenizer(), folder)
    return folder


@pytest.fixture
def configured(tmp_path, monkeypatch, model):
    (tmp_path / "user_checked.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(environment, **fields):
        task = {"environment": environment, "timeout_s": 1.0} | fields
        return parse_config({"model": {"path": str(model)}, "task": task})

    return make


def test_a_sound_environment_is_played_as_far_as_its_prompt(configured):
    assert check(configured("user_checked:Good")) == "an episode begins with 4 tokens"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"failed \(error\): ZeroDivisionError: division by zero"),
        ("Plain", "TypeError: object str can't be used in 'await' expression"),
        ("Hangs", r"failed \(timeout\): the environment took longer than 1 s"),
        ("Blocks", r"failed \(timeout\): the environment blocked its process"),
        ("Random", "with equal arguments gave '0.*and '0.*must come from the seed"),
        ("Missing", "module 'user_checked' has no class 'Missing'"),
    ],
)
def test_a_reset_that_cannot_begin_a_group_is_refused(configured, name, message):
    with pytest.raises(ConfigError, match=f"^task.environment = 'user_checked:{name}'.*{message}"):
        first_observation(configured(f"user_checked:{name}"), Problem("p", {}))


@pytest.mark.parametrize(
    ("name", "message"),
    [("Empty", "makes no token of the prompt ''"), ("Long", "a prompt of 600 tokens, which with .* of 512; lower it")],
)
def test_a_first_observation_that_the_model_cannot_read_is_refused(configured, name, message):
    with pytest.raises(ConfigError, match=message):
        check(configured(f"user_checked:{name}"))


def test_a_model_without_a_chat_template_is_refused(configured):
    with pytest.raises(ConfigError, match="chat template does not fit several turns: it cannot be rendered"):
        check(configured("user_checked:Good", chat=True))


def test_the_launcher_checks_in_a_process_of_its_own_and_passes_the_sentence_on(configured, tmp_path):
    env = preflight.child_environment(os.environ, tmp_path)
    assert check_environment(configured("user_checked:Good"), env) == (
        "user_checked:Good: an episode begins with 4 tokens"
    )
    with pytest.raises(ConfigError, match=r"^task.environment = 'user_checked:Raises': reset .* division by zero$"):
        check_environment(configured("user_checked:Raises"), env)
    with pytest.raises(AsyncRLError, match="interrupted"):
        check_environment(configured("user_checked:Good"), env, lambda: True)
