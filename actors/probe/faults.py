"""Faults that the doctor plants on purpose, to show that its probe would find them.

probe ─► PlantedEngine ─► engine         temperature, shift, version: what goes in or comes out is changed
              │
              └─ corrupt, missing: first with the honest manifest, which the engine's own proof must refuse; then past
                 that proof, with a manifest of the wrong bytes, so that the log-probabilities must show it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from actors.engines.base import Completion, Request
from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine


class Probed(Protocol):
    """What the probe uses of an engine."""

    def submit(self, requests: Sequence[Request]) -> None:
        """See :class:`actors.engines.base.Engine`, as for the others."""

    def step(self, timeout_s: float) -> list[Completion]:
        """One unit of work."""

    def load_weights(self, manifest: Manifest, data: memoryview) -> str:
        """Swap in a version."""

    def close(self) -> None:
        """Free everything."""


class PlantedEngine:
    """An engine with one fault; see :data:`async_rl.probe.FAULTS`, of which those of the learner change nothing here.

    Args:
        engine: a sound one.
        fault: its name.
        refused: gets what the engine says when its own proof finds the fault.
    """

    def __init__(self, engine: Probed, fault: str, refused: list[str]) -> None:
        self._engine, self._fault, self._refused = engine, fault, refused
        self._previous = b""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, at temperature 1 if that is the fault."""
        if self._fault == "temperature":
            requests = [replace(r, temperature=1.0) for r in requests]
        self._engine.submit(requests)

    def step(self, timeout_s: float) -> list[Completion]:
        """Completions, with shifted log-probabilities or wrong stamps if that is the fault."""
        done = self._engine.step(timeout_s)
        if self._fault == "shift":
            return [replace(c, logprobs=np.roll(c.logprobs, 1)) for c in done]
        if self._fault == "version":
            return [replace(c, versions=c.versions + 1) for c in done]
        return done

    def load_weights(self, manifest: Manifest, data: memoryview) -> str:
        """Swap in a version, one tensor of it wrong if that is the fault; the start weights arrive whole."""
        if self._fault not in ("corrupt", "missing"):
            return self._engine.load_weights(manifest, data)
        whole, self._previous = self._previous, bytes(data)
        if not whole:
            return self._engine.load_weights(manifest, data)
        wrong = bytearray(data)
        self._spoil(wrong, whole, manifest.tensors[len(manifest.tensors) // 2])
        try:
            self._engine.load_weights(manifest, memoryview(wrong))
        except WeightsError as error:
            if not self._refused:
                self._refused.append(str(error))
        chunks = chunk_checksums(memoryview(wrong), manifest.chunk_bytes)
        self._engine.load_weights(replace(manifest, chunks=chunks, checksum=combine(chunks)), memoryview(wrong))
        return manifest.checksum

    def close(self) -> None:
        """Free everything."""
        self._engine.close()

    def _spoil(self, data: bytearray, previous: bytes, tensor: Tensor) -> None:
        end = tensor.offset + tensor.nbytes
        if self._fault == "missing":
            data[tensor.offset : end] = previous[tensor.offset : end]
            return
        elements = np.frombuffer(bytes(data[tensor.offset : end]), f"V{4 if tensor.dtype == 'float32' else 2}")
        data[tensor.offset : end] = elements[::-1].tobytes()
