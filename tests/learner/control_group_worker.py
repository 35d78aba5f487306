"""Run by ``test_control_ranks.py`` as one rank: steps of PPO with everything that it can have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from control_fragments import SIZE, build_domain, continuous, control_config, fragment
from safetensors.torch import save_file

from async_rl.process import leave
from learner.control.domain import ControlDomain
from learner.group import LearnerGroup

FRAGMENTS = 4
STEPS = 5
UPDATES = 10
"""Of each step."""


def main() -> None:
    out, world = Path(sys.argv[1]), int(sys.argv[2])
    group = LearnerGroup.start(world, "cpu", timeout_s=60)
    torch.save(run(group, out), out / f"{world}.{group.rank}")
    group.close()


def run(group: LearnerGroup, out: Path) -> dict[str, Any]:
    """One update with RND, then fifty with RND and AMP, as this rank of the group."""
    constant = {"lr_schedule": "constant"}
    once, _ = train(group, steps=1, algorithm={"epochs": 1, "minibatches": 1}, rnd={"weight": 0.5}, learner=constant)
    expert = out / f"expert{group.world}.{group.rank}"
    generator = torch.Generator().manual_seed(5)
    save_file({name: torch.randn(50, SIZE, generator=generator) for name in ("states", "next_states")}, expert)
    amp = {"style_weight": 0.5, "expert": str(expert), "hidden": [16]}
    many, metrics = train(group, steps=STEPS, algorithm={"epochs": 5, "minibatches": 2}, rnd={"weight": 0.5}, amp=amp)
    recurrent, _ = train(
        group,
        steps=1,
        algorithm={"epochs": 1, "minibatches": 1},
        policy={"network": "gru", "rnn_hidden": 8},
        learner=constant,
    )
    group.check_equal(many.flat)
    return {
        "once": once.flat.data,
        "recurrent": recurrent.flat.data,
        "many": many.flat.data,
        "layout": {slot.name: (slot.offset, slot.numel) for slot in many.flat.layout},
        "metrics": metrics,
        "lr": many.lr,
    }


def train(group: LearnerGroup, steps: int, **sections: dict[str, Any]) -> tuple[ControlDomain, dict[str, Any]]:
    sections["policy"] = {"normalize": True, **sections.get("policy", {})}
    sections["learner"] = {"ranks": group.world, **sections.get("learner", {})}
    config = control_config(buffer={"groups_per_step": FRAGMENTS}, **sections)
    domain, method = build_domain(config, continuous(), group, seed=group.rank)  # rank 0's networks must win
    group.broadcast_flat(domain.flat)
    metrics: dict[str, Any] = {}
    for step in range(steps):
        # all ranks have equal networks, so that each can make all fragments; their sizes differ
        made = [
            fragment(
                config, continuous(), method, seed=10 * step + i, version=step, num_envs=6 + i, next_step=i % 2 == 0
            )
            for i in range(FRAGMENTS)
        ]
        metrics = dict(domain.train_groups(made[group.rank :: group.world], step).metrics)
    return domain, metrics


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    leave()
