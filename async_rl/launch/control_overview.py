"""What a control run's settings mean together: samples, updates, networks, bytes per weight sync. Rows of the table.

config, Spaces ─► Networks (parameters, published bytes) ─► rows          nothing here imports torch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.config import ControlConfig
from async_rl.control.spaces import Action, Spaces
from async_rl.units import format_bytes

_ALIGN = 32
"""Numbers to whose multiple each tensor of a published version is rounded up."""
_GATES = {"gru": 3, "lstm": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """Sizes of actor and critic."""

    inputs: int
    """Numbers that the actor reads."""
    outputs: int
    """Numbers of an action's distribution that depend on the state."""
    policy: int | None
    """Parameters of the actor; None: known once it is built (``transformer``)."""
    critic: int
    """Parameters of the critic, 0 without one."""
    published_bytes: int | None
    """Bytes of one version."""


def describe_networks(config: ControlConfig, spaces: Spaces) -> Networks:
    """Count without building.

    Raises:
        ConfigError: an observation group does not exist or is not flat.
    """
    outputs = _outputs(spaces.action, config.policy.std)
    if config.policy.network == "transformer":
        inputs = sum(spaces.observations[group].size for group in config.groups_of("actor"))
        return Networks(inputs=inputs, outputs=outputs, policy=None, critic=0, published_bytes=None)
    inputs = spaces.size_of(config.groups_of("actor"))
    actor = _encoder(config, inputs, config.policy.hidden) + _linear(config.policy.hidden[-1:], config, outputs)
    if spaces.action.kind == "continuous" and config.policy.std != "state":
        actor.append(spaces.action.size)
    statistics = [inputs, inputs, 1] if config.policy.normalize else []
    critic, shipped = _critic(config, spaces), [*actor, *statistics]
    if critic and config.is_recurrent and config.policy.encoder == "separate":  # the actors carry its hidden state
        size = spaces.size_of(config.groups_of("critic"))
        shipped += critic + ([size, size, 1] if config.policy.normalize else [])
    return Networks(
        inputs=inputs,
        outputs=outputs,
        policy=sum(actor),
        critic=sum(critic),
        published_bytes=4 * sum(-(-numel // _ALIGN) * _ALIGN for numel in shipped),
    )


def rows(config: ControlConfig, spaces: Spaces) -> list[tuple[str, str]]:
    """Name and text of each line; numbers of the whole run, over all actors and ranks."""
    networks = describe_networks(config, spaces)
    size = "" if networks.published_bytes is None else f"{format_bytes(networks.published_bytes)} a version "
    return [
        ("environment", f"{config.env.id}, {_observations(spaces)}, {_actions(spaces.action)}"),
        ("effective batch", f"{_batch(config)}, {_updates(config)}"),
        ("tickets in flight", f"at most {(config.buffer.max_staleness + 1) * config.buffer.groups_per_step:,}"),
        ("staleness", _staleness(config)),
        ("policy", _policy(config, networks)),
        ("weight sync", f"{size}over {config.weights.path}"),
        ("actors", f"{config.actors.count} × {_environments(config)}"),
        ("learner", _learner(config)),
    ]


def _batch(config: ControlConfig) -> str:
    groups = config.buffer.groups_per_step
    if config.algorithm.name == "grpo":
        episodes = config.episodes
        total = groups * episodes.group_size
        return f"{groups} starts × {episodes.group_size} = {total:,} episodes of at most {episodes.max_steps} steps"
    env = config.env
    fragments = f"{groups} fragment{'' if groups == 1 else 's'}"
    samples = groups * env.num_envs * env.horizon
    return f"{fragments} × {env.num_envs} environments × {env.horizon} steps = {samples:,} environment steps"


def _updates(config: ControlConfig) -> str:
    algorithm = config.algorithm
    total = algorithm.epochs * algorithm.minibatches
    return f"{total} update{'' if total == 1 else 's'} a step ({algorithm.epochs} × {algorithm.minibatches})"


def _staleness(config: ControlConfig) -> str:
    eta = config.buffer.max_staleness
    expected = f"{eta}" if eta < 2 else f"1 while the learner waits, {eta} while actors are ahead"
    return f"expected {expected}; largest possible {eta}"


def _policy(config: ControlConfig, networks: Networks) -> str:
    policy = config.policy
    if networks.policy is None:
        return policy.network
    recurrent = f"{policy.network} {policy.rnn_layers} × {policy.rnn_hidden}, " if config.is_recurrent else ""
    widths = " × ".join(map(str, (networks.inputs, *policy.hidden, networks.outputs)))
    critic = f"; critic {networks.critic:,}" if networks.critic else ""
    normal = ", observations normalised" if policy.normalize else ""
    return f"{recurrent}{widths} {policy.activation}, {networks.policy:,} parameters{critic}{normal}"


def _environments(config: ControlConfig) -> str:
    if config.algorithm.name == "grpo":
        return f"{config.episodes.group_size} environments"
    return f"{config.env.num_envs} environments"


def _learner(config: ControlConfig) -> str:
    ranks, extras = config.learner.ranks, []
    if config.rnd.weight > 0:
        extras.append("RND")
    if config.amp.style_weight > 0:
        extras.append("AMP")
    if config.symmetry.function:
        extras.append("symmetry")
    parts = [f"{ranks} rank{'' if ranks == 1 else 's'}", f"lr {config.learner.lr:g} ({config.learner.lr_schedule})"]
    return ", ".join([*parts, " + ".join([config.algorithm.name, *extras])])


def _observations(spaces: Spaces) -> str:
    return ", ".join(f"{name} {list(o.shape)}" for name, o in spaces.observations.items())


def _actions(action: Action) -> str:
    if action.kind == "continuous":
        return f"{action.size} continuous action{'' if action.size == 1 else 's'}"
    return f"{' × '.join(map(str, action.choices))} choices"


def _outputs(action: Action, std: str) -> int:
    if action.kind == "discrete":
        return sum(action.choices)
    return 2 * action.size if std == "state" else action.size


def _critic(config: ControlConfig, spaces: Spaces) -> list[int]:
    """Numbers of each tensor of the critic."""
    if config.algorithm.name != "ppo":
        return []
    if config.policy.encoder == "shared":
        return _linear(config.policy.hidden[-1:], config, 1)
    hidden = config.policy.critic_hidden or config.policy.hidden
    return _encoder(config, spaces.size_of(config.groups_of("critic")), hidden) + _linear(hidden[-1:], config, 1)


def _encoder(config: ControlConfig, size: int, hidden: Sequence[int]) -> list[int]:
    """Numbers of each tensor of a recurrent layer, where there is one, and of the hidden layers."""
    tensors: list[int] = []
    if config.is_recurrent:
        gates, width = _GATES[config.policy.network], config.policy.rnn_hidden
        for layer in range(config.policy.rnn_layers):
            inputs = size if layer == 0 else width
            tensors += [gates * width * inputs, gates * width * width, gates * width, gates * width]
        size = width
    for width in hidden:
        tensors += [size * width, width]
        size = width
    return tensors


def _linear(last: Sequence[int], config: ControlConfig, outputs: int) -> list[int]:
    """Numbers of weight and bias of a head on the last hidden layer."""
    inputs = last[0] if last else config.policy.rnn_hidden
    return [inputs * outputs, outputs]
