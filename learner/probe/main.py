"""Half of the doctor's probe: an engine's samples against the learner's own path and an arbiter; names who is wrong.

    FILE.npz ─┬─ learner.logprobs (the path that trains) ─┐
              ├─ learner.probe.arbiter (plain transformers) ────┼─► learner.probe.diagnose ─► findings as JSON ─► doctor
              └─ what the engine said ────────────────────┘

``python -m learner.probe.main CONFIG.toml FILE.npz``; ``async-rl doctor CONFIG`` runs both halves.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from async_rl.config import load_config
from async_rl.models import device_for, load_causal_lm, resolve_model
from async_rl.probe import DELIVERED, FAULTS, IN_FLIGHT, OTHER, SHARES, START, limit_at
from async_rl.process import run_guarded
from learner.logprobs import predicted_logprobs
from learner.probe.arbiter import Arbiter, at_tokens, with_faults
from learner.probe.diagnose import Floats, blame, difference, judge_delivery, judge_split, judge_stamps

TRIED_SEQUENCES = 4
"""Sequences on which each tensor is tried as the one that was not delivered."""
TRIAL_S = 120.0
"""Most time for that."""
NEAR = 3
"""How many tokens around the stamped one are tried as the first of a new version."""


@dataclass(frozen=True, slots=True)
class Line:
    """One finding, as the doctor prints it."""

    level: Literal["ok", "note", "wrong"]
    name: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence that the engine sampled; N sampled tokens."""

    tokens: npt.NDArray[np.int64]
    """int64 [L], prompt first."""
    num_prompt: int
    logprobs: npt.NDArray[np.float32]
    """float32 [N], the engine's."""
    versions: npt.NDArray[np.int32]
    """int32 [N], the engine's stamps."""
    round: int
    temperature: float
    before: int
    """Version that was loaded when it was submitted."""
    after: int
    """Version that was loaded when it ended."""


class Probe:
    """Compares the engine's samples with arbiter and learner.

    Args:
        model: with the start weights.
        samples: of all rounds.
        kv_cache: whether the engine keeps keys and values of running requests over a swap, or recomputes them.
        dtype: of the model, for what counts as noise.
        plant: a fault of :data:`async_rl.probe.FAULTS`, of which those of the learner are planted here.
    """

    def __init__(self, model: Any, samples: Sequence[Sample], kv_cache: str, dtype: str, plant: str | None) -> None:
        self._arbiter = Arbiter(model)
        self._rounds = {r: [s for s in samples if s.round == r] for r in (START, OTHER, DELIVERED, IN_FLIGHT)}
        self._keep, self._dtype, self._plant = kv_cache == "keep", dtype, plant

    def lines(self) -> Iterator[Line]:
        """All findings; later ones are left out where an earlier fault would hide them."""
        if not self._rounds[START]:
            return
        line = self._start()
        yield line
        if line.level == "wrong" and "the engine" in line.detail:
            return
        delivered = self._delivered() if self._rounds[DELIVERED] else None
        if delivered:
            yield delivered
        stamps = self._stamps()
        if stamps.level == "ok" and self._rounds[IN_FLIGHT] and delivered and delivered.level == "ok":
            stamps = self._in_flight()
        yield stamps

    def _start(self) -> Line:
        """Start weights at two temperatures: each side against the arbiter."""
        wrong: dict[str, str] = {}
        for number in (START, OTHER):
            views = [with_faults(self._arbiter.logits(s.tokens), *_plain(s)) for s in self._rounds[number]]
            right_N = np.concatenate([right for right, _ in views])
            faults = {n: [np.concatenate(f) for f in zip(*(v[n] for _, v in views), strict=True)] for n in views[0][1]}
            engine_N = np.concatenate([s.logprobs for s in self._rounds[number]])
            learner_N = np.concatenate([self._learner(s) for s in self._rounds[number]])
            if number == START:
                apart_N = np.abs(engine_N - learner_N)
            T = self._rounds[number][0].temperature
            limit = limit_at(self._dtype, T)
            for side, found_N in (("engine", engine_N), ("learner", learner_N)):
                text = blame(side, found_N, right_N, faults, limit=limit, T=T)  # type: ignore[arg-type]
                if text:
                    wrong.setdefault(side, text)
        text = (
            f"engine and learner differ by {apart_N.mean():.1e} (largest {apart_N.max():.1e}) on {len(apart_N)} tokens"
        )
        if not wrong:
            return Line("ok", "log-probabilities", text)
        remedy = (
            "every ratio would be wrong from the first step: correct this side (actors.engine = 'torch' with "
            "model.dtype = 'float32' is the reference)"
        )
        return Line("wrong", "log-probabilities", "; ".join([*wrong.values(), text]), remedy)

    def _delivered(self) -> Line:
        """Version 1, all tensors changed, fresh requests."""
        name, samples = "delivered weights", self._rounds[DELIVERED]
        engine_N = np.concatenate([s.logprobs for s in samples])
        previous_N = self._right(samples)
        self._arbiter.take(1)
        right_N = self._right(samples)
        share = SHARES[self._dtype] * difference(right_N, previous_N)
        limit = max(limit_at(self._dtype, samples[0].temperature), share)
        found = judge_delivery(engine_N, right_N, previous_N, limit=limit)
        text = f"version 1, all tensors changed: engine and arbiter differ by {difference(engine_N, right_N):.1e}"
        if found is None:
            return Line("ok", name, text)
        remedy = "the engine's read-back must cover every tensor, and its prefix cache must not outlive a version"
        if found == "previous":
            text = (
                "the engine's log-probabilities after version 1 was loaded are those of version 0: no swap took place"
            )
        elif tensor := self._missing(samples[:TRIED_SEQUENCES], limit):
            text = (
                f"the engine's version 1 lacks one tensor: {tensor} is still that of version 0, it was never delivered"
            )
        else:
            text += ": at least one tensor is corrupted in the engine (no single tensor of version 0 explains it)"
        return Line("wrong", name, text, remedy)

    def _missing(self, samples: Sequence[Sample], limit: float) -> str | None:
        """The tensor that, left at version 0, explains what the engine said; the arbiter has version 1."""
        engine_N, deadline = np.concatenate([s.logprobs for s in samples]), time.monotonic() + TRIAL_S
        errors: dict[str, float] = {}
        for name in self._arbiter.names:
            if time.monotonic() > deadline:
                break
            self._arbiter.take_one(name, 0)
            errors[name] = difference(engine_N, self._right(samples))
            self._arbiter.take_one(name, 1)
        best = min(errors, key=lambda n: errors[n])
        return best if errors[best] <= limit else None

    def _stamps(self) -> Line:
        """Stamps of the rounds in which only one version sampled."""
        samples = [s for r in (START, OTHER, DELIVERED) for s in self._rounds[r]]
        loaded_N = np.repeat([s.before for s in samples], [len(s.versions) for s in samples])
        text = judge_stamps(loaded_N, np.concatenate([s.versions for s in samples]))
        if text:
            return Line("wrong", "version stamps", text, "every age, and so the staleness bound, would be wrong")
        return Line("ok", "version stamps", f"right on {len(loaded_N)} tokens of versions 0 to {loaded_N.max()}")

    def _in_flight(self) -> Line:
        """A version swapped in while requests run: whether the new one begins where the stamps say so."""
        name, caught = "version stamps", []
        for sample in self._rounds[IN_FLIGHT]:
            if text := judge_stamps(np.clip(sample.versions, sample.before, sample.after), sample.versions):
                return Line("wrong", name, text, "every age, and so the staleness bound, would be wrong")
            stamped = int((sample.versions == sample.before).sum())
            if 0 < stamped < len(sample.versions):
                caught.append((sample, stamped))
        if not caught:
            return Line("note", name, "no request was running when a version was swapped in, so that was not checked")
        limit = limit_at(self._dtype, caught[0][0].temperature)
        text = judge_split(self._split_errors(caught), limit, SHARES[self._dtype])
        if text:
            return Line("wrong", name, text, "every age, and so the staleness bound, would be wrong")
        return Line("ok", name, f"right on every token of {len(caught)} requests that a swap met in flight")

    def _split_errors(self, caught: Sequence[tuple[Sample, int]]) -> list[dict[int, float]]:
        """For each sequence and place of the swap, how far the engine is from what the arbiter then says."""
        self._arbiter.take(caught[0][0].before)
        old = [self._arbiter.prefill(s.tokens) for s, _ in caught]
        self._arbiter.take(caught[0][0].after)
        errors = []
        for (sample, stamped), (old_LV, cache) in zip(caught, old, strict=True):
            new_LV, count = self._arbiter.logits(sample.tokens), len(sample.versions)
            tried = range(max(0, stamped - NEAR), min(count, stamped + NEAR) + 1)
            errors.append({k - stamped: self._split_error(sample, k, old_LV, new_LV, cache) for k in tried})
        return errors

    def _split_error(
        self, sample: Sample, num_old: int, old_LV: torch.Tensor, new_LV: torch.Tensor, cache: Any
    ) -> float:
        inputs = sample.num_prompt - 1 + num_old if num_old else 0
        if self._keep and 0 < inputs < len(sample.tokens):
            new_LV = torch.cat([old_LV[:inputs], self._arbiter.go_on(sample.tokens, cache, inputs)])
        mixed_LV = torch.cat([old_LV[:inputs], new_LV[inputs:]])
        return difference(sample.logprobs, at_tokens(mixed_LV, *_plain(sample)))

    def _right(self, samples: Sequence[Sample]) -> Floats:
        return np.concatenate([at_tokens(self._arbiter.logits(s.tokens), *_plain(s)) for s in samples])

    def _learner(self, sample: Sample) -> Floats:
        """By the path that trains, with the learner's fault if one is planted."""
        tokens_L = torch.as_tensor(sample.tokens, device=next(self._arbiter.model.parameters()).device)
        source_N = torch.arange(sample.num_prompt - 1, len(sample.tokens) - 1, device=tokens_L.device)
        if self._plant == "shift-learner":
            source_N = (source_N - 1).clamp(min=0)
        temperature = 1.0 if self._plant == "temperature-learner" else sample.temperature
        targets_N = tokens_L[sample.num_prompt :]
        with torch.no_grad():
            found_N, _ = predicted_logprobs(self._arbiter.model, tokens_L[None, :-1], source_N, targets_N, temperature)
        return found_N.float().cpu().numpy()


def read(arrays: Mapping[str, npt.NDArray[Any]]) -> list[Sample]:
    """Sequences of a file of ``actors.probe.main``."""
    samples, start, sampled = [], 0, 0
    names = ("lengths", "prompt_lengths", "round", "temperature", "before", "after")
    for length, num_prompt, number, temperature, before, after in zip(
        *(arrays[n].tolist() for n in names), strict=True
    ):
        count = length - num_prompt
        samples.append(
            Sample(
                tokens=arrays["tokens"][start : start + length],
                num_prompt=num_prompt,
                logprobs=arrays["logprobs"][sampled : sampled + count],
                versions=arrays["versions"][sampled : sampled + count],
                round=number,
                temperature=temperature,
                before=before,
                after=after,
            )
        )
        start, sampled = start + length, sampled + count
    return samples


def read_back(refused: Sequence[str]) -> Line:
    """What the engine's own proof said."""
    if not refused:
        return Line("ok", "read-back", "the engine proved that it holds every version that was published")
    remedy = "a tensor was changed or left out between publisher and engine; nothing would be sampled from it"
    return Line("wrong", "read-back", f"the engine refused a version: {refused[0]}", remedy)


def _plain(sample: Sample) -> tuple[Any, int, float]:
    return sample.tokens, sample.num_prompt, sample.temperature


def main() -> None:
    """Compare and print the findings as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("file", type=Path)
    parser.add_argument("--plant", choices=FAULTS)
    args = parser.parse_args()
    config = load_config(args.config)
    model = load_causal_lm(resolve_model(config.model.path), config.model.dtype, device_for(config.model.device, 0))
    with np.load(args.file, allow_pickle=False) as arrays:
        samples, refused = read(arrays), [str(text) for text in arrays["refused"]]
    probe = Probe(model, samples, config.actors.kv_cache, config.model.dtype, args.plant)
    print(json.dumps([asdict(line) for line in (read_back(refused), *probe.lines())]))


if __name__ == "__main__":
    run_guarded(main)
