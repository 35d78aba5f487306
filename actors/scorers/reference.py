"""The stage ``reference``: log-probabilities of the sampled tokens under a frozen model that stays where it is.

    groups ─► distinct sequences ─► batches [R, L] ─► hidden states that predict a sampled token ─► head, in chunks
                                                                          └─► ref_logprobs [T] of each group, 0 off mask

Everything that is waiting goes through the model together: the more the server has, the larger the batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.scorers.stage import Failure
from actors.scorers.token_batches import token_batches
from async_rl.config import Config
from async_rl.data import Annotation, Group
from async_rl.logprobs import token_logprobs
from async_rl.models import check_head, device_for, last_hidden, load_causal_lm, resolve_model

WANTED_GROUPS = 16
"""Groups held at the same time: small ones fill a batch together."""

Floats = npt.NDArray[np.float32]


def load_reference(config: Config) -> torch.nn.Module:
    """The frozen model, on its device.

    Raises:
        ConfigError: no such model, or no device for it.
    """
    folder = resolve_model(config.reference.path or config.model.path, "reference.path")
    model = load_causal_lm(folder, config.model.dtype, device_for(config.model.device, 0))
    check_head(model)
    return model.requires_grad_(False)


class ReferenceStage:
    """Annotates groups with ``ref_logprobs``.

    Args:
        model: of :func:`load_reference`.
        temperature: of the distribution that was sampled.
        budget: most tokens of one forward pass, padding included.
    """

    next_deadline = None
    wanted = WANTED_GROUPS

    def __init__(self, model: Any, temperature: float, budget: int) -> None:
        self._model, self._temperature, self._budget = model, temperature, budget
        self._vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self._positions = getattr(model.config, "max_position_embeddings", None)
        self._waiting: list[Group] = []

    @property
    def busy(self) -> bool:
        """Whether groups wait to be forwarded."""
        return bool(self._waiting)

    def submit(self, group: Group) -> None:
        """Take a leased group."""
        self._waiting.append(group)

    def step(self) -> list[Annotation | Failure]:
        """Forward all that wait."""
        failures = [Failure(group=g, reason="reference", detail=why) for g in self._waiting if (why := self._unfit(g))]
        unfit = {id(failure.group) for failure in failures}
        groups = [group for group in self._waiting if id(group) not in unfit]
        self._waiting = []
        found = reference_logprobs(self._model, groups, self._temperature, self._budget)
        done = [
            Annotation(ordinal=group.ordinal, attempt=group.attempt, stage="reference", values=values)
            for group, values in zip(groups, found, strict=True)
        ]
        return [*done, *failures]

    def filenos(self) -> list[int]:
        """None: the model is forwarded in this process."""
        return []

    def close(self) -> None:
        """Nothing is held but memory."""

    def _unfit(self, group: Group) -> str:
        """Why the model cannot read the group; empty if it can."""
        highest = int(group.arrays["tokens"].max())
        if highest >= self._vocabulary:
            return f"token {highest} is not in the reference's vocabulary of {self._vocabulary}"
        if self._positions is not None and max(group.lengths) > self._positions:
            return f"{max(group.lengths)} tokens are longer than the {self._positions} that the reference reads"
        return ""


def reference_logprobs(model: Any, groups: Sequence[Group], temperature: float, budget: int) -> list[Floats]:
    """float32 ``[sum(lengths)]`` per group: ``log p(token | those before it)`` where the mask is 1, else 0.

    Equal sequences, of which a group with short answers has many, are forwarded once.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    row_of: dict[tuple[bytes, bytes], int] = {}
    keys = [(t.tokens.tobytes(), t.loss_mask.tobytes()) for t in trajectories]
    rows = [row_of.setdefault(key, len(row_of)) for key in keys]
    distinct = {row: (t.tokens, t.loss_mask) for row, t in zip(rows, trajectories, strict=True)}
    found: dict[int, Floats] = {}
    for batch in token_batches([len(distinct[i][0]) for i in range(len(distinct))], budget):
        found |= zip(batch, _forward(model, [distinct[i] for i in batch], temperature), strict=True)
    flat = iter(found[row] for row in rows)
    return [np.concatenate([next(flat) for _ in group.lengths]) for group in groups]


@torch.no_grad()
def _forward(
    model: Any, rows: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]], temperature: float
) -> list[Floats]:
    """One batch of right-padded rows; a causal model never looks right, so padding there needs no mask."""
    length = max(len(tokens) for tokens, _ in rows)
    tokens_RL = np.zeros((len(rows), length), np.int64)
    mask_RL = np.zeros((len(rows), length), bool)
    for i, (tokens, mask) in enumerate(rows):
        tokens_RL[i, : len(tokens)], mask_RL[i, : len(mask)] = tokens, mask == 1
    mask_RL[:, 0] = False  # nothing predicts the first token
    device = next(model.parameters()).device
    head = model.get_output_embeddings()
    sampled = torch.from_numpy(mask_RL[:, 1:].reshape(-1).nonzero()[0]).to(device)  # where the token before is read
    targets = torch.from_numpy(tokens_RL[mask_RL]).to(device)
    inputs = torch.from_numpy(tokens_RL[:, : max(1, length - 1)]).to(device)
    hidden = last_hidden(model, inputs, use_cache=False).flatten(0, 1).index_select(0, sampled)
    logprobs, _ = token_logprobs(hidden, head.weight, head.bias, targets, temperature)
    found_RL = np.zeros((len(rows), length), np.float32)
    found_RL[mask_RL] = logprobs.cpu().numpy()
    return [found_RL[i, : len(tokens)] for i, (tokens, _) in enumerate(rows)]
