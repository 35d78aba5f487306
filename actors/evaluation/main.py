"""Held-out evaluation of a language model: greedy answers of the embedded engine, each time with one pinned version.

The loop is in evaluator.py, the questions in exam.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.engines.factory import make_engine
from actors.evaluation.evaluator import Evaluator, Result
from actors.evaluation.exam import Exam, judged_by_verifier, make_exam
from actors.main import CONNECT_TIMEOUT_S
from actors.players.factory import Setting
from actors.receiver import Receiver
from async_rl.client import Client
from async_rl.config import load_config
from async_rl.curve import ClientKeys
from async_rl.data import is_correct
from async_rl.models import resolve_model
from async_rl.process import run_guarded
from async_rl.tasks import load_task
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest


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
    parser = argparse.ArgumentParser(description="held-out evaluation")
    parser.add_argument("config")
    parser.add_argument("--connect", required=True, help="address of the buffer server, tcp://HOST:PORT")
    parser.add_argument("--name", default="evaluator")
    args = parser.parse_args()
    config = load_config(args.config)
    # the embedded engine always: greedy answers need neither a second vLLM nor its start-up
    embedded = config.model_copy(
        update={"actors": config.actors.model_copy(update={"engine": "torch", "slots": min(config.actors.slots, 256)})}
    )
    timer = StateTimer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keys = ClientKeys.of(config.buffer.keys)
    with Client(args.connect, "evaluator", args.name, config.contract_hash(), keys=keys) as client:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        client.beat_info = lambda: {"timer": timer.drain()}
        welcome = client.connect(CONNECT_TIMEOUT_S)
        folder = resolve_model(config.model.path)
        data = load_task(config.task, config.seed)
        setting = Setting(
            config=judged_by_verifier(config), folder=folder, verifier=data.verifier, search=Path(args.config).parent
        )
        with contextlib.ExitStack() as stack:
            engine = make_engine(embedded, folder, args.name)
            stack.callback(engine.close)
            exam = make_exam(setting, engine, data.heldout[: config.eval.problems])
            stack.callback(exam.close)
            receiver = Receiver(config.weights.path, lambda: client.weights_address, welcome["run_id"], keys=keys)
            stack.callback(receiver.close)
            manifest = welcome.get("manifest")
            Evaluator(config, client, engine, receiver, functools.partial(examine, exam), timer).run(
                Manifest.from_wire(manifest) if manifest else None, welcome["start_version"]
            )


if __name__ == "__main__":
    run_guarded(main)
