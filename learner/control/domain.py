"""The learner of a control run, whatever the method: a step of updates on flat vectors.

shard ─► Method.prepare ─► for each mini-batch: loss ─► backward ─► [ gradient │ sums ] ─► one all_reduce
                            ─► learning rate ─► clip each role ─► AdamW ─► Method.finish ─► Trained
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from async_rl.config import ControlConfig
from async_rl.control.spaces import Spaces
from async_rl.data import Group
from async_rl.errors import AsyncRLError
from async_rl.metrics import Metrics
from async_rl.timer import StateTimer
from async_rl.wire import Frame, Header, decode_groups
from learner.algorithms.schedules import kl_adaptive_lr
from learner.control.method import Batch, Method
from learner.control.store import load_memories, load_networks, save_memories, save_networks
from learner.domain import Trained
from learner.flat import FlatParameters, Slot
from learner.group import LearnerGroup
from learner.optimizer import FlatAdamW
from learner.scalars import Scalars, Totals

MAX_SKIPPED = 5
"""Updates with a non-finite gradient in a row that end the run."""


class ControlDomain:
    """A :class:`learner.domain.Domain`.

    Args:
        config: of the run.
        spaces: of the environment.
        method: its networks are on the group's device; they move into the flat vector.
        group: the ranks.
        timer: told when this rank trains and when it reduces.
    """

    def __init__(
        self, config: ControlConfig, spaces: Spaces, method: Method, group: LearnerGroup, timer: StateTimer
    ) -> None:
        self._config = config
        self._spaces = spaces
        self._method = method
        self._group = group
        self._timer = timer
        sizes = dict(method.sums) | {f"norm/{role}": 1 for role in method.modules}
        self.flat = FlatParameters(method.modules, group.device, sum(sizes.values()), with_state=True)
        self.optimizer = FlatAdamW(self.flat, config.learner.betas, config.learner.weight_decay)
        self.lr = config.learner.lr
        """Of the schedule; methods derive the rates of their roles from it."""
        self.skipped_in_row = 0
        self._scalars = Scalars(self.flat.tail, sizes)
        self._gradients = {role: self.flat.grad[self.flat.trained_span(role)] for role in self.flat.roles}
        self._checked = False

    @property
    def published(self) -> tuple[Slot, ...]:
        """What actors need; names carry their role where there are several."""
        roles = self._method.published
        if len(roles) == 1:
            return self.flat.slots(roles[0])
        return tuple(slot for slot in self.flat.layout if slot.name.partition(".")[0] in roles)

    def train(self, header: Header, frames: Sequence[Frame], step: int) -> Trained:
        """Make all updates of ``step``.

        Raises:
            AsyncRLError: actor and learner disagree about the same weights, or no update is finite.
            WireError: the groups are malformed.
        """
        return self.train_groups(decode_groups(dict(header), frames), step)

    def train_groups(self, groups: Sequence[Group], step: int) -> Trained:
        """The same with decoded groups."""
        self._timer.enter("training")
        if self._config.learner.lr_schedule == "linear":
            self.lr = self._config.learner.lr * (1 - step / self._config.steps)
        batch = self._method.prepare(groups, step)
        sums: Totals = {}
        skipped = 0
        for number, part in enumerate(batch.updates):
            totals = self._gradient(batch, part, check=number == 0)
            # in the first update the policy is that of the step's start: its KL is rounding
            skipped += not self._apply(totals, step, adapt=number > 0)
            sums = {name: total + sums[name] for name, total in totals.items()} if sums else totals
        self._method.finish(batch, step)
        self.flat.refresh()
        return Trained(self._metrics(batch, sums, totals, skipped), batch.amount)

    def numbers(self) -> dict[str, float]:
        """Learning rate, and the updates that were skipped just before."""
        return {"lr": self.lr, "skipped_in_row": float(self.skipped_in_row)}

    def set_numbers(self, numbers: Mapping[str, float]) -> None:
        """Continue there; a rate that no controller moves may be changed on resume, and stays as configured."""
        if self._config.learner.lr_schedule == "kl_adaptive":
            self.lr = numbers["lr"]
        self.skipped_in_row = int(numbers["skipped_in_row"])

    def save(self, folder: Path) -> None:
        """Write all that a resumed run needs; :mod:`learner.control.store` says into which files."""
        save_networks(folder, self._config, self._spaces, self.flat, self.optimizer)
        save_memories(folder, self._method.memories)

    def load(self, folder: Path) -> None:
        """Read them.

        Raises:
            ConfigError: something is missing, damaged, or of other networks.
        """
        load_networks(folder, self.flat, self.optimizer)
        load_memories(folder, self._method.memories)

    def offload(self) -> None:
        """Give the device's memory back until :meth:`restore`; on the CPU it is the host's already."""
        if self._group.device.type != "cpu":
            self.flat.offload()
            self.optimizer.offload()
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Take it again."""
        if self._group.device.type != "cpu":
            self.flat.restore()
            self.optimizer.restore()

    def _gradient(self, batch: Batch, part: Any, check: bool) -> Totals:
        """Fill ``flat.grad`` with the gradient over all ranks; returns their sums and the norm of each role."""
        self.flat.zero_grad()
        loss, sums = self._method.loss(batch, part)
        if not self._checked:
            self.flat.check_graph(loss)
            self._checked = True
        loss.backward()
        self._scalars.add(sums)
        if check:
            self.flat.check_views()
        if self._group.world > 1:
            self._timer.enter("reducing")
            self._group.all_reduce_flat(self.flat)
            self._timer.enter("training")
        norms = {f"norm/{role}": torch.linalg.vector_norm(span) for role, span in self._gradients.items()}
        self._scalars.add(norms)  # of the reduced gradient: the same on all ranks
        return self._scalars.read()

    def _apply(self, totals: Totals, step: int, adapt: bool) -> bool:
        """Adapt the rate, clip and step; False: the gradient was not finite, and all ranks skip it alike."""
        if not all(math.isfinite(total.sum()) for total in totals.values()):
            self._skip(totals, step)
            return False
        self.skipped_in_row = 0
        learner = self._config.learner
        if adapt and learner.lr_schedule == "kl_adaptive" and totals["kl"] > 0:
            kl = float(totals["kl"] / totals["samples"])
            self.lr = kl_adaptive_lr(self.lr, kl, learner.kl_target, learner.lr_min, learner.lr_max)
        for role in self._method.clipped():
            norm = float(totals[f"norm/{role}"])
            if norm > learner.max_grad_norm:
                self._gradients[role].mul_(learner.max_grad_norm / norm)
        self.optimizer.step(self._method.rates(self.lr, step))
        return True

    def _skip(self, totals: Totals, step: int) -> None:
        self.skipped_in_row += 1
        if self.skipped_in_row >= MAX_SKIPPED:
            wrong = ", ".join(name for name, total in totals.items() if not math.isfinite(total.sum()))
            raise AsyncRLError(
                f"step {step}: {wrong} not finite in {MAX_SKIPPED} updates in a row; lower learner.lr (or lr_max), or "
                "look at the rewards and losses in metrics.jsonl"
            )

    def _metrics(self, batch: Batch, sums: Totals, last: Totals, skipped: int) -> Metrics:
        norms: Metrics = {f"grad_norm/{role}": float(last[f"norm/{role}"]) for role in self.flat.roles}
        return {
            **batch.facts,
            **self._method.metrics(sums, len(batch.updates)),
            **norms,
            "lr": self.lr,
            "env_steps/step": batch.amount,
            "updates_skipped": float(skipped),
        }


def make_method(config: ControlConfig, spaces: Spaces, group: LearnerGroup, *, fresh: bool = True) -> Method:
    """The algorithm that the configuration names; not ``fresh``: a checkpoint will fill its networks.

    Raises:
        ConfigError: its networks do not fit the environment.
    """
    match config.algorithm.name:
        case "ppo":
            from learner.control.ppo import Ppo

            return Ppo(config, spaces, group)
        case "distillation":
            from learner.control.distillation import Distillation

            return Distillation(config, spaces, group)
        case "grpo":
            from learner.control.grpo import Grpo

            return Grpo(config, spaces, group, fresh=fresh)
