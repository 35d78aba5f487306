"""A learner group over two hosts that share no folder, here two commands on one machine that meet over the loopback."""

import os
import signal
import socket

import pytest

from tests.system.conftest import (
    assert_sound,
    child_pids,
    overrides,
    rows,
    server_of,
    start,
    steps_of,
    summary_of,
    wait_until,
)
from tests.system.micro import save_micro_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_rank_that_dies_on_another_host_begins_again_from_a_checkpoint_that_is_sent_to_it(tmp_path, small):
    first, second = tmp_path / "first", tmp_path / "second"
    small |= {"steps": 12, "checkpoint.every": 3, "eval.every": 0, "learner.ranks": 2, "learner.checksum_every": 1}
    small |= {"model.path": save_micro_model(tmp_path / "model"), "actors.engine": "mock", "actors.mock_speed": 20.0}
    settings, place = overrides(small), f"127.0.0.1:{free_port()}"
    hosts = ("--nnodes", "2", "--rendezvous", place)
    logs = [tmp_path / f"{name}.log" for name in ("host0", "host1", "actor")]
    begun = [
        start("learner", "arithmetic", *settings, "--out", str(first), *hosts, "--node-rank", "0", log=logs[0]),
        start("learner", "arithmetic", *settings, "--out", str(second), *hosts, "--node-rank", "1", log=logs[1]),
    ]
    try:
        address = wait_until(lambda: server_of(first), "the server's start")["address"]
        assert address == f"tcp://{place}"
        begun.append(start("actor", "arithmetic", *settings, "--connect", address, "--name", "a", log=logs[2]))
        wait_until(lambda: steps_of(first) >= 4, "four steps")
        (rank,) = child_pids("learner.main", second)
        os.kill(rank, signal.SIGKILL)
        codes = [process.wait(150) for process in begun]
    finally:
        for process in begun:
            process.kill()
            process.wait(10)
    said = [log.read_text() for log in logs]
    assert codes == [0, 0, 0], "\n".join(said)
    assert_sound(first, bound=2, steps=12)
    assert summary_of(first)["restarts"] == {"learner": 1}
    assert "learner was ended by SIGKILL" in said[1]
    assert f"--nnodes 2 --node-rank 1 --rendezvous {place}" in said[0]
    assert "rank 1 of 2" in said[1]
    # what came was removed once it was loaded, and nothing else of the run was written there
    assert sorted(path.name for path in second.iterdir()) == ["host1"]
    assert sorted(path.name for path in (second / "host1").iterdir()) == ["config.toml", "logs"]
    server = (first / "logs" / "server.log").read_text()
    assert server.count("rank1-") >= 2, "each life has mustered"
    assert "begins again at step" in server
    assert all(0 <= row["step"] < 12 for row in rows(first / "batches.jsonl"))
