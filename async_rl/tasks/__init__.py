"""Tasks: problems to train on, problems held out, and the function that scores answers. No torch is imported here.

    TaskConfig ──► load_task ──► TaskData(train, heldout, verifier)
                                    │ encode_prompt ──► token ids ──► engine ──► decode_completion ──► verifier

A built-in task is a file with ``problems(...)``; its answers are scored by a pure function in the same form that users
write: ``f(prompts, completions, **columns) -> list[float]``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from async_rl.errors import ConfigError
from async_rl.tasks import addition, countdown, exact, reasoning_gym, sorting, table
from async_rl.tasks.environments import environment_problems
from async_rl.tasks.problem import Problem, TaskData, hold_out

if TYPE_CHECKING:
    from async_rl.config import TaskConfig

__all__ = ["Problem", "TaskData", "load_task"]


def load_task(task: TaskConfig, seed: int, env: Mapping[str, str] | None = None) -> TaskData:
    """Build the problems that ``task`` asks for.

    Which problems are held out depends on the task alone, never on ``seed``: every run is measured on the same ones.
    The seed orders the training problems.

    Args:
        task: what is asked for.
        seed: of the run.
        env: environment of the process that lists the problems of a user's class; None: this one's.

    Raises:
        ConfigError: the data file or a setting of the task is wrong.
    """
    keyed: list[tuple[object, Problem]]
    verifier = exact.VERIFIER
    if task.environment and not task.data:
        keyed = list(environment_problems(task.environment, task.digits, env))
    elif task.name == "addition":
        keyed = list(addition.problems(task.digits))
    elif task.name == "sorting":
        keyed = list(sorting.problems(task.digits))
    elif task.name == "countdown":
        keyed, verifier = list(countdown.problems(task.digits)), countdown.VERIFIER
    elif task.name == "reasoning_gym":
        keyed, verifier = list(reasoning_gym.problems(task.dataset)), reasoning_gym.verifier(task.dataset)
    else:
        needs_answer = not (task.verifier or task.environment)
        keyed = list(table.problems(task.data, needs_answer=needs_answer, chat=task.chat))
    train, heldout = hold_out(keyed, task.holdout)
    if not train or not heldout:
        setting = "data" if task.data else "environment" if task.environment else "digits"
        raise ConfigError(
            f"task.{setting} = {getattr(task, setting)!r}: {len(keyed)} problems are too few to hold some out; give at "
            "least five different ones"
        )
    random.Random(f"train-order-{seed}").shuffle(train)
    return TaskData(train=train, heldout=heldout, verifier=task.verifier or verifier)
