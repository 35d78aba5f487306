"""Bookkeeping of the torch engine in numpy columns: which sample is in which slot, on which KV row, with what so far.

    queue of requests ──admit──► slots (one sample each) ──record──► completions
                                   │ row: the KV row of its token prefix, shared by samples that agree so far

Nothing here loops over running sequences; Python runs once per request admitted and once per completion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.engines.base import Completion, Request
from actors.engines.rows import Ints
from actors.engines.sampling import uniforms

_QUANTA = 16
"""A request's samples may be split over several admissions, each of at least a ``_QUANTA``-th of the slots."""
_REFILL_STEPS, _REFILL_SHARE = 4, 64
"""While others run, slots are filled so many steps after the first was free, and not before they are such a share of
all or enough for what is queued: reading a few prompts costs a whole forward, too."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What the next sampling needs: for each row a temperature, and a uniform number for each sample on it."""

    row: Ints
    """[num_samples] row of each running sample, in slot order of :attr:`Slots.active`."""
    rank: Ints
    """[num_samples] its column among the samples of the row."""
    temperature: npt.NDArray[np.float32]
    """[num_rows]"""
    u: npt.NDArray[np.float64]
    """[num_rows, most samples on a row]"""


class Slots:
    """Samples that are decoded now, and requests that wait.

    Args:
        count: samples decoded at the same time.
        stop_token_ids: tokens that end a completion.
    """

    def __init__(self, count: int, stop_token_ids: Sequence[int]) -> None:
        self.count = count
        self._stops = np.asarray(stop_token_ids, np.int32)
        self._requests: dict[int, Request] = {}
        self._unfinished: dict[int, int] = {}
        self._queue: deque[tuple[Request, int]] = deque()
        self._queued = 0
        self._waited = 0
        self._free = np.arange(count)
        self.active: Ints = np.empty(0, np.int64)
        """Slots in use, ordered by their row."""
        self.row = np.zeros(count, np.int64)
        """[count] KV row of each slot in use."""
        self._request, self._sample = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._done, self._limit = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._temperature = np.zeros(count, np.float32)
        self._u = np.zeros((count, 0))
        self._tokens = np.zeros((count, 0), np.int32)
        self._logprobs = np.zeros((count, 0), np.float32)
        self._versions = np.zeros((count, 0), np.int32)

    @property
    def num_running(self) -> int:
        """Samples in slots or in the queue."""
        return len(self.active) + self._queued

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def submit(self, request: Request) -> None:
        """Queue a request whose id is not in flight."""
        self._requests[request.id] = request
        self._unfinished[request.id] = request.num_samples
        self._queue.append((request, 0))
        self._queued += request.num_samples

    def admit(self, first_row: int) -> list[Request]:
        """Move samples from the queue to free slots, in order.

        Returns:
            One entry per new row from ``first_row``: the request whose prompt belongs there.
        """
        admitted: list[Request] = []
        if len(self.active) and not self._may_refill():
            return admitted
        self._waited = 0
        quantum = max(1, self.count // _QUANTA)
        added = [self.active]
        while self._queue:
            request, first = self._queue[0]
            number = min(request.num_samples - first, len(self._free))
            if number < min(request.num_samples - first, quantum):
                break
            self._queue.popleft()
            if first + number < request.num_samples:
                self._queue.appendleft((request, first + number))
            self._queued -= number
            added.append(self._place(request, first, number, first_row + len(admitted)))
            admitted.append(request)
        self.active = np.concatenate(added)
        return admitted

    def draws(self, num_rows: int) -> Draws:
        """Uniform numbers and temperatures of the next token, laid out by row."""
        row = self.row[self.active]
        per_row = np.bincount(row, minlength=num_rows)
        rank = np.arange(len(row)) - (np.cumsum(per_row) - per_row)[row]
        u = np.zeros((num_rows, int(per_row.max())))
        u[row, rank] = self._u[self.active, self._done[self.active]]
        temperature = np.zeros(num_rows, np.float32)
        temperature[row] = self._temperature[self.active]
        return Draws(row, rank, temperature, u)

    def record(
        self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], version: int
    ) -> tuple[list[Completion], npt.NDArray[np.bool_]]:
        """Append a token to each running sample; those that end leave their slots.

        Args:
            tokens: [num_samples] in the order of :attr:`active`.
            logprobs: [num_samples] of these tokens.
            version: weight version that sampled them.

        Returns:
            Completions of the samples that ended, and which of the previous :attr:`active` go on.
        """
        at = self.active, self._done[self.active]
        self._tokens[at], self._logprobs[at], self._versions[at] = tokens, logprobs, version
        self._done[self.active] += 1
        stopped = np.isin(tokens, self._stops)
        going = ~(stopped | (self._done[self.active] == self._limit[self.active]))
        completions = [
            self._complete(slot, stop)
            for slot, stop in zip(self.active[~going].tolist(), stopped[~going].tolist(), strict=True)
        ]
        self._keep(going)
        return completions, going

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests, queued and running; ids that are not in flight are ignored."""
        ids = {i for i in request_ids if i in self._requests}
        self._queue = deque((r, first) for r, first in self._queue if r.id not in ids)
        self._queued = sum(r.num_samples - first for r, first in self._queue)
        self._keep(~np.isin(self._request[self.active], list(ids)))
        for i in ids:
            del self._requests[i], self._unfinished[i]

    def move(self, rows: Ints) -> None:
        """Put the running samples on new rows [num_samples], in the order of :attr:`active`."""
        self.row[self.active] = rows
        self.active = self.active[np.argsort(rows, kind="stable")]

    def prefixes(self, num_rows: int) -> list[npt.NDArray[np.int32]]:
        """Tokens so far of each row (prompt and completion, the newest token included)."""
        first = np.unique(self.row[self.active], return_index=True)[1]
        slots = self.active[first].tolist()
        assert len(slots) == num_rows
        return [
            np.concatenate([self._requests[self._request[s]].prompt, self._tokens[s, : self._done[s]]]).astype(np.int32)
            for s in slots
        ]

    def _may_refill(self) -> bool:
        fillable = min(self._queued, len(self._free))
        self._waited += fillable > 0
        return self._waited >= _REFILL_STEPS and fillable >= min(self._queued, self.count // _REFILL_SHARE)

    def _place(self, request: Request, first: int, number: int, row: int) -> Ints:
        slots, self._free = self._free[:number], self._free[number:]
        self._widen(request.max_new_tokens)
        self.row[slots], self._request[slots] = row, request.id
        self._sample[slots] = np.arange(first, first + number)
        self._done[slots], self._limit[slots] = 0, request.max_new_tokens
        self._temperature[slots] = request.temperature
        if request.temperature > 0:
            self._u[slots, : request.max_new_tokens] = uniforms(request.seed, first, number, request.max_new_tokens)
        return slots

    def _widen(self, width: int) -> None:
        have = self._tokens.shape[1]
        if width > have:
            pad = ((0, 0), (0, width - have))
            self._u, self._tokens = np.pad(self._u, pad), np.pad(self._tokens, pad)
            self._logprobs, self._versions = np.pad(self._logprobs, pad), np.pad(self._versions, pad)

    def _complete(self, slot: int, stopped: bool) -> Completion:
        number, request_id = self._done[slot], int(self._request[slot])
        self._unfinished[request_id] -= 1
        if not self._unfinished[request_id]:
            del self._unfinished[request_id], self._requests[request_id]
        return Completion(
            request_id=request_id,
            sample=int(self._sample[slot]),
            tokens=self._tokens[slot, :number].copy(),
            logprobs=self._logprobs[slot, :number].copy(),
            versions=self._versions[slot, :number].copy(),
            finish_reason="stop" if stopped else "length",
        )

    def _keep(self, going: npt.NDArray[np.bool_]) -> None:
        self._free = np.concatenate([self._free, self.active[~going]])
        self.active = self.active[going]
