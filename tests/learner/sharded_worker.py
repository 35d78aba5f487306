"""Run by ``test_sharded.py``: the same updates as one flat rank, with shards over all ranks.

imports, once ─► fork of 2 ranks ─► what they found, 2.json
              └► fork of 4 ranks ─► 4.json
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import build_groups, build_model, build_networks, mini_batch
from token_domains import domain_of
from torch.distributed.tensor import DTensor

from async_rl.config import parse_config
from async_rl.models import load_causal_lm
from async_rl.process import die_with_parent
from async_rl.timer import StateTimer
from learner import parts, sharded, together
from learner.group import LearnerGroup, LostRanksError, Placement
from learner.optimizer import MOMENTS
from learner.publisher import Publisher
from learner.step import train_step
from learner.together import help_saving, stop_helping
from learner.updater import Updater

STEPS = 5
KL = {"kl_coef": 0.1, "kl_controller": "adaptive"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.1},
    "ppo": {"name": "ppo", "entropy_coef": 0.01, "kl_in": "reward", **KL},
    "a critic of its own": {"name": "ppo", "critic": "model"},
    "decoupled_ppo": {"name": "decoupled_ppo", "correction": "geometric_mask", "correction_high": 1.6},
}
FSDP, ZERO = {"strategy": "fsdp"}, {"shard_optimizer": True}
CLIP = 0.1
"""Well below the norms here, so that every update is clipped."""
ALONE = LearnerGroup(Placement(0, 1, torch.device("cpu")), timeout_s=60)
assert sharded, "imported before the ranks are forked: each would take seconds for it"


def main() -> None:
    build_model()  # imports what each rank would import
    for world in (2, 4):
        children = [fork(rank, world, Path(sys.argv[1])) for rank in range(world)]
        failed = [status for _, status in (os.waitpid(child, 0) for child in children) if status]
        if failed:
            sys.exit(1)


def fork(rank: int, world: int, out: Path) -> int:
    """Start a rank; its process id."""
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        os.environ |= {"MASTER_PORT": str(world), "WORLD_SIZE": str(world)}  # the first tells the two groups apart
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        work(world, out / str(world))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # there is no group any more to leave in order


def work(world: int, out: Path) -> None:
    group = LearnerGroup.start(world, "cpu", timeout_s=60)
    kinds = ALGORITHMS if world == 2 else {"grpo": ALGORITHMS["grpo"]}
    found: dict[str, Any] = {"updates": {name: updates(group, kind) for name, kind in kinds.items()}}
    found |= {"zero": zero(group), "checkpoint": checkpoint(group, out)}
    if world == 2:
        found |= {"skipped": skipped(group), "full": full(group, out)}
        found["bfloat16"] = updates(group, ALGORITHMS["grpo"], "bfloat16")
        found["published"] = [published(group, dtype) for dtype in ("float32", "bfloat16")]
        found["lost"] = lost(group)
    if group.rank == 0:
        out.with_suffix(".json").write_text(json.dumps(found))


def build(group: LearnerGroup, algorithm: dict[str, Any], seed: int, dtype: str = "float32", **learner: Any) -> Updater:
    ranks = {"ranks": group.world} if group.world > 1 else {}
    config = parse_config(
        {
            "model": {"dtype": dtype},
            "learner": {
                "lr": 1e-4,
                "micro_batch_tokens": 60,
                "max_grad_norm": CLIP,
                "weight_decay": 0.01,
                **ranks,
                **learner,
            },
            "algorithm": algorithm,
        }
    )
    reference = build_model(seed=9) if config.needs_reference else None
    updater = Updater(config, build_networks(config, build_model(tied=True, seed=seed), reference), group, StateTimer())
    group.broadcast_flat(updater.flat)
    return updater


def train(updater: Updater, steps: range) -> list[dict[str, float]]:
    """Each rank has other groups, some ranks have none in a mini-batch."""
    group, metrics = updater.group, []
    for step in steps:
        groups = sorted(build_groups(3, seed=step, version=step), key=lambda g: float(g.rewards.mean()))
        batch = mini_batch(groups[group.rank :: group.world], of=groups)
        metrics.append(train_step(updater.config, updater, [batch], step).metrics())
    return metrics


def vectors(updater: Updater) -> dict[str, torch.Tensor]:
    """Parameters and moments, whole, by name."""
    size = updater.flat.size
    whole = {name: torch.zeros(size, dtype=torch.float64) for name in ("data", "exp_avg", "exp_avg_sq")}
    parts = [("data", s.first, s.values.flatten()) for s in getattr(updater.flat, "shards", ())]
    for name, first, values in [*parts, *updater.optimizer.parts()]:
        if name in whole:
            whole[name][first : first + values.numel()] = values
    return {name: updater.group.sum_over_ranks(vector) for name, vector in whole.items()}


def updates(group: LearnerGroup, algorithm: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Rank 0's weights must win; the largest difference to one flat rank, and both last metrics."""
    one, many = build(ALONE, algorithm, 0, dtype), build(group, algorithm, group.rank, dtype, **FSDP)
    theirs, ours = train(one, range(STEPS)), train(many, range(STEPS))
    group.check_equal(many.flat)
    keys = ("loss/policy", "grad_norm", "tokens/step", "kl/behaviour", "entropy")
    whole, moments = vectors(many), one.optimizer.state()
    difference = (whole["data"] - one.whole.data).abs()
    moved = (one.whole.data - build(ALONE, algorithm, 0, dtype).whole.data).abs()
    return {
        "difference": float(difference.max()),
        "moments": max(float((whole[n] - moments[n]).abs().max() / moments[n].abs().max()) for n in MOMENTS),
        "moved": float(moved.max()),
        "relative": float(difference.sum() / moved.sum()),
        "metrics": [{key: row[key] for key in keys if key in row} for row in (theirs[-1], ours[-1])],
    }


def zero(group: LearnerGroup) -> dict[str, Any]:
    """Sharded moments beside whole ones, both on this group."""
    whole, slices = build(group, {}, 0), build(group, {}, 0, **ZERO)
    for updater in (whole, slices):
        train(updater, range(STEPS))
    held = sum(values.numel() for name, _, values in slices.optimizer.parts() if name == "exp_avg")
    return {
        "equal": torch.equal(whole.whole.data, slices.whole.data),
        "held": held / whole.flat.size,
    }


def skipped(group: LearnerGroup) -> bool:
    """The last rank's log-probabilities are broken: no rank may move, all must say so."""
    updater = build(group, {}, 0, **FSDP)
    before = vectors(updater)["data"]
    groups = build_groups(4 * group.world, seed=1)
    mine = groups[group.rank :: group.world]
    if group.rank == group.world - 1:
        broken = [part.arrays["logprobs"] * np.float32("nan") for part in mine]
        mine = [replace(p, arrays={**p.arrays, "logprobs": b}) for p, b in zip(mine, broken, strict=True)]
    prepared = updater.prepare([mini_batch(mine, of=groups)], 3)
    applied = updater.apply(updater.gradient(prepared[0]), 3, adapt=False)
    return applied.skipped and torch.equal(vectors(updater)["data"], before)


def lost(group: LearnerGroup) -> str:
    """The last rank ends after its forward pass; what that is called on the others, who are in their backward pass."""
    updater, batch = build(group, {}, 0, **FSDP), mini_batch(build_groups(2))
    prepared = updater.prepare([batch], 3)
    if group.rank == group.world - 1:
        torch.Tensor.backward = lambda *_, **__: os._exit(0)  # type: ignore[method-assign]
    group.step = 7
    try:
        updater.gradient(prepared[0])
    except LostRanksError as error:
        return str(error)
    return ""


def published(group: LearnerGroup, dtype: str) -> dict[str, Any]:
    """The same version, from shards and from the flat vector; and how many layers were whole at a time."""
    one, many = build(ALONE, {}, 0, dtype), build(group, {}, 0, dtype, **FSDP)
    if group.rank:
        many.flat.assist()
        return {}
    layers = many.networks.policy.base_model.layers
    most = 0

    def watched() -> Any:
        nonlocal most
        for piece in many.flat.pieces():
            most = max(most, sum(not isinstance(layer.mlp.up_proj.weight, DTensor) for layer in layers))
            yield piece

    publisher = Publisher(f"sharded-{uuid.uuid4().hex[:8]}", many.flat.slots("policy"), 1024, dtype)
    try:
        ours = publisher.publish_pieces(watched(), 0, evaluated=False)
        theirs = publisher.publish(one.whole.data, 1, evaluated=False)
    finally:
        publisher.close()
    return {"equal": ours.checksum == theirs.checksum and ours.chunks == theirs.chunks, "most": most}


def checkpoint(group: LearnerGroup, out: Path) -> dict[str, Any]:
    """Shards, then flat, then shards again, on from one checkpoint to the next; the largest difference to no stop."""
    algorithm, found = {"name": "ppo", "critic": "model"}, {}
    straight = build(group, algorithm, 0, **FSDP)
    train(straight, range(2))
    first = save(straight, out / "first")
    group.hosts, parts.BLOCK = 2, 200  # disks of their own: rank 0 receives all, in blocks, and writes it
    sent = save(straight, out / "sent")
    group.hosts = 1
    files = sorted(file.relative_to(first) for file in first.rglob("*.safetensors"))
    found["sent"] = len(files) == 3 and all((first / f).read_bytes() == (sent / f).read_bytes() for f in files)
    flat = load(ALONE, algorithm, first)
    found["to flat"] = same(flat, straight)
    slices = load(group, algorithm, first, **ZERO)
    second = save(slices, out / "second")
    back = load(group, algorithm, second, **FSDP)
    found["back"] = same(back, straight)
    for updater in (straight, back):
        train(updater, range(2, 4))
    found["on"] = same(back, straight)
    model = load_causal_lm(first / "hf", "float32", "cpu")
    named = dict(model.named_parameters())
    found["folder"] = all(
        torch.equal(named[slot.name], flat.whole.data[slot.offset : slot.offset + slot.numel].view(slot.shape))
        for slot in flat.flat.slots("policy")
    )
    found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
    return found


def save(updater: Updater, folder: Path) -> Path:
    domain, group = domain_of(updater), updater.group
    if group.rank:
        help_saving(group, domain.save)
    else:
        folder.mkdir(parents=True)
        domain.save(folder)
        stop_helping(group)
    return folder


def full(group: LearnerGroup, out: Path) -> list[str]:
    """A disk that is full for the last rank, then no more: what rank 0 is told of both tries."""
    updater = build(group, {}, 0, **FSDP)
    domain, folder, said = domain_of(updater), out / "full", []
    write = together.write_parts

    def fails(*_: Any) -> None:
        together.write_parts = write
        raise OSError("no space left")

    if group.rank == group.world - 1:
        together.write_parts = fails
    if group.rank:
        help_saving(group, domain.save)
        return []
    folder.mkdir(parents=True)
    for _ in range(2):
        try:
            domain.save(folder)
            said.append("saved")
        except OSError as error:
            said.append(str(error))
    stop_helping(group)
    return said


def load(group: LearnerGroup, algorithm: dict[str, Any], folder: Path, **learner: Any) -> Updater:
    updater = build(group, algorithm, 0, **learner)
    policy = load_causal_lm(folder / "hf", "float32", "cpu")
    config = updater.config
    updater = Updater(config, build_networks(config, policy), group, StateTimer())
    domain_of(updater).load(folder)
    return updater


def same(updater: Updater, other: Updater) -> float:
    """Largest difference of parameters and moments."""
    pairs = [(vectors(u), u) for u in (updater, other)]
    for found, u in pairs:
        if not hasattr(u.flat, "shards"):
            found["data"] = u.whole.data.double()
    (mine, _), (theirs, _) = pairs
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
