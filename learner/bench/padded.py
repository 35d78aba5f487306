"""The baseline: the same gradient as other trainers compute it, one padded row per sequence and full logits.

    groups ─► prompts padded on the left │ completions on the right ─► model with attention mask ─► logits [B, C, V]
           ─► log-softmax, entropy ─► clipped surrogate, mean over all trained tokens ─► backward

This is what TRL's GRPOTrainer does (prompt and completion padded apart, logits of the completion's positions), without
its trainer around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from async_rl.data import Group
from learner.algorithms.group_relative import group_advantages
from learner.bench.batches import Case


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences as rows: all prompts end, and all completions begin, in the same column."""

    inputs_BL: torch.Tensor
    mask_BL: torch.Tensor
    """What is no padding."""
    trained_BC: torch.Tensor
    """Which of the last C tokens of a row are trained."""
    behaviour_logprobs_BC: torch.Tensor
    advantages_B: torch.Tensor


class Padded:
    """Forward and backward of one batch, a few rows at a time.

    Args:
        case: what is trained.
        model: its parameters get the gradients.
    """

    def __init__(self, case: Case, model: Any) -> None:
        self._rows = case.rows
        self._model = model
        self._clip = case.config.algorithm.clip_low, case.config.algorithm.clip_high

    def gradient(self, groups: Sequence[Group]) -> None:
        """Fill the gradients of the parameters, from the groups on."""
        self._model.zero_grad(set_to_none=True)
        batch = pad(groups)
        for first in range(0, len(batch.inputs_BL), self._rows):
            self._backward(batch, slice(first, first + self._rows))

    def _backward(self, batch: PaddedBatch, rows: slice) -> None:
        inputs_BL, trained_BC = batch.inputs_BL[rows], batch.trained_BC[rows]
        kept = trained_BC.shape[1]
        output = self._model(
            input_ids=inputs_BL, attention_mask=batch.mask_BL[rows], logits_to_keep=kept + 1, use_cache=False
        )
        table_BCV = output.logits[:, :-1].log_softmax(-1)
        logprobs_BC = table_BCV.gather(-1, inputs_BL[:, -kept:, None]).squeeze(-1)
        with torch.no_grad():  # reported
            (table_BCV.exp() * table_BCV).sum(-1)
        ratio_BC = (logprobs_BC - batch.behaviour_logprobs_BC[rows]).exp()
        advantages_B1 = batch.advantages_B[rows, None]
        clipped_BC = ratio_BC.clamp(1 - self._clip[0], 1 + self._clip[1]) * advantages_B1
        loss_BC = -torch.minimum(ratio_BC * advantages_B1, clipped_BC)
        ((loss_BC * trained_BC).sum() / int(batch.trained_BC.sum())).backward()


def pad(groups: Sequence[Group]) -> PaddedBatch:
    """Lay out all sequences of the batch, each padded to the longest prompt and the longest completion."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    starts = [int(t.loss_mask.argmax()) for t in trajectories]

    def rows(name: str, prompts: bool) -> Sequence[torch.Tensor]:
        arrays = [t.arrays[name] for t in trajectories]
        parts = [a[:n] if prompts else a[n:] for a, n in zip(arrays, starts, strict=True)]
        return [torch.from_numpy(part.copy()) for part in parts]

    def left(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(list(parts), batch_first=True, padding_side="left")

    prompts, completions = rows("tokens", prompts=True), rows("tokens", prompts=False)
    tokens_BC = pad_sequence(list(completions), batch_first=True)
    real = (
        left([torch.ones_like(p) for p in prompts]),
        pad_sequence([torch.ones_like(c) for c in completions], batch_first=True),
    )
    rewards = torch.cat([torch.from_numpy(group.rewards.copy()) for group in groups])
    group_B = torch.repeat_interleave(torch.tensor([len(group) for group in groups]))
    return PaddedBatch(
        inputs_BL=torch.cat([left(prompts), tokens_BC], 1).long(),
        mask_BL=torch.cat(real, 1).long(),
        trained_BC=pad_sequence(list(rows("loss_mask", prompts=False)), batch_first=True).bool(),
        behaviour_logprobs_BC=pad_sequence(list(rows("logprobs", prompts=False)), batch_first=True),
        advantages_B=group_advantages(rewards, group_B, True),
    )
