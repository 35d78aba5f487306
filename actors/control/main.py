"""One control actor: ``python -m actors.control.main CONFIG.toml --connect tcp://HOST:PORT --name actor0``."""

from __future__ import annotations

import os

from actors.control.collector import Collector, Gatherer
from actors.control.environments.base import Environment
from actors.control.environments.factory import GYMNASIUM, make_environment
from actors.control.environments.quiet_end import no_quiet_end
from actors.control.environments.seeds import life_seed
from actors.control.policy import Policy
from actors.control.rollout import Rollout
from actors.process import command_line, joined
from async_rl.config import ControlConfig, load_control
from async_rl.models import device_for
from async_rl.process import run_guarded


def make_player(
    config: ControlConfig, num_envs: int, seed: int, name: str, *, greedy: bool = False
) -> tuple[Environment, Policy]:
    """Environments of this process and the policy that steps them.

    Args:
        config: of the run.
        num_envs: N.
        seed: of this life of the process.
        name: of the process.
        greedy: the policy takes the most likely action.

    Raises:
        ConfigError: the environment cannot be made, or the networks do not fit it.
    """
    device = device_for(config.policy.device, 0)
    # what gymnasium computes lies on the CPU; a class of the user's may compute where the policy does
    environment = make_environment(
        config, num_envs, seed, name, "cpu" if config.env.id.startswith(GYMNASIUM) else device
    )
    return environment, Policy(config, environment.spaces, device, greedy=greedy)


def make_gatherer(config: ControlConfig, environment: Environment, policy: Policy, seed: int) -> Gatherer:
    """What turns tickets into groups: fragments, or whole episodes (``grpo``)."""
    if config.algorithm.name == "grpo":
        from actors.control.episodes import EpisodeCollector

        return EpisodeCollector(config, environment, policy)
    return Collector(config, environment, policy, seed)


def main() -> None:
    """Parse the command line, build the parts, roll out until stopped."""
    args = command_line("one rollout actor that controls environments", f"actor-{os.getpid()}").parse_args()
    config = load_control(args.config)
    num_envs = config.group_size if config.algorithm.name == "grpo" else config.env.num_envs
    with joined("actor", config, args.connect, args.name) as process:
        seed = life_seed(config.seed, args.name, process.welcome["next_step"], process.welcome["life"])
        process.parts.enter_context(no_quiet_end(config.env.id))
        environment, policy = make_player(config, num_envs, seed, args.name)
        process.parts.callback(environment.close)
        rollout = Rollout(
            config=config,
            name=args.name,
            client=process.client,
            policy=policy,
            receiver=process.receiver(relays=True),
            gatherer=make_gatherer(config, environment, policy, seed),
            timer=process.timer,
        )
        process.run(rollout, lambda: rollout.run(process.manifest))


if __name__ == "__main__":
    run_guarded(main)
