"""What every engine offers to the rollout loop: submit, step, and swap weights between two steps.

submit(requests) ─► step() ─► completions          (tokens in, tokens out; log-probabilities and versions per token)
                      ▲
load_weights(v) ──────┘ between two steps: running requests go on, later tokens carry version v

sleep() ─► wake() ─► load_weights(v) ─► step()     nothing is sampled before the new version is proven
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``num_samples`` completions of one prompt."""

    id: int
    """Unique among the requests in flight; the ticket's ordinal in the rollout loop."""
    prompt: tuple[int, ...]
    """Token ids [num_prompt]."""
    num_samples: int
    seed: tuple[int, ...]
    """Identifies the random stream, e.g. (run seed, ordinal, draw). With the ``torch`` engine the same seed, prompt
    and weights give the same tokens whatever else is decoded beside them; vLLM's CPU build ignores it (VLLM fault with
    seeded requests), but seeds each engine differently."""
    max_new_tokens: int
    temperature: float
    """0 is greedy (evaluation); log-probabilities are then those at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished sample of a request."""

    request_id: int
    sample: int
    """Index among the request's samples."""
    tokens: npt.NDArray[np.int32]
    """int32 [num_completion]: sampled ids, the stop token included when it was sampled."""
    logprobs: npt.NDArray[np.float32]
    """float32 [num_completion]: log-probability under the distribution that was sampled, temperature included."""
    versions: npt.NDArray[np.int32]
    """int32 [num_completion]: weight version that sampled each token."""
    finish_reason: Literal["stop", "length"]


class Engine(Protocol):
    """One engine on one device, driven by one thread."""

    @property
    def version(self) -> int:
        """Weight version that samples now; -1 before the first :meth:`load_weights`."""

    @property
    def proven(self) -> bool:
        """Whether it may sample: what it holds was proven to be :attr:`version`.

        False before the first version, from :meth:`sleep` on, and after a :meth:`load_weights` that failed when
        something had changed already. An engine that is not proven samples nothing.
        """

    @property
    def last_pause_s(self) -> float:
        """Seconds for which the last :meth:`load_weights` kept the engine from decoding."""

    @property
    def num_running(self) -> int:
        """Samples that are decoded or wait for a slot."""

    def fileno(self) -> int | None:
        """A descriptor that is readable while ``step(0)`` would return something; None when it works in the caller.

        ``vllm`` and ``mock`` work in threads or processes of their own, ``torch`` in :meth:`step` itself.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they join the running batch as slots get free.

        Raises:
            ValueError: a prompt does not fit the context, or an id is in flight already.
        """

    def step(self, timeout_s: float) -> list[Completion]:
        """Do (or wait at most ``timeout_s`` for) one unit of work; return what finished, possibly nothing."""

    def load_weights(self, manifest: Manifest, data: memoryview) -> str:
        """Swap in a version between two steps, running requests kept; returns the checksum of what the engine holds.

        Args:
            manifest: names, shapes and offsets of the tensors in ``data``, its version and checksum.
            data: the flat bytes, already verified by the receiver; valid only during the call.

        Raises:
            WeightsError: names or shapes differ from the engine's model, or the read-back does not match.
        """

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests with all their samples; they yield no completion."""

    def sleep(self) -> None:
        """Give the device's memory back (weights, KV cache); only while nothing runs. Does nothing when asleep.

        Raises:
            AsyncRLError: samples run.
        """

    def wake(self) -> None:
        """Take the memory again; the next :meth:`load_weights` brings the weights, and wakes by itself if need be.

        Does nothing when awake.
        """

    def close(self) -> None:
        """Free everything, child processes included."""


@runtime_checkable
class BroadcastEngine(Protocol):
    """What an engine has beside, if its workers can receive a version from the learner's device."""

    def devices(self) -> list[str]:
        """Of its workers, in order; see :func:`async_rl.weights.channel.device_name`."""

    def receive_weights(self, manifest: Manifest, offer: Offer) -> str:
        """Take a version by broadcast between two steps, as :meth:`Engine.load_weights` does from memory.

        Args:
            manifest: what was published.
            offer: the place of its first worker.

        Raises:
            WeightsError: it did not begin, and the version before goes on; or it broke off, or is not what was
                published: then nothing is proven.
        """
