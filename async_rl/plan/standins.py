"""Small groups that stand in for those of a run: the ledger judges them, counts them and finds their age.

oldest and newest version of a group ─► one token of each ─► Ledger.submit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from async_rl.buffer.records import Rules
from async_rl.data import Array, Group
from async_rl.plan.scenario import ENDLESS, Scenario
from async_rl.protocol import Ticket

_TOKEN_BYTES = 13
"""Of tokens, mask, log-probabilities and versions."""
_TOKENS = 3
_KEPT = 1 << 14


def rules_of(scenario: Scenario) -> Rules:
    """The run's rules for stand-ins: a byte of theirs stands for as many as a mean group has."""
    rules = scenario.rules
    nbytes = rules.group_size * scenario.lengths.mean() * _TOKEN_BYTES
    return replace(
        rules,
        steps=ENDLESS,
        group_size=1,
        max_new_tokens=None,
        vocabulary=None,
        context=None,
        control=None,
        replace_zero_variance=False,
        max_bytes=max(1, round(rules.max_bytes * (_TOKENS * _TOKEN_BYTES + 4) / nbytes)),
        stages=(),
    )


class StandIns:
    """Makes groups; those of the same versions share their arrays, which nobody changes."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, int], Mapping[str, Array]] = {}
        self._useful, self._useless = np.ones(1, np.float32), np.full(1, np.nan, np.float32)

    def group(self, ticket: Ticket, oldest: int, newest: int, *, useless: bool) -> Group:
        """The answer to a ticket; the ledger filters a ``useless`` one."""
        return Group(
            ordinal=ticket.ordinal,
            attempt=ticket.attempt,
            task_index=ticket.task_index,
            lengths=(_TOKENS,),
            arrays=self._of(oldest, newest),
            rewards=self._useless if useless else self._useful,
        )

    def _of(self, oldest: int, newest: int) -> Mapping[str, Array]:
        if (oldest, newest) not in self._arrays:
            if len(self._arrays) > _KEPT:
                self._arrays.clear()
            self._arrays[oldest, newest] = {
                "tokens": np.zeros(_TOKENS, np.int32),
                "loss_mask": np.array([0, 1, 1], np.uint8),
                "logprobs": np.full(_TOKENS, -1, np.float32),
                "versions": np.array([-1, oldest, newest], np.int32),
            }
        return self._arrays[oldest, newest]
