"""Run by ``test_group.py`` under torchrun: steps on this rank's share of fixed groups, or a scripted fault."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from conftest import build_groups, build_model, build_networks, mini_batch

from async_rl.config import parse_config
from async_rl.errors import AsyncRLError
from async_rl.process import leave
from async_rl.timer import StateTimer
from learner.group import LearnerGroup, LostRanksError
from learner.step import train_step
from learner.updater import Updater

IN_REWARD = {"kl_coef": 0.1, "kl_in": "reward", "kl_controller": "adaptive"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.1},
    "ppo": {"name": "ppo", "minibatches": 2, "entropy_coef": 0.01, **IN_REWARD},
    "ppo with a critic of its own": {"name": "ppo", "critic": "model"},
    "reinforce_pp": {"name": "reinforce_pp", **IN_REWARD},
    "gspo": {"name": "gspo"},
    "decoupled_ppo": {"name": "decoupled_ppo", "correction": "geometric_mask", "correction_high": 1.6},
}


def main() -> None:
    scenario, out = sys.argv[1], Path(sys.argv[2])
    group = LearnerGroup.start(int(sys.argv[3]), "cpu", timeout_s=2 if scenario == "freeze" else 60)
    if scenario == "train":
        torch.save({name: train(group, algorithm) for name, algorithm in ALGORITHMS.items()}, f"{out}.{group.rank}")
    elif scenario == "differ":
        differ(group, build(group, {}), out)
    elif scenario == "listen":
        listen(group, build(group, {}), out)
    else:
        lose(group, build(group, {}), out, signal.SIGSTOP if scenario == "freeze" else signal.SIGKILL)
    group.close()


def build(group: LearnerGroup, algorithm: dict[str, Any]) -> Updater:
    config = parse_config({"learner": {"lr": 1e-3, "micro_batch_tokens": 60}, "algorithm": algorithm})
    reference = build_model(seed=9) if config.needs_reference else None
    networks = build_networks(config, build_model(seed=group.rank), reference)  # rank 0's weights must win
    updater = Updater(config, networks, group, StateTimer())
    group.broadcast_flat(updater.flat)
    return updater


def train(group: LearnerGroup, algorithm: dict[str, Any]) -> dict[str, Any]:
    """Two steps of two mini-batches; the ranks' shares differ in size and in reward."""
    updater, metrics = build(group, algorithm), []
    for step in range(2):
        groups = sorted(build_groups(7, seed=step, version=step), key=lambda g: float(g.rewards.mean()))
        parts = [groups[:3], groups[3:]]
        shares = [part[: len(part) // 2 + 1] if group.rank == 0 else part[len(part) // 2 + 1 :] for part in parts]
        mine = parts if group.world == 1 else shares
        mini_batches = [mini_batch(share, of=part) for share, part in zip(mine, parts, strict=True)]
        metrics.append(train_step(updater._config, updater, mini_batches, step).metrics())
    group.check_equal(updater.flat)
    assert group.all_agree(True)
    assert group.all_agree(group.rank == 0) == (group.world == 1)
    assert group.broadcast_number(0.1 + group.rank) == 0.1
    names = group.sum_over_ranks(torch.tensor([float(int(group.draw_name(), 16))], dtype=torch.float64))
    assert float(names) % group.world == 0
    return {"data": updater.flat.data, "kl_coef": updater.kl_coef, "metrics": metrics}


def differ(group: LearnerGroup, updater: Updater, out: Path) -> None:
    group.check_equal(updater.flat)
    if group.rank == 1:
        updater.networks.policy.lm_head.weight.data[3, 3] += 1e-6
    try:
        group.check_equal(updater.flat)
    except AsyncRLError as error:
        out.with_suffix(f".{group.rank}").write_text(str(error))


def listen(group: LearnerGroup, updater: Updater, out: Path) -> None:
    """The addresses on which this rank and its torchrun listen."""
    group.all_reduce_flat(updater.flat)  # the ranks have met
    inodes = set(sockets("self") + sockets(str(os.getppid())))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                words = bytes.fromhex(local.partition(":")[0])
                address = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(str(ipaddress.ip_address(address)))
    group.all_agree(True)
    out.with_suffix(f".{group.rank}").write_text(json.dumps(found))


def sockets(pid: str) -> list[str]:
    """``socket:[inode]`` of what a process has open; descriptors that are closed meanwhile are left out."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def lose(group: LearnerGroup, updater: Updater, out: Path, fault: signal.Signals) -> None:
    """In the middle of step 1 something happens to rank 1; rank 0 says what that looks like and how long it took."""
    pids = group.sum_over_ranks(torch.tensor([float(os.getpid() * group.rank)], dtype=torch.float64))
    for group.step in range(2):
        if group.rank == 1 and group.step == 1:
            os.kill(os.getpid(), fault)
            os._exit(0)  # woken up again
        began = time.monotonic()
        try:
            group.all_reduce_flat(updater.flat)
        except LostRanksError as error:
            out.write_text(f"{time.monotonic() - began}\n{error.exit_code}\n{error}")
    if fault == signal.SIGSTOP:
        os.kill(int(pids), signal.SIGCONT)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    leave()
