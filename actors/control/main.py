"""One control actor: ``python -m actors.control.main CONFIG.toml --connect tcp://HOST:PORT --name actor0``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time

from actors.control.collector import Collector, Gatherer
from actors.control.environments.base import Environment
from actors.control.environments.factory import GYMNASIUM, make_environment
from actors.control.environments.quiet_end import no_quiet_end
from actors.control.environments.seeds import life_seed
from actors.control.policy import Policy
from actors.control.rollout import Rollout
from actors.main import CONNECT_TIMEOUT_S, report
from actors.receiver import Receiver
from async_rl.client import Client
from async_rl.config import ControlConfig, load_control
from async_rl.curve import ClientKeys
from async_rl.models import device_for
from async_rl.process import run_guarded
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest


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
    parser = argparse.ArgumentParser(description="one rollout actor that controls environments")
    parser.add_argument("config")
    parser.add_argument("--connect", required=True, help="address of the buffer server, tcp://HOST:PORT")
    parser.add_argument("--name", default=f"actor-{os.getpid()}")
    args = parser.parse_args()
    config = load_control(args.config)
    num_envs = config.group_size if config.algorithm.name == "grpo" else config.env.num_envs
    timer = StateTimer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher turns Ctrl-C into an orderly stop
    keys = ClientKeys.of(config.buffer.keys)
    with Client(args.connect, "actor", args.name, config.contract_hash(), keys=keys) as client:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        client.beat_info = lambda: {"timer": timer.drain()}
        welcome = client.connect(CONNECT_TIMEOUT_S)
        seed = life_seed(config.seed, args.name, welcome["next_step"], welcome["life"])
        with no_quiet_end(config.env.id), contextlib.ExitStack() as stack:
            environment, policy = make_player(config, num_envs, seed, args.name)
            stack.callback(environment.close)
            receiver = Receiver(config.weights.path, lambda: client.weights_address, welcome["run_id"], keys=keys)
            stack.callback(receiver.close)
            rollout = Rollout(
                config=config,
                name=args.name,
                client=client,
                policy=policy,
                receiver=receiver,
                gatherer=make_gatherer(config, environment, policy, seed),
                timer=timer,
            )
            client.beat_info = lambda: {
                "timer": timer.drain(),
                "in_flight": rollout.in_flight(),
                "info": rollout.info(),
            }
            manifest = welcome.get("manifest")
            began = time.monotonic()
            stop = rollout.run(Manifest.from_wire(manifest) if manifest else None)
    report(args.name, stop, time.monotonic() - began, rollout.counts)


if __name__ == "__main__":
    run_guarded(main)
