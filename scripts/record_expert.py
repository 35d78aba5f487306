"""Record the transitions of a trained policy, as the expert whom ``amp`` imitates.

checkpoint ─► Actor ─┐
                     ├─► (s, s') inside episodes ─► OUT.safetensors: states, next_states [M, D] ─► amp.expert
env.id ─► N at once ─┘

python scripts/record_expert.py RUN_OR_CHECKPOINT OUT.safetensors --transitions 20000
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from actors.control.collector import restarts
from actors.control.environments.base import Environment, Step
from actors.control.environments.factory import make_environment
from async_rl.control.checkpoint import load_actor
from async_rl.control.networks import Actor, reset_state
from async_rl.errors import AsyncRLError, ConfigError
from learner.control.transitions import join_groups


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="run folder or checkpoint folder of a control run")
    parser.add_argument("out", type=Path, help="file to write, .safetensors")
    parser.add_argument("--transitions", type=int, default=20_000, help="M")
    parser.add_argument("--group", action="append", help="observation group; repeat for several (default: of the run)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments that are stepped together")
    parser.add_argument("--sample", action="store_true", help="sample actions in place of the most likely ones")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        record(arguments)
    except (AsyncRLError, OSError) as error:
        print(f"record_expert: {error}", file=sys.stderr)
        return 2
    return 0


def record(arguments: argparse.Namespace) -> None:
    """Play and write the file.

    Raises:
        ConfigError: no checkpoint, no environment, other spaces than the policy was trained with, or no such group.
    """
    config, spaces, actor = load_actor(arguments.checkpoint)
    groups = tuple(arguments.group or config.groups_of("discriminator"))
    width = spaces.size_of(groups)
    if arguments.transitions < 1 or arguments.num_envs < 1:
        raise ConfigError("--transitions and --num-envs must be at least 1")
    env = make_environment(config, arguments.num_envs, arguments.seed, "expert")
    try:
        if env.spaces.observations != spaces.observations or env.spaces.action != spaces.action:
            raise ConfigError(f"env.id = {config.env.id!r} has other spaces here than when the policy was trained")
        states, next_states, returns = play(
            env, actor.to(env.device), groups, arguments.transitions, arguments.seed, sample=arguments.sample
        )
    finally:
        env.close()
    save_file({"states": states, "next_states": next_states}, arguments.out, {"env": config.env.id})
    done = f"{len(returns)} episodes, mean return {returns.mean():.1f}" if len(returns) else "no episode ended"
    print(f"{arguments.out}: {len(states)} transitions of {width} numbers ({', '.join(groups)}); {done}")


@torch.inference_mode()
def play(
    env: Environment, actor: Actor, groups: tuple[str, ...], count: int, seed: int, *, sample: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step until there are enough transitions.

    Args:
        env: N environments.
        actor: on their device.
        groups: observation groups of a state.
        count: M
        seed: of starts and actions.
        sample: take sampled actions, not the most likely ones.

    Returns:
        States and next states, float32 [M, D] on the CPU, in the order in which they happened, and the returns of the
        episodes that ended.
    """
    generator = torch.Generator(env.device).manual_seed(seed)
    obs, state = env.reset(seed), actor.initial_state(env.num_envs, env.device)
    resets: torch.Tensor | None = None
    running = torch.zeros(env.num_envs, device=env.device)
    found, returns, total = [], [], 0
    while total < count:
        before = join_groups(obs, groups).clone()
        features, state = actor.step(actor.observe(obs), state)
        distribution = actor.distribution(features)
        actions = distribution.sample(generator) if sample else distribution.mode()
        step = env.step(actions if env.spaces.action.kind == "continuous" else actions.int())
        after, known = outcome(step, groups, resets)
        found.append(torch.stack((before[known], after[known]), dim=1).cpu())
        total += len(found[-1])
        ended = step.terminated | step.truncated
        running = running + (step.rewards if resets is None else step.rewards * ~resets)
        returns.append(running[ended].cpu())
        running = running * ~ended
        if state:
            state = reset_state(state, restarts(step, resets))
        obs, resets = step.observations, None if step.resets_next is None else step.resets_next.clone()
    pairs = torch.cat(found)[:count]
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), torch.cat(returns)


def outcome(step: Step, groups: tuple[str, ...], resets: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What followed each environment's state [N, D], and where that is known and no reset: bool [N].

    The same rule as the learner's, :func:`learner.control.transitions.transitions_of`.
    """
    after = join_groups(step.observations, groups).clone()
    known = ~(step.terminated | step.truncated)
    if step.resets_next is not None:
        known |= step.resets_next
    if step.final_observations is not None:
        after[step.truncated] = join_groups(step.final_observations, groups)
        known |= step.truncated
    return after, known if resets is None else known & ~resets


if __name__ == "__main__":
    sys.exit(main())
