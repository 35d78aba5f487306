"""Run by ``test_group.py`` under torchrun: three updates on this rank's share of fixed groups, or a scripted fault."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from conftest import build_groups, build_model, mini_batch

from async_rl.config import parse_config
from async_rl.errors import AsyncRLError
from async_rl.process import leave
from async_rl.timer import StateTimer
from learner.group import LearnerGroup
from learner.updater import Updater


def main() -> None:
    scenario, out = sys.argv[1], Path(sys.argv[2])
    group = LearnerGroup.start(int(sys.argv[3]), "cpu", timeout_s=60)
    config = parse_config({"learner": {"lr": 1e-3, "micro_batch_tokens": 60}, "algorithm": {"kl_coef": 0.0}})
    updater = Updater(config, build_model(seed=group.rank), None, group, StateTimer())  # rank 0's weights must win
    group.broadcast_flat(updater.flat)
    if scenario == "differ":
        differ(group, updater, out)
    elif scenario == "lose":
        lose(group, updater, out)
    else:
        train(group, updater, out)
    group.close()


def train(group: LearnerGroup, updater: Updater, out: Path) -> None:
    tokens = 0.0
    for step in range(3):
        groups = build_groups(7, seed=step)
        mine = groups[group.rank :: group.world]
        totals = updater.gradient(mini_batch(mine, of=groups), version=3)
        updater.apply(totals, step, adapt=False)
        tokens += float(totals["tokens"])
    group.check_equal(updater.flat)
    assert group.all_agree(True)
    assert group.all_agree(group.rank == 0) == (group.world == 1)
    assert group.broadcast_number(0.1 + group.rank) == 0.1
    if group.rank == 0:
        torch.save({"data": updater.flat.data, "tokens": tokens}, out)


def differ(group: LearnerGroup, updater: Updater, out: Path) -> None:
    group.check_equal(updater.flat)
    if group.rank == 1:
        updater.model.lm_head.weight.data[3, 3] += 1e-6
    try:
        group.check_equal(updater.flat)
    except AsyncRLError as error:
        out.with_suffix(f".{group.rank}").write_text(str(error))


def lose(group: LearnerGroup, updater: Updater, out: Path) -> None:
    """Rank 1 leaves without a word; rank 0 says what that looks like."""
    if group.rank == 1:
        os._exit(0)
    try:
        group.all_reduce_flat(updater.flat)
    except AsyncRLError as error:
        out.write_text(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    leave()
