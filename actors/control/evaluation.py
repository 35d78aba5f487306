"""Evaluation of a control run: ``python -m actors.control.evaluation CONFIG.toml --connect tcp://HOST:PORT``.

The loop is :mod:`actors.evaluation.evaluator`, what is played :mod:`actors.control.exams`.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys

from actors.control.environments.quiet_end import no_quiet_end
from actors.control.environments.seeds import process_seed
from actors.control.exams import HeldOutStarts, PlayedEpisodes, split_episodes
from actors.control.main import make_gatherer, make_player
from actors.control.policy import Policy
from actors.evaluation.evaluator import Evaluator, Exam
from actors.main import CONNECT_TIMEOUT_S
from actors.receiver import Receiver
from async_rl.client import Client
from async_rl.config import ControlConfig, load_control
from async_rl.curve import ClientKeys
from async_rl.process import run_guarded
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest


def make_exam(config: ControlConfig, name: str, stack: contextlib.ExitStack) -> tuple[Policy, Exam]:
    """The policy that is examined, and the exam.

    Args:
        config: of the run.
        name: of this process.
        stack: closes the environments.

    Raises:
        ConfigError: the environment cannot be made, or the networks do not fit it.
    """
    seed = process_seed(config.seed, name)
    if config.algorithm.name == "grpo":
        # one episode of each start: greedily, all of a group would be the same
        alone = config.model_copy(update={"episodes": config.episodes.model_copy(update={"group_size": 1})})
        environment, policy = make_player(alone, 1, seed, name, greedy=True)
        exam = HeldOutStarts(alone, make_gatherer(alone, environment, policy, seed)).examine
    else:
        num_envs, each = split_episodes(config.eval.episodes)
        environment, policy = make_player(config, num_envs, seed, name, greedy=True)
        exam = PlayedEpisodes(config, environment, policy, each, seed).examine
    stack.callback(environment.close)
    return policy, exam


def main() -> None:
    """Parse the command line, build the parts, evaluate until stopped."""
    parser = argparse.ArgumentParser(description="evaluation of a policy that controls environments")
    parser.add_argument("config")
    parser.add_argument("--connect", required=True, help="address of the buffer server, tcp://HOST:PORT")
    parser.add_argument("--name", default="evaluator")
    args = parser.parse_args()
    config = load_control(args.config)
    timer = StateTimer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keys = ClientKeys.of(config.buffer.keys)
    with Client(args.connect, "evaluator", args.name, config.contract_hash(), keys=keys) as client:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        client.beat_info = lambda: {"timer": timer.drain()}
        welcome = client.connect(CONNECT_TIMEOUT_S)
        with no_quiet_end(config.env.id), contextlib.ExitStack() as stack:
            policy, exam = make_exam(config, args.name, stack)
            receiver = Receiver(config.weights.path, lambda: client.weights_address, welcome["run_id"], keys=keys)
            stack.callback(receiver.close)
            manifest = welcome.get("manifest")
            Evaluator(config, client, policy, receiver, exam, timer).run(
                Manifest.from_wire(manifest) if manifest else None, welcome["start_version"]
            )


if __name__ == "__main__":
    run_guarded(main)
