"""An engine without a model: completions of given lengths at a given speed, for tests, benchmarks and planning.

submit ──► queue ──slot free──► running (length drawn) ──clock passes its end──► completion
                                   └─ token j of n is emitted at start + (j + 1) / speed, under the version that was
                                      live then: a sample that spans a swap carries both
"""

from __future__ import annotations

import heapq
import math
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.engines.alarm import Alarm
from actors.engines.base import Completion, Request
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.lengths import Lengths, request_rng
from async_rl.weights.manifest import Manifest, chunk_checksums, combine


@dataclass(order=True, slots=True)
class _Sample:
    finish_s: float
    order: int
    start_s: float = field(compare=False)
    duration_s: float = field(compare=False)
    tokens: npt.NDArray[np.int32] = field(compare=False)
    stopped: bool = field(compare=False)
    request_id: int = field(compare=False)
    index: int = field(compare=False)


class MockEngine:
    """Implements :class:`actors.engines.base.Engine`; a slot is as fast whatever the others do.

    Args:
        lengths: of completions, before ``max_new_tokens`` cuts them.
        tokens_per_s: of one slot.
        vocab: token ids are below it, uniform among those that do not stop.
        stop_token_ids: the first one ends a completion that is not cut.
        slots: samples that run at the same time.
        clock: monotonic seconds.
        wait: called with seconds; returns when they have passed, or something ended; None waits on :meth:`fileno`.
    """

    def __init__(
        self,
        *,
        lengths: Lengths,
        tokens_per_s: float,
        vocab: int,
        stop_token_ids: Sequence[int],
        slots: int,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._lengths, self._tokens_per_s, self._slots = lengths, tokens_per_s, slots
        self._stop = int(stop_token_ids[0])
        self._words = np.setdiff1d(np.arange(vocab, dtype=np.int32), stop_token_ids)
        self._word_logprob = -math.log(len(self._words))
        self._clock = clock
        self._alarm = Alarm()
        self._wait = wait or self._wait_for_alarm
        self._swaps: list[tuple[float, int]] = []
        self._proven = False
        self._queue: deque[_Sample] = deque()
        self._running: list[_Sample] = []
        self._unfinished: dict[int, int] = {}
        self._submitted = 0

    @property
    def version(self) -> int:
        """Version that stamps tokens now; -1 before the first."""
        return self._swaps[-1][1] if self._swaps else -1

    @property
    def proven(self) -> bool:
        """Whether it may sample: a version was loaded since it last slept."""
        return self._proven

    @property
    def last_pause_s(self) -> float:
        """0: its clock runs on while a version is verified."""
        return 0.0

    @property
    def num_running(self) -> int:
        """Samples that run or wait for a slot."""
        return len(self._running) + len(self._queue)

    def fileno(self) -> int:
        """A descriptor that is readable while a sample has ended that :meth:`step` has not yet returned."""
        return self._alarm.fd

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none.

        Raises:
            ValueError: an id is in flight already, or a number is out of range.
        """
        ids = [r.id for r in requests]
        for request in requests:
            if request.id in self._unfinished or ids.count(request.id) > 1:
                raise ValueError(f"request {request.id} is in flight already")
            if request.num_samples < 1 or request.max_new_tokens < 1:
                raise ValueError(f"request {request.id}: a number is out of range: {request}")
        for request in requests:
            self._unfinished[request.id] = request.num_samples
            self._queue.extend(self._draw(request))
        self._start(self._clock())

    def step(self, timeout_s: float) -> list[Completion]:
        """Wait until the next sample ends, at most ``timeout_s``; return all that have ended. Idle is ``[]`` at once.

        Raises:
            WeightsError: no version was loaded, or it slept since.
        """
        if not self.num_running:
            return []
        if not self._proven:
            raise WeightsError("the engine holds no proven version of the weights: load one before sampling")
        remaining = min(timeout_s, self._running[0].finish_s - self._clock())
        if remaining > 0:
            self._wait(remaining)
        return self._ended(self._clock())

    def load_weights(self, manifest: Manifest, data: memoryview) -> str:
        """Verify a version; tokens that are emitted from now on carry it.

        Raises:
            WeightsError: the bytes are not those that were published.
        """
        manifest.verify(data)
        oldest = min((s.start_s for s in self._running), default=math.inf)
        keep = max((i for i, (since, _) in enumerate(self._swaps) if since <= oldest), default=0)
        self._swaps = [*self._swaps[keep:], (self._clock(), manifest.version)]
        self._proven = True
        self._start(self._clock())
        return combine(chunk_checksums(data, manifest.chunk_bytes))

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests with all their samples; their slots are free at once."""
        ids = set(request_ids)
        self._queue = deque(s for s in self._queue if s.request_id not in ids)
        self._running = [s for s in self._running if s.request_id not in ids]
        heapq.heapify(self._running)
        for i in ids:
            self._unfinished.pop(i, None)
        self._start(self._clock())

    def sleep(self) -> None:
        """Need a new version before the next sample; there is no memory to give back.

        Raises:
            AsyncRLError: samples run.
        """
        if self.num_running:
            raise AsyncRLError(f"{self.num_running} samples run: an engine goes to sleep only when none does")
        self._proven = False

    def wake(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Drop everything."""
        self._queue.clear()
        self._running.clear()
        self._alarm.close()

    def _draw(self, request: Request) -> list[_Sample]:
        rng = request_rng(request.seed)
        samples = []
        for index, length in enumerate(self._lengths.draw(rng, request.num_samples).tolist()):
            stopped = length <= request.max_new_tokens
            tokens = rng.choice(self._words, min(length, request.max_new_tokens))
            if stopped:
                tokens[-1] = self._stop
            duration = len(tokens) / self._tokens_per_s
            samples.append(_Sample(math.inf, self._submitted, math.inf, duration, tokens, stopped, request.id, index))
            self._submitted += 1
        return samples

    def _start(self, now: float) -> None:
        while self._proven and self._queue and len(self._running) < self._slots:
            sample = self._queue.popleft()
            sample.start_s, sample.finish_s = now, now + sample.duration_s
            heapq.heappush(self._running, sample)
        self._alarm.set(self._running[0].finish_s if self._running else None)

    def _wait_for_alarm(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._alarm.fd, select.POLLIN)
        poll.poll(math.ceil(seconds * 1000))

    def _ended(self, now: float) -> list[Completion]:
        ended = []
        while self._running and self._running[0].finish_s <= now:
            sample = heapq.heappop(self._running)
            ended.append(self._complete(sample))
            self._start(sample.finish_s)  # the slot was free from then on, however late we look
        return ended

    def _complete(self, sample: _Sample) -> Completion:
        self._unfinished[sample.request_id] -= 1
        if not self._unfinished[sample.request_id]:
            del self._unfinished[sample.request_id]
        length = len(sample.tokens)
        emitted = sample.start_s + sample.duration_s * np.arange(1, length + 1) / length
        since, versions = (np.asarray(column) for column in zip(*self._swaps, strict=True))
        live = np.searchsorted(since, emitted, side="right") - 1
        logprobs = np.full(length, self._word_logprob, np.float32)
        if sample.stopped:
            logprobs[-1] = 0.0  # the length is given: the end is certain
        return Completion(
            request_id=sample.request_id,
            sample=sample.index,
            tokens=sample.tokens,
            logprobs=logprobs,
            versions=versions[live].astype(np.int32),
            finish_reason="stop" if sample.stopped else "length",
        )
