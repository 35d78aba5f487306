"""Any algorithm on a language model, synchronously, in one process: the whole thing without sockets and buffer.

    problems ─► engine samples with the present weights ─► verifier ─► updates of a step ─► engine gets the new weights
        ▲                                                                                          │
        └──────────────────────────────────── next step ◄──────────────────────────────────────────┘

Read this first: it uses the same parts as the asynchronous run, so it is the way to debug a task or a loss, and the
oracle for the other: with ``buffer.max_staleness = 0`` and one actor, ``async-rl run`` makes the very same updates.

    python scripts/sync_grpo.py arithmetic --set steps=20 --out runs/sync
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from actors.engines.base import Completion, Request
from actors.engines.factory import make_engine
from actors.evaluation.heldout import answer, rewards_of
from actors.verifiers.pool import VerifierPool
from async_rl.buffer.stream import task_index
from async_rl.config import Config, load_config
from async_rl.data import Group, make_group, token_trajectory
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.metrics import Metrics
from async_rl.models import load_tokenizer, resolve_model, stop_token_ids
from async_rl.tasks import Problem, load_task
from async_rl.tasks.prompt import decode_completion, encode_prompt
from async_rl.timer import StateTimer
from async_rl.weights.segment import SegmentReader
from learner.adapter import published
from learner.adapter_files import save_adapter
from learner.group import LearnerGroup, read_placement
from learner.networks import load_networks
from learner.publisher import Publisher
from learner.shard import MiniBatch
from learner.step import train_step
from learner.updater import Updater


class SyncRun:
    """All parts of a run, in this process."""

    def __init__(self, config: Config) -> None:
        if config.task.environment or config.stages or config.reward.model or config.reward.judge:
            raise ConfigError("this script plays single turns and asks the verifier alone: use `async-rl run`")
        self.config = config
        folder = resolve_model(config.model.path)
        placement = read_placement({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, 1, config.model.device)
        group = LearnerGroup(placement, config.learner.timeout_s)
        self.data = load_task(config.task, config.seed)
        self.tokenizer, self.stops = load_tokenizer(folder), stop_token_ids(folder)
        self.verifiers = VerifierPool(config.task.verifier or self.data.verifier, config.task.timeout_s, 1)
        self.engine = make_engine(config, folder, "sync")
        self.updater = Updater(config, load_networks(config, folder, group.device), group, StateTimer())
        slots = published(self.updater.flat.slots("policy"))
        self.publisher = Publisher(f"sync-{os.getpid()}", slots, config.weights.chunk_bytes, config.model.dtype)
        self.reader = SegmentReader()

    def publish(self, version: int) -> None:
        """Hand the present weights to the engine."""
        manifest = self.publisher.publish(self.updater.flat.data, version, evaluated=False)
        self.engine.load_weights(manifest, self.reader.open(manifest))

    def rollout(self, step: int) -> list[Group]:
        """Sample the groups of one step, in ordinal order, all with version ``step``."""
        sampling, size = self.config.sampling, self.config.buffer.groups_per_step
        ordinals = range(step * size, (step + 1) * size)
        tasks = {o: task_index(self.config.seed, o, len(self.data.train)) for o in ordinals}
        prompts = {o: encode_prompt(self.tokenizer, self.data.train[t], self.config.task) for o, t in tasks.items()}
        self.engine.submit(
            [
                Request(
                    id=o,
                    prompt=prompts[o],
                    num_samples=sampling.group_size,
                    seed=(self.config.seed, o, 0),
                    max_new_tokens=sampling.max_new_tokens,
                    temperature=sampling.temperature,
                )
                for o in ordinals
            ]
        )
        done: dict[int, list[Completion]] = {o: [] for o in ordinals}
        while self.engine.num_running:
            for completion in self.engine.step(1.0):
                done[completion.request_id].append(completion)
        groups = []
        for ordinal, completions in done.items():
            completions.sort(key=lambda c: c.sample)
            problem = self.data.train[tasks[ordinal]]
            rewards = self.score([problem] * len(completions), completions)
            groups.append(
                make_group(
                    ordinal=ordinal,
                    attempt=0,
                    task_index=tasks[ordinal],
                    trajectories=[
                        token_trajectory(
                            prompt=prompts[ordinal],
                            completion=c.tokens,
                            logprobs=c.logprobs,
                            versions=c.versions,
                            reward=reward,
                        )
                        for c, reward in zip(completions, rewards, strict=True)
                    ],
                )
            )
        return groups

    def score(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
        """Reward of each completion; a verifier that fails ends the run."""
        rewards, failures = rewards_of(self.verifiers, problems, completions, self.decode, lambda: None)
        if failures:
            raise AsyncRLError(f"the verifier could not score {failures} of {len(problems)} completions")
        return rewards

    def decode(self, ids: Sequence[int]) -> str:
        """The text that is verified."""
        return decode_completion(self.tokenizer, ids, self.stops)

    def train(self, step: int, groups: list[Group]) -> Metrics:
        """Update on the groups: the same mini-batches as the buffer server makes for one rank."""
        count = self.config.algorithm.minibatches
        bounds = [i * len(groups) // count for i in range(count + 1)]
        mini_batches = [
            MiniBatch(
                groups=part,
                num_tokens=sum(g.num_sampled for g in part),
                num_sequences=sum(len(g) for g in part),
                lengths_per_rank=[[n for g in part for n in g.lengths]],
            )
            for part in (groups[first:last] for first, last in pairwise(bounds))
        ]
        return train_step(self.config, self.updater, mini_batches, step).metrics()

    def evaluate(self) -> float:
        """Greedy accuracy on the held-out problems."""
        problems = self.data.heldout[: self.config.eval.problems]
        prompts = [encode_prompt(self.tokenizer, p, self.config.task) for p in problems]
        completions = answer(self.engine, prompts, self.config.sampling.max_new_tokens, lambda: None)
        return sum(r >= 1 for r in self.score(problems, completions)) / len(problems)

    def close(self) -> None:
        """Free segments and children."""
        self.verifiers.close()
        self.engine.close()
        self.reader.close()
        self.publisher.close()


def main() -> None:
    """Train, print a line a step, write metrics and the final weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="preset or file.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--out", type=Path, default=Path("runs/sync"))
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    if config.sharded:
        parser.error("learner.strategy = 'fsdp' shares a model among processes, this is one: set it to 'flat'")
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the segments are freed
    run = SyncRun(config)
    try:
        run.publish(0)
        print(f"held-out accuracy at the start {run.evaluate():.3f}", flush=True)
        with (args.out / "metrics.jsonl").open("w") as file:
            for step in range(config.steps):
                began = time.perf_counter()
                metrics = run.train(step, run.rollout(step))
                run.publish(step + 1)
                file.write(json.dumps({"step": step, **metrics}) + "\n")
                seconds = time.perf_counter() - began
                print(f"step {step:4d}  reward {metrics['reward/mean']:.3f}  {seconds:.2f} s", flush=True)
        print(f"held-out accuracy at the end {run.evaluate():.3f}", flush=True)
        tensors = run.updater.flat.tensors("policy")
        if config.lora.is_on:
            save_adapter(args.out, tensors, config)
        else:
            run.updater.networks.policy.save_pretrained(args.out / "hf", state_dict=tensors)
    finally:
        run.close()


if __name__ == "__main__":
    main()
