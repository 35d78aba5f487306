"""Half of the doctor's probe: what the configured engine samples, under weights that both halves know, as a file.

    load 0 ─► sample ─► sample at another temperature ─► load 1 ─► sample ─► submit, load 2 in flight, sample
                 └── tokens, log-probabilities, version stamps, what was loaded when ──► FILE.npz ──► learner.probe

Nothing is trained. ``python -m actors.probe.main CONFIG.toml --out FILE.npz``; ``async-rl doctor CONFIG`` runs both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.engines.base import Completion, Request
from actors.engines.factory import make_engine
from actors.probe.faults import PlantedEngine, Probed
from async_rl.config import Config, LoraConfig, load_config
from async_rl.errors import ConfigError, DeadlineError, WeightsError
from async_rl.models import context_length, load_causal_lm, load_tokenizer, resolve_model
from async_rl.probe import DELIVERED, FAULTS, IN_FLIGHT, OTHER, START, changed, other_temperature
from async_rl.process import host_id, run_guarded
from async_rl.tasks import load_task
from async_rl.tasks.prompt import encode_prompt
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine

PROMPTS, SAMPLES = 16, 2
NEW_TOKENS = 32
"""Most tokens of a completion."""
FLYING_PROMPTS, FLYING_TOKENS = 4, 64
"""Requests during which a version is loaded: few, since the arbiter tries each token as the new version's first."""
ATTEMPTS = 8
"""How often a version is loaded before a request was caught in flight; each attempt waits twice as long."""
FIRST_WAIT_S = 0.01
TIMEOUT_S = 120.0
MIN_CHUNK, MAX_CHUNKS = 4096, 1 << 16


@dataclass(slots=True)
class Record:
    """What was sampled: sequences of all rounds, and what the engine refused."""

    prompts: list[tuple[int, ...]] = field(default_factory=list)
    """Of each sequence."""
    completions: list[Completion] = field(default_factory=list)
    facts: list[tuple[int, float, int, int]] = field(default_factory=list)
    """Of each sequence: round, temperature, version that was loaded at its start and at its end."""
    refused: list[str] = field(default_factory=list)
    """What the engine said when it did not take a version."""

    def add(self, requests: Sequence[Request], completions: Sequence[Completion], round: int, before: int) -> None:
        """Add a round; ``IN_FLIGHT`` ended one version later than it began."""
        by_id = {request.id: request for request in requests}
        for completion in completions:
            request = by_id[completion.request_id]
            self.prompts.append(request.prompt)
            self.completions.append(completion)
            self.facts.append((round, request.temperature, before, before + (round == IN_FLIGHT)))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Sequences laid end to end, per sequence its lengths and facts, per sampled token what the engine said."""
        sequences = [
            np.append(np.asarray(p, np.int64), c.tokens) for p, c in zip(self.prompts, self.completions, strict=True)
        ]
        joined = [np.empty(0, np.int64), *sequences]
        rounds, temperatures, before, after = np.array(self.facts, np.float64).reshape(-1, 4).T
        return {
            "tokens": np.concatenate(joined).astype(np.int64),
            "lengths": np.array([len(s) for s in sequences], np.int64),
            "prompt_lengths": np.array([len(p) for p in self.prompts], np.int64),
            "logprobs": np.concatenate([np.empty(0, np.float32), *(c.logprobs for c in self.completions)]),
            "versions": np.concatenate([np.empty(0, np.int32), *(c.versions for c in self.completions)]),
            "round": rounds.astype(np.int64),
            "temperature": temperatures,
            "before": before.astype(np.int64),
            "after": after.astype(np.int64),
            "refused": np.array(self.refused, np.str_),
        }


def flat_version(tensors: Mapping[str, torch.Tensor], version: int) -> tuple[Manifest, memoryview]:
    """A version of the weights in one flat buffer, each tensor in chunks of its own."""
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    chunk_bytes = max(MIN_CHUNK, -(-total // MAX_CHUNKS) // 4 * 4 + 4)
    layout, parts, offset = [], [], 0
    for name, start in tensors.items():
        tensor = changed(start, name, version)
        layout.append(Tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        part = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        parts += [part, np.zeros(-part.nbytes % chunk_bytes, np.uint8)]
        offset += parts[-2].nbytes + parts[-1].nbytes
    data = memoryview(np.concatenate(parts))
    chunks = chunk_checksums(data, chunk_bytes)
    manifest = Manifest(
        version=version,
        run_id="probe",
        tensors=tuple(layout),
        nbytes=offset,
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        checksum=combine(chunks),
        segment="",
        host=host_id(),
    )
    return manifest, data


def finish(engine: Probed, wanted: int) -> list[Completion]:
    """The next ``wanted`` completions, in order of request and sample.

    Raises:
        DeadlineError: the engine did not finish in time.
    """
    deadline = time.monotonic() + TIMEOUT_S
    done: list[Completion] = []
    while len(done) < wanted:
        if time.monotonic() > deadline:
            raise DeadlineError(f"the engine finished {len(done)} of {wanted} samples in {TIMEOUT_S:.0f} s")
        done += engine.step(1.0)
    return sorted(done, key=lambda c: (c.request_id, c.sample))


def sample(engine: Probed, requests: Sequence[Request]) -> list[Completion]:
    """All completions of the requests."""
    engine.submit(requests)
    return finish(engine, sum(r.num_samples for r in requests))


def record(engine: Probed, tensors: Mapping[str, torch.Tensor], requests: Sequence[Request], context: int) -> Record:
    """Run all rounds; ends early when the engine refuses a version, which is then in the record.

    Args:
        engine: fresh.
        tensors: of the start model, by name.
        requests: at the configured temperature.
        context: longest sequence.
    """
    found = Record()
    try:
        engine.load_weights(*flat_version(tensors, 0))
        found.add(requests, sample(engine, requests), START, 0)
        other = [replace(r, temperature=other_temperature(r.temperature)) for r in requests]
        found.add(other, sample(engine, other), OTHER, 0)
        engine.load_weights(*flat_version(tensors, 1))
        found.add(requests, sample(engine, requests), DELIVERED, 1)
        longest = max(len(r.prompt) for r in requests)
        flying = [replace(r, max_new_tokens=min(FLYING_TOKENS, context - longest)) for r in requests[:FLYING_PROMPTS]]
        found.add(flying, *_in_flight(engine, tensors, flying))
    except WeightsError as error:
        found.refused.append(str(error))
    return found


def _in_flight(
    engine: Probed, tensors: Mapping[str, torch.Tensor], requests: Sequence[Request]
) -> tuple[list[Completion], int, int]:
    """Load the next version while requests run, again and again until one was caught in the middle."""
    wanted, wait_s = sum(r.num_samples for r in requests), FIRST_WAIT_S
    for version in range(1, 1 + ATTEMPTS):
        prepared = flat_version(tensors, version + 1)
        engine.submit(requests)
        early = engine.step(wait_s) + engine.step(wait_s)
        engine.load_weights(*prepared)
        completions = early + finish(engine, wanted - len(early))
        if any(len(np.unique(c.versions)) > 1 for c in completions):
            break
        wait_s *= 2
    return sorted(completions, key=lambda c: (c.request_id, c.sample)), IN_FLIGHT, version


def make_requests(config: Config, folder: Path) -> list[Request]:
    """Requests for the first training problems that fit the model's context.

    Raises:
        ConfigError: none does.
    """
    tokenizer, context = load_tokenizer(folder), context_length(folder)
    new = min(config.sampling.max_new_tokens, NEW_TOKENS)
    problems = load_task(config.task, config.seed).train[: 4 * PROMPTS]
    prompts = [encode_prompt(tokenizer, p, config.task) for p in problems]
    fitting = [p for p in prompts if len(p) + new <= context][:PROMPTS]
    if not fitting:
        raise ConfigError(
            f"no prompt of the first {len(prompts)} leaves room for {new} tokens in a context of {context}"
        )
    return [
        Request(
            id=i,
            prompt=prompt,
            num_samples=SAMPLES,
            seed=(config.seed, i),
            max_new_tokens=new,
            temperature=config.sampling.temperature,
        )
        for i, prompt in enumerate(fitting)
    ]


def main() -> None:
    """Sample and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plant", choices=FAULTS)
    args = parser.parse_args()
    config = load_config(args.config)
    if config.lora.is_on:  # versions of the probe are whole models, so it is the base that is probed
        config = config.model_copy(update={"lora": LoraConfig()})
    folder = resolve_model(config.model.path)
    requests = make_requests(config, folder)
    tensors = dict(load_causal_lm(folder, config.model.dtype, "cpu").named_parameters())
    seen: list[str] = []
    engine: Probed = make_engine(config, folder, "probe")
    if args.plant:
        engine = PlantedEngine(engine, args.plant, seen)
    try:
        found = record(engine, tensors, requests, context_length(folder))
    finally:
        engine.close()
    found.refused += seen
    with args.out.open("wb") as file:
        np.savez(file, allow_pickle=False, **found.arrays())


if __name__ == "__main__":
    run_guarded(main)
