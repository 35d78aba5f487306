"""The vLLM engine: real vLLM behind our engine interface, with weight updates in flight and versions per token.

    submit ─► VLLMThread ─► AsyncLLM ─► EngineCore process ─► Inbox ─► step ─► completions
    load_weights ─► map segment · place │ pause · load · read back · checksum · resume      (vllm_worker.py)

vLLM starts paused, and is paused from :meth:`VLLMEngine.sleep`, or a version that could not be proven, until one is.
Requests wait meanwhile; nothing is ever sampled from weights without proof.

``Request.seed`` is not used: seeded requests fault on vLLM's CPU build and slow sampling down elsewhere. The engine's
own seed makes each engine and each restart sample differently.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import xxhash

from actors.engines.base import Completion, Request
from actors.engines.inbox import Inbox
from actors.engines.segments import Staging
from actors.engines.vllm_settings import Settings
from actors.engines.vllm_thread import Output, VLLMThread
from async_rl.config import LoraConfig
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.process import host_id
from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import Offer

CLOSE_S = 5.0


def fresh_seed(run_seed: int, name: str) -> int:
    """31-bit seed that differs between runs, engines and each start of the same engine."""
    incarnation = f"{run_seed}/{name}/{os.getpid()}/{time.time_ns()}"
    return int(xxhash.xxh3_64_intdigest(incarnation.encode())) & 0x7FFF_FFFF


class VLLMEngine:
    """vLLM on one device; start-up takes some ten seconds. Nothing is sampled before the first :meth:`load_weights`.

    Args:
        model_path: Hugging Face model folder; its weights are read as the base of an adapter only.
        dtype: ``float32`` or ``bfloat16``.
        max_num_seqs: sequences decoded at the same time.
        context: longest prompt plus completion, in tokens.
        stop_token_ids: tokens that end a completion.
        seed: of the engine, see :func:`fresh_seed`.
        kv_cache: whether running requests keep the KV that older weights computed, or recompute it after an update.
        sleep_mode: whether :meth:`sleep` gives the device's memory back; without it, it only pauses.
        lora: of the adapter that versions bring; None: they bring the whole model.
        broadcast: whether :meth:`receive_weights` is wanted.
        deadline_s: longest wait for vLLM's answer to one call.
        start_timeout_s: longest wait for its start.

    Raises:
        AsyncRLError: vLLM is missing or does not start with this model.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: Literal["float32", "bfloat16"],
        max_num_seqs: int,
        context: int,
        stop_token_ids: Sequence[int],
        seed: int,
        kv_cache: Literal["keep", "recompute"] = "keep",
        sleep_mode: bool = False,
        lora: LoraConfig | None = None,
        broadcast: bool = False,
        deadline_s: float = 60.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._context = context
        self._stop_token_ids = list(stop_token_ids)
        self._deadline_s = deadline_s
        self._version = -1
        self._proven = self._asleep = False
        self._last_pause_s = 0.0
        self._live: dict[int, tuple[str, int]] = {}
        self._serial = itertools.count()
        self._inbox: Inbox[Output] = Inbox()
        self._staging = Staging()
        self._closed = False
        settings = Settings(
            model_path=model_path,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            context=context,
            seed=seed,
            recompute=kv_cache == "recompute",
            sleep_mode=sleep_mode,
            lora=lora,
            broadcast=broadcast,
        )
        self._thread = VLLMThread(settings, self._inbox, start_timeout_s)

    @property
    def version(self) -> int:
        """Weight version that samples now; -1 before the first :meth:`load_weights`."""
        return self._version

    @property
    def proven(self) -> bool:
        """Whether it samples: it holds :attr:`version`, and that is proven."""
        return self._proven

    @property
    def last_pause_s(self) -> float:
        """Seconds for which nothing was decoded during the last update, from the pause of vLLM's scheduler on."""
        return self._last_pause_s

    @property
    def num_running(self) -> int:
        """Samples that are decoded or wait for a slot."""
        return sum(samples for _, samples in self._live.values())

    @property
    def pids(self) -> list[int]:
        """Process ids of vLLM's child processes."""
        return self._thread.pids

    def fileno(self) -> int:
        """Readable while ``step(0)`` would return something or raise."""
        return self._inbox.fileno()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises:
            ValueError: a prompt is empty, does not fit the context or has ids outside the vocabulary, or its id is in
                flight already; nothing of the call is queued then.
            AsyncRLError: the engine has failed.
        """
        self._check_alive()
        for request in requests:
            self._check(request)
        if len({r.id for r in requests}) != len(requests):
            raise ValueError("two requests of one call have the same id")
        for request in requests:
            key = f"{request.id}-{next(self._serial)}"
            self._live[request.id] = (key, request.num_samples)
            parameters = {
                "n": request.num_samples,
                "temperature": request.temperature,
                "max_tokens": request.max_new_tokens,
                "stop_token_ids": self._stop_token_ids,
            }
            self._thread.submit(key, request.prompt, parameters)

    def step(self, timeout_s: float) -> list[Completion]:
        """Wait at most ``timeout_s`` for completions and return all that are there.

        The samples of a request arrive together. While the last update is unproven nothing is sampled.

        Raises:
            AsyncRLError: a request or vLLM's process failed; the engine is of no use then.
        """
        completions: list[Completion] = []
        for key, output in self._inbox.take(timeout_s):
            request_id = int(key.partition("-")[0])
            if self._live.get(request_id, ("", 0))[0] == key:  # else aborted meanwhile
                del self._live[request_id]
                completions.extend(completion_of(request_id, sample) for sample in output.outputs)
        return completions

    def load_weights(self, manifest: Manifest, data: memoryview) -> str:
        """Swap in a version between two decode steps; returns the checksum, proven by a read-back of every parameter.

        Args:
            manifest: what was published.
            data: its bytes. A mapping of the learner's segment is mapped by vLLM's process, too; other memory is copied
                to a segment of our own first.

        Raises:
            WeightsError: the version does not fit the model: the one before goes on. Or the engine does not hold what
                was published: it stays paused until a later call succeeds.
            AsyncRLError: vLLM's process ended, or does not answer.
        """
        self._check_alive()
        self.wake()
        what = f"weight version {manifest.version}"
        shared = isinstance(data.obj, mmap.mmap) and manifest.host == host_id() and os.path.exists(manifest.segment)
        path = manifest.segment if shared else self._staging.write(data)
        self._thread.call(self._thread.prepare(manifest.to_wire(), path), self._deadline_s, what)
        self._proven = False
        swap = self._thread.swap(manifest.checksum, manifest.version)
        self._last_pause_s = self._thread.call(swap, self._deadline_s, what)
        self._version, self._proven = manifest.version, True
        return manifest.checksum

    def devices(self) -> list[str]:
        """Where a broadcast arrives, by worker.

        Raises:
            AsyncRLError: vLLM's process ended, or does not answer.
        """
        return self._thread.call(self._thread.devices(), self._deadline_s, "the names of vLLM's devices")

    def receive_weights(self, manifest: Manifest, offer: Offer) -> str:
        """Swap in a version from the learner's device; proven as by :meth:`load_weights`.

        Args:
            manifest: what was published.
            offer: the place of the first worker.

        Raises:
            WeightsError: it did not begin: the version before goes on. Or it broke off, or is not what was published:
                the engine stays paused until a version is proven.
            AsyncRLError: vLLM's process ended, or does not answer.
        """
        self._check_alive()
        what = f"weight version {manifest.version} by broadcast"
        work = self._thread.receive(manifest.to_wire(), offer.to_wire(), manifest.version, resumes=self._proven)
        swapped = self._thread.call(work, offer.deadline_s + self._deadline_s, what)
        self._proven = self._proven and swapped.intact
        wrong = swapped.wrong or ("" if swapped.held == {manifest.checksum} else f"it holds {sorted(swapped.held)}")
        if wrong:
            raise WeightsError(f"version {manifest.version}: {wrong}")
        self._version, self._proven, self._last_pause_s = manifest.version, True, swapped.pause_s
        return manifest.checksum

    def sleep(self) -> None:
        """Pause and give the device's memory back; only while nothing runs. Does nothing when asleep.

        vLLM's CPU build keeps its memory, and so does one that was made without ``sleep_mode``.

        Raises:
            AsyncRLError: requests run, vLLM's process ended, or it does not answer.
        """
        self._check_alive()
        if self.num_running:
            raise AsyncRLError(f"{self.num_running} samples run: an engine goes to sleep only when none does")
        if not self._asleep:
            self._proven, self._asleep = False, True
            self._thread.call(self._thread.sleep(), self._deadline_s, "vLLM to sleep")

    def wake(self) -> None:
        """Take memory for the weights again; the KV cache follows when the next version is proven.

        Raises:
            AsyncRLError: vLLM's process ended, or it does not answer.
        """
        self._check_alive()
        if self._asleep:
            self._thread.call(self._thread.wake(), self._deadline_s, "vLLM to wake up")
            self._asleep = False

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests with all their samples; unknown ids are passed over."""
        keys = [self._live.pop(i)[0] for i in request_ids if i in self._live]
        if keys:
            self._thread.abort(keys)

    def close(self) -> None:
        """End vLLM and its processes, by force after a few seconds."""
        if not self._closed:
            self._closed = True
            self._live.clear()
            self._thread.close(CLOSE_S)
            self._staging.close()

    def _check_alive(self) -> None:
        if self._inbox.failure is not None:
            raise AsyncRLError(self._inbox.failure)

    def _check(self, request: Request) -> None:
        length, vocabulary = len(request.prompt), self._thread.vocab_size
        if request.id in self._live:
            raise ValueError(f"request {request.id} is in flight already")
        if length == 0 or length + request.max_new_tokens > self._context:
            raise ValueError(
                f"request {request.id}: {length} prompt tokens and {request.max_new_tokens} new ones do not fit the "
                f"context of {self._context}"
            )
        if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
            raise ValueError(f"request {request.id}: its prompt has token ids outside 0 .. {vocabulary - 1}")


def completion_of(request_id: int, sample: Any) -> Completion:
    """Our completion from vLLM's ``CompletionOutput``.

    Raises:
        AsyncRLError: log-probabilities or versions do not cover the tokens, or it was aborted behind our back.
    """
    tokens = np.asarray(sample.token_ids, np.int32)
    logprobs = np.asarray(sample.logprobs.logprobs if sample.logprobs is not None else (), np.float32)
    if sample.finish_reason not in ("stop", "length"):
        raise AsyncRLError(f"vLLM ended request {request_id} with {sample.finish_reason!r}, which nobody asked for")
    if logprobs.shape != tokens.shape:
        raise AsyncRLError(
            f"vLLM gave {len(logprobs)} log-probabilities for {len(tokens)} tokens of request {request_id}"
        )
    return Completion(
        request_id=request_id,
        sample=sample.index,
        tokens=tokens,
        logprobs=logprobs,
        versions=expand_versions(sample.weight_versions or (), len(tokens)),
        finish_reason=cast(Literal["stop", "length"], sample.finish_reason),
    )


def expand_versions(spans: Sequence[Any], length: int) -> npt.NDArray[np.int32]:
    """int32 [length]: the version of each token, from vLLM's spans of ``version``, ``start`` and ``end``.

    Raises:
        AsyncRLError: the spans do not cover all tokens in order, or a version is not a number.
    """
    versions, position = np.empty(length, np.int32), 0
    for span in spans:
        version, start, end = span.version, span.start, span.end
        if start != position or not start <= end <= length or not str(version).isdigit():
            raise AsyncRLError(f"vLLM's version spans {spans} do not cover {length} tokens in order")
        versions[start:end] = int(version)
        position = end
    if position != length:
        raise AsyncRLError(f"vLLM's version spans {spans} do not cover {length} tokens in order")
    return versions
