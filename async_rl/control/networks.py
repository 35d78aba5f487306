"""Actor and critic: observation groups in, distribution or value out.

obs/GROUP ─► observe ─► normalizer ─► [rnn] ─► mlp ─► features [.., F] ─┬─► head ─► Distribution      (actor)
                                                                        └─► head ─► value             (critic)

Without recurrence ``step`` and ``sequence`` are the same function on any leading axes and the state is empty. Layers
and their initialisation are torch's own, so that weights of rsl_rl's models fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from async_rl.config import ControlConfig
from async_rl.control.distributions import Categorical, Distribution, Gaussian
from async_rl.control.normalizer import Normalizer
from async_rl.control.recurrence import State, reset_state, run_sequence, run_step
from async_rl.control.spaces import Action, Spaces
from async_rl.errors import ConfigError

__all__ = ["Actor", "Critic", "Encoder", "State", "build_actor", "build_critic", "reset_state"]

_STD_MIN, _STD_MAX = 1e-6, 1e6


class Encoder(nn.Module):
    """A recurrent layer where the configuration has one, then the hidden layers of an MLP.

    Args:
        config: of the run.
        size: D, numbers of its input.
        hidden: widths of the layers.
    """

    def __init__(self, config: ControlConfig, size: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        policy = config.policy
        self.rnn: nn.GRU | nn.LSTM | None = None
        if config.is_recurrent:
            # cuDNN's default for recurrent layers keeps 10 bits of each factor: actor and learner, which call them with
            # other shapes or on other devices, would disagree about log-probabilities.
            torch.backends.cudnn.allow_tf32 = False
            kind = nn.GRU if policy.network == "gru" else nn.LSTM
            self.rnn = kind(size, policy.rnn_hidden, policy.rnn_layers)
            size = policy.rnn_hidden
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(size, width), make_activation(policy.activation)]
            size = width
        self.mlp = nn.Sequential(*layers)
        self.output_size = size
        """F, numbers of a feature."""


class _Network(nn.Module):
    """What actor and critic have in common."""

    normalizer: nn.Module
    encoder: Encoder | None

    def __init__(self, groups: tuple[str, ...]) -> None:
        super().__init__()
        self.groups = groups
        """Observation groups that it reads, in this order."""

    @property
    def is_recurrent(self) -> bool:
        """Whether it carries a state from step to step."""
        return self.encoder is not None and self.encoder.rnn is not None

    def observe(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Its groups, concatenated: float32 [.., D]. One float32 group alone is not copied."""
        parts = [obs[group].float() for group in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def initial_state(self, num_envs: int, device: torch.device) -> State:
        """State before an episode's first step: zeros, or nothing where there is no recurrence."""
        rnn = self.encoder.rnn if self.encoder is not None else None
        if rnn is None:
            return ()
        count = 2 if isinstance(rnn, nn.LSTM) else 1
        return tuple(torch.zeros(rnn.num_layers, num_envs, rnn.hidden_size, device=device) for _ in range(count))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Features [.., F] of observations [.., D], for networks without recurrence."""
        encoder = self._own_encoder()
        assert encoder.rnn is None, "a recurrent network needs its state: use step or sequence"
        features: torch.Tensor = encoder.mlp(self.normalizer(x))
        return features

    def step(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step of N environments.

        Args:
            x: float32 [N, D], from :meth:`observe`.
            state: before it, already zero where an episode begins (:func:`reset_state`).

        Returns:
            Features [N, F] and the state after it.
        """
        rnn = self._own_encoder().rnn
        if rnn is None:
            return self.features(x), ()
        hidden, state = run_step(rnn, self.normalizer(x), state)
        return self._own_encoder().mlp(hidden), state

    def sequence(self, x: torch.Tensor, state: State, resets: torch.Tensor) -> tuple[torch.Tensor, State]:
        """T steps of N environments; gradients flow back through time and stop where an episode begins.

        Args:
            x: float32 [T, N, D]
            state: before the first step.
            resets: bool [T, N], an episode begins with this step: its state is zero.

        Returns:
            Features [T, N, F] and the state after the last step; the same as stepping one by one.
        """
        rnn = self._own_encoder().rnn
        if rnn is None:
            return self.features(x), ()
        hidden, state = run_sequence(rnn, self.normalizer(x), state, resets)
        return self._own_encoder().mlp(hidden), state

    def _own_encoder(self) -> Encoder:
        assert self.encoder is not None, "a critic with a shared encoder reads the actor's features"
        return self.encoder


class Actor(_Network):
    """The policy.

    Args:
        config: of the run; ``policy.network`` is no transformer.
        spaces: of the environment.

    Raises:
        ConfigError: an observation group does not exist or is not flat.
    """

    def __init__(self, config: ControlConfig, spaces: Spaces) -> None:
        super().__init__(config.groups_of("actor"))
        size = spaces.size_of(self.groups)
        self.input_size = size
        """D, numbers of an observation."""
        self.action = spaces.action
        self.normalizer = make_normalizer(config, size)
        self.encoder = Encoder(config, size, config.policy.hidden)
        self.head = nn.Linear(self.encoder.output_size, _head_size(spaces.action, config.policy.std))
        self.std: nn.Parameter | None = None
        """``policy.std = "scalar"``: deviation [A]."""
        self.log_std: nn.Parameter | None = None
        """``policy.std = "log"``: its logarithm [A]."""
        if spaces.action.kind == "continuous":
            self._make_std(config.policy.std, config.policy.init_std)

    def distribution(self, features: torch.Tensor) -> Distribution:
        """Distribution of the action, given features [.., F]."""
        return self.distribution_of(self.head(features))

    def distribution_of(self, out: torch.Tensor) -> Distribution:
        """The same, given outputs of the head [.., O]."""
        if self.action.kind == "discrete":
            return Categorical(out, self.action.choices)
        if self.std is not None:
            return Gaussian(out, _bounded(self.std, _STD_MIN, _STD_MAX))
        log_std = self.log_std
        if log_std is None:
            out, log_std = out.chunk(2, -1)
        return Gaussian(out, _bounded(log_std, math.log(_STD_MIN), math.log(_STD_MAX)).exp())

    def _make_std(self, kind: str, init_std: float) -> None:
        size = self.action.size
        if kind == "scalar":
            self.std = nn.Parameter(torch.full((size,), init_std))
        elif kind == "log":
            self.log_std = nn.Parameter(torch.full((size,), math.log(init_std)))
        else:  # the second half of the head
            with torch.no_grad():
                self.head.weight[size:] = 0
                self.head.bias[size:] = math.log(init_std)


class Critic(_Network):
    """The value of a state.

    Args:
        config: of the run.
        spaces: of the environment.
        actor: whose features it reads where ``policy.encoder = "shared"``.

    Raises:
        ConfigError: an observation group does not exist or is not flat.
    """

    def __init__(self, config: ControlConfig, spaces: Spaces, actor: Actor) -> None:
        shared = config.policy.encoder == "shared"
        super().__init__(actor.groups if shared else config.groups_of("critic"))
        self.shared = shared
        if self.shared:
            self.normalizer, self.encoder = nn.Identity(), None
            width = actor.head.in_features
        else:
            size = spaces.size_of(self.groups)
            self.normalizer = make_normalizer(config, size)
            self.encoder = Encoder(config, size, config.policy.critic_hidden or config.policy.hidden)
            width = self.encoder.output_size
        self.head = nn.Linear(width, 1)

    def value(self, features: torch.Tensor) -> torch.Tensor:
        """Values [..], given features [.., F]: its own, or the actor's where ``shared``."""
        value: torch.Tensor = self.head(features)
        return value.squeeze(-1)


def build_actor(config: ControlConfig, spaces: Spaces) -> Actor:
    """The policy that a configuration asks for.

    Raises:
        ConfigError: it does not fit the environment.
    """
    if config.policy.network == "transformer":
        from async_rl.control.vla import build_vla_actor  # a module of its own that builds on this one

        return build_vla_actor(config, spaces)
    return Actor(config, spaces)


def build_critic(config: ControlConfig, spaces: Spaces, actor: Actor) -> Critic:
    """The critic beside it.

    Raises:
        ConfigError: it does not fit the environment.
    """
    return Critic(config, spaces, actor)


def make_normalizer(config: ControlConfig, size: int) -> nn.Module:
    """A :class:`Normalizer`, or nothing where ``policy.normalize`` is off."""
    return Normalizer(size) if config.policy.normalize else nn.Identity()


def make_activation(name: str) -> nn.Module:
    """The activation of a hidden layer; in place where its gradient needs the output only."""
    match name:
        case "elu":
            return nn.ELU(inplace=True)
        case "relu":
            return nn.ReLU(inplace=True)
        case "selu":
            return nn.SELU(inplace=True)
        case "leaky_relu":
            return nn.LeakyReLU(inplace=True)
        case "tanh":
            return nn.Tanh()
        case "gelu":
            return nn.GELU()
        case "silu":
            return nn.SiLU()
    raise ConfigError(f"policy.activation = {name!r} is none of elu, relu, selu, leaky_relu, tanh, gelu, silu")


def _bounded(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Keep x within bounds, with the gradient that it has inside: what has left them could never come back else."""
    bounded = x.clamp(low, high)
    return bounded.detach() + (x - x.detach()) if torch.is_grad_enabled() else bounded


def _head_size(action: Action, std: str) -> int:
    """Outputs of the actor's head."""
    if action.kind == "discrete":
        return sum(action.choices)
    return 2 * action.size if std == "state" else action.size
