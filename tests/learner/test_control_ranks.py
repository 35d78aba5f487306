"""Learner ranks of a control run stay bit-equal, whatever is trained, and do what one rank does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from control_fragments import alone
from control_group_worker import STEPS, UPDATES, run

WORKER = Path(__file__).with_name("control_group_worker.py")
ROOT = WORKER.parents[2]


def start_ranks(world: int, out: Path) -> list[subprocess.Popen]:
    """What torchrun would start, without its own process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{WORKER.parent}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
    }
    command = [sys.executable, str(WORKER), str(out), str(world)]
    return [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]


def results(processes: list[subprocess.Popen], out: Path) -> list[dict]:
    world = len(processes)
    try:
        for process in processes:
            _, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(out / f"{world}.{rank}", weights_only=True) for rank in range(world)]


@pytest.mark.real
def test_two_and_four_ranks_stay_bit_equal_over_fifty_updates_and_make_one_as_one_rank_does(tmp_path):
    started = [start_ranks(world, tmp_path) for world in (2, 4)]
    single = run(alone(), tmp_path)
    assert STEPS * UPDATES == 50
    for processes in started:
        ranks = results(processes, tmp_path)
        for other in ranks[1:]:
            for name, (offset, count) in ranks[0]["layout"].items():
                span = slice(offset, offset + count)
                assert torch.equal(ranks[0]["many"][span], other["many"][span]), name
            for name in ("many", "once", "recurrent"):
                assert torch.equal(ranks[0][name], other[name]), name
            assert ranks[0]["metrics"] == other["metrics"]
            assert ranks[0]["lr"] == other["lr"]
        for name in ("once", "recurrent"):
            assert (ranks[0][name] - single[name]).abs().max() < 1e-5, name
        assert ranks[0]["metrics"]["updates_skipped"] == 0
    roles = {name.partition(".")[0] for name in single["layout"]}
    assert roles == {"policy", "critic", "rnd", "discriminator"}
    assert (
        sum("normalizer" in name for name in single["layout"]) >= 9
    )  # policy, critic, discriminator: mean, var, count
