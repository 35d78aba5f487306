"""A small vision-language-action policy: a transformer that reads images and an instruction and writes action tokens.

    image [H, W, 3] ──patches──►┐                                    ┌─► head 0 ─► part 0 ─┐
    instruction [L] ──embed────►├ prefix ─► layers ─► keys, values ─►├─► head 1 ─► part 1 ◄┘─┐
    numbers [D] ─────linear────►┘ (sees all of itself)   of each     └─► head 2 ─► part 2 ◄──┘
                                                                       (sees the prefix and the parts before)

The probability of an action is a product over its parts, p(a) = Π p(a_i | observation, a_<i), as in RT-2 (Brohan et al.
2023, arXiv:2307.15818). The network is used as :class:`async_rl.control.networks.Actor` is; its features are the keys
and values of the prefix; its distribution, :class:`ActionTokens`, writes the parts one by one and judges them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from async_rl.config.control import ControlConfig
from async_rl.control.distributions import Categorical
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.errors import ConfigError

VOCABULARY = 256
"""Tokens of an instruction are below it."""
_PATCH = 4
"""Pixels of a patch's side."""
_HEAD = 16
"""Width of an attention head."""
_WIDER = 2
"""Inner width of a layer's MLP, in widths."""
Past = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [B, heads, P, width / heads] of the prefix in each layer."""


class VlaActor(nn.Module):
    """The policy; ``width`` and number of layers are ``policy.hidden``.

    Args:
        spaces: image groups are uint8 [H, W, 3], instructions int32 [L], other numbers float32 [D].
        groups: those that it reads.
        width: of a token.
        num_layers: at least 1.

    Raises:
        ConfigError: an observation or the action is nothing for it; says what would be.
    """

    is_recurrent = False
    normalizer: nn.Module

    def __init__(self, spaces: Spaces, groups: tuple[str, ...], width: int, num_layers: int) -> None:
        super().__init__()
        _check_action(spaces.action)
        if width % _HEAD:
            raise ConfigError(f"policy.hidden: a transformer's width is a multiple of {_HEAD}, not {width}")
        self.groups = groups
        self.normalizer = nn.Identity()
        self.choices = spaces.action.choices
        self.encoders = nn.ModuleList(_encoder(name, spaces, width) for name in groups)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(num_layers))
        self.start = nn.Parameter(torch.zeros(len(self.choices), width))
        self.embed = nn.ModuleList(nn.Embedding(count, width) for count in self.choices[:-1])
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleList(nn.Linear(width, count) for count in self.choices)
        nn.init.normal_(self.start, std=0.02)

    def initial_state(self, num_envs: int, device: torch.device) -> tuple[()]:
        """Nothing: it remembers no earlier step."""
        return ()

    def observe(self, obs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Its groups [B, ...], as they are: pictures and words are not concatenated.

        Raises:
            ConfigError: a token of an instruction is outside the vocabulary.
        """
        for name, encoder in zip(self.groups, self.encoders, strict=True):
            if isinstance(encoder, _Words):
                encoder.check(name, obs[name])
        return {name: obs[name] for name in self.groups}

    def step(self, x: Mapping[str, torch.Tensor], state: tuple[()]) -> tuple[Past, tuple[()]]:
        """Features of one step of B environments, and the state, which stays empty."""
        return self.features(x), state

    def features(self, x: Mapping[str, torch.Tensor]) -> Past:
        """What the layers know of the prefix; the last one is asked for its keys and values only."""
        tokens = torch.cat([encoder(x[name]) for name, encoder in zip(self.groups, self.encoders, strict=True)], 1)
        past: Past = []
        for layer in self.layers:
            past.append(layer.keys_values(tokens))
            if len(past) < len(self.layers):
                tokens = layer(tokens, past[-1], None)
        return past

    def distribution(self, past: Past) -> ActionTokens:
        """Distribution of the action, given features."""
        return ActionTokens(self, past)

    def logits(self, past: Past, actions: torch.Tensor) -> list[torch.Tensor]:
        """Logits [B, choices] of parts 0, ..., i, each from the parts before it, int64 [B, i]."""
        parts = actions.shape[1] + 1
        x = self.start[:parts].expand(len(actions), -1, -1)
        if parts > 1:
            known = [embed(actions[:, i]) for i, embed in enumerate(self.embed) if i < parts - 1]
            x = x + functional.pad(torch.stack(known, 1), (0, 0, 1, 0))
        prefix = past[0][0].shape[2]
        causal = torch.ones(parts, prefix + parts, dtype=torch.bool, device=x.device).tril(prefix)
        for layer, (keys, values) in zip(self.layers, past, strict=True):
            own_keys, own_values = layer.keys_values(x)
            x = layer(x, (torch.cat([keys, own_keys], 2), torch.cat([values, own_values], 2)), causal)
        x = self.norm(x)
        return [head(x[:, i]) for i, head in enumerate(self.heads) if i < parts]


class ActionTokens:
    """The distribution of an action's parts, each given those before it; the interface of :class:`Categorical`.

    Args:
        actor: that writes them.
        past: its features of B observations.
    """

    __slots__ = ("_actor", "_past")

    def __init__(self, actor: VlaActor, past: Past) -> None:
        self._actor = actor
        self._past = past

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Actions int64 [B, A], part by part."""
        return self._write(lambda choice: choice.sample(generator))

    def mode(self) -> torch.Tensor:
        """The most likely choice of each part, given the parts before: int64 [B, A]."""
        return self._write(Categorical.mode)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """Log-probability [B] of actions, int64 [B, A]."""
        return self.log_prob_parts(actions).sum(-1)

    def log_prob_parts(self, actions: torch.Tensor) -> torch.Tensor:
        """Log-probability [B, A] of each part of actions, int64 [B, A]."""
        return self.judge(actions)[0]

    def judge(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All parts of given actions in one pass, under a causal mask.

        Args:
            actions: int64 [B, A]

        Returns:
            Log-probabilities [B, A], and the entropies of the conditional distributions, summed over the parts [B]: an
            unbiased estimate of the action's entropy where the policy drew the actions.
        """
        logits = self._actor.logits(self._past, actions[:, :-1])
        choice = Categorical(torch.cat(logits, -1), self._actor.choices)
        return choice.log_prob_parts(actions), choice.entropy()

    def noise(self) -> None:
        """None: there is no deviation."""

    def _write(self, choose: Callable[[Categorical], torch.Tensor]) -> torch.Tensor:
        keys, _ = self._past[0]
        actions = torch.empty((len(keys), 0), dtype=torch.int64, device=keys.device)
        for part, count in enumerate(self._actor.choices):
            logits = self._actor.logits(self._past, actions)[part]
            actions = torch.cat([actions, choose(Categorical(logits, (count,)))], 1)
        return actions


class _Layer(nn.Module):
    """Pre-norm attention and MLP. Queries are the tokens that go on; keys and values are given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, _WIDER * width), nn.GELU(), nn.Linear(_WIDER * width, width)
        )

    def keys_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tokens [B, S, width]: [B, heads, S, width / heads] each."""
        keys, values = self.key_value(self.norm(x)).chunk(2, -1)
        return _split_heads(keys), _split_heads(values)

    def forward(
        self, x: torch.Tensor, attended: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Tokens [B, S, width] that attend to keys and values of K tokens where ``mask``, bool [S, K]."""
        query = _split_heads(self.query(self.norm(x)))
        found = functional.scaled_dot_product_attention(query, *attended, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class _Patches(nn.Module):
    """Image uint8 [B, H, W, C] to a token for each square of pixels; its place is that of its row and its column."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        height, across, channels = shape
        pixels = _PATCH * _PATCH * channels
        self.project = nn.Linear(pixels, width)
        self.row = nn.Parameter(torch.randn(height // _PATCH, 1, width))
        self.column = nn.Parameter(torch.randn(across // _PATCH, width))
        nn.init.normal_(self.project.weight, std=4 * pixels**-0.5)  # few pixels of a patch are bright
        nn.init.zeros_(self.project.bias)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        squares = image.unflatten(2, (-1, _PATCH)).unflatten(1, (-1, _PATCH)).transpose(2, 3).flatten(3)
        return (self.project(squares.flatten(3).float() / 255) + self.row + self.column).flatten(1, 2)


class _Words(nn.Module):
    """Instruction int32 [B, L] to its tokens' embeddings."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(shape[0], width))

    def check(self, name: str, tokens: torch.Tensor) -> None:
        """Refuse a group's tokens, int32 [B, L], that have no embedding."""
        if not tokens.numel():
            return
        low, high = (int(n) for n in tokens.aminmax())
        if low < 0 or high >= VOCABULARY:
            raise ConfigError(
                f"observations: group {name!r} has tokens from {low} to {high}; the vocabulary of the transformer is "
                f"0 to {VOCABULARY - 1}"
            )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens.long()) + self.position


class _Numbers(nn.Module):
    """Numbers float32 [B, D] to one token."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.project = nn.Linear(shape[0], width)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.project(numbers).unsqueeze(1)


def build_vla_actor(config: ControlConfig, spaces: Spaces) -> VlaActor:
    """The network that ``policy.network = "transformer"`` asks for; :class:`VlaActor` raises what does not fit."""
    hidden = config.policy.hidden
    if len(set(hidden)) != 1:
        raise ConfigError(
            f"policy.hidden = {list(hidden)}: a transformer has one entry for each layer, all the same width"
        )
    return VlaActor(spaces, config.groups_of("actor"), hidden[0], len(hidden))


def _encoder(name: str, spaces: Spaces, width: int) -> nn.Module:
    space = spaces.observations.get(name)
    if space is None:
        known = ", ".join(spaces.observations)
        raise ConfigError(f"observations.actor: there is no group {name!r}; the environment has {known}")
    if _is_image(space):
        return _Patches(space.shape, width)
    if space.dtype == "int32" and len(space.shape) == 1:
        return _Words(space.shape, width)
    if space.dtype == "float32" and len(space.shape) == 1:
        return _Numbers(space.shape, width)
    raise ConfigError(
        f"observations.actor: a transformer reads images (uint8 [H, W, C], H and W multiples of {_PATCH}), "
        f"instructions (int32 [L]) and numbers (float32 [D]); group {name!r} is {space.dtype} {list(space.shape)}"
    )


def _is_image(space: Observation) -> bool:
    return (
        space.dtype == "uint8"
        and len(space.shape) == 3
        and space.shape[0] % _PATCH == 0
        and space.shape[1] % _PATCH == 0
    )


def _check_action(action: Action) -> None:
    if action.kind != "discrete":
        raise ConfigError(
            "policy.network = 'transformer' writes action tokens and the environment takes real numbers; let the "
            "environment offer choices for each of them (a MultiDiscrete action space), or set policy.network = 'mlp'"
        )


def _split_heads(x: torch.Tensor) -> torch.Tensor:
    """[B, S, width] to [B, heads, S, width / heads]."""
    return x.unflatten(-1, (-1, _HEAD)).transpose(1, 2)
