"""Evaluation of a control run: ``python -m actors.control.evaluation CONFIG.toml --connect tcp://HOST:PORT``.

The loop is :mod:`actors.evaluation.evaluator`, what is played :mod:`actors.control.exams`.
"""

from __future__ import annotations

import contextlib

from actors.control.environments.quiet_end import no_quiet_end
from actors.control.environments.seeds import process_seed
from actors.control.exams import HeldOutStarts, PlayedEpisodes, split_episodes
from actors.control.main import make_gatherer, make_player
from actors.control.policy import Policy
from actors.evaluation.evaluator import Evaluator, Exam
from actors.process import command_line, joined
from async_rl.config import ControlConfig, load_control
from async_rl.process import run_guarded


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
    args = command_line("evaluation of a policy that controls environments", "evaluator").parse_args()
    config = load_control(args.config)
    with joined("evaluator", config, args.connect, args.name) as process:
        process.parts.enter_context(no_quiet_end(config.env.id))
        policy, exam = make_exam(config, args.name, process.parts)
        evaluator = Evaluator(config, process.client, policy, process.receiver(), exam, process.timer)
        evaluator.run(process.manifest, process.welcome["start_version"])


if __name__ == "__main__":
    run_guarded(main)
