"""Held-out evaluation of a language model: greedy answers of the embedded engine, each time with one pinned version.

The loop is in evaluator.py, the questions in exam.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.engines.factory import make_engine
from actors.evaluation.evaluator import Evaluator, Result
from actors.evaluation.exam import Exam, judged_by_verifier, make_exam
from actors.players.factory import Setting
from actors.process import command_line, joined
from async_rl.config import load_config
from async_rl.data import is_correct
from async_rl.models import resolve_model
from async_rl.process import run_guarded
from async_rl.tasks import load_task


def examine(exam: Exam, between: Callable[[], None]) -> Result:
    """Take the exam; its marks as metrics."""
    marks = exam.take(between)
    metrics = {
        "accuracy": float(is_correct(np.asarray(marks.rewards)).mean()),
        "reward": float(np.mean(marks.rewards)),
        "problems": len(marks.rewards),
        **marks.metrics,
    }
    return Result(metrics, marks.samples)


def main() -> None:
    """Parse the command line, build the parts, evaluate until stopped."""
    args = command_line("held-out evaluation", "evaluator").parse_args()
    config = load_config(args.config)
    # the embedded engine always: greedy answers need neither a second vLLM nor its start-up
    embedded = config.model_copy(
        update={"actors": config.actors.model_copy(update={"engine": "torch", "slots": min(config.actors.slots, 256)})}
    )
    with joined("evaluator", config, args.connect, args.name) as process:
        folder = resolve_model(config.model.path)
        data = load_task(config.task, config.seed)
        setting = Setting(
            config=judged_by_verifier(config), folder=folder, verifier=data.verifier, search=Path(args.config).parent
        )
        engine = process.parts.enter_context(contextlib.closing(make_engine(embedded, folder, args.name)))
        exam = make_exam(setting, engine, data.heldout[: config.eval.problems])
        process.parts.callback(exam.close)
        examined = functools.partial(examine, exam)
        evaluator = Evaluator(config, process.client, engine, process.receiver(), examined, process.timer)
        evaluator.run(process.manifest, process.welcome["start_version"])


if __name__ == "__main__":
    run_guarded(main)
