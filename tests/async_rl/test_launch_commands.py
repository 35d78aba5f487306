"""How processes are started: command lines, their GPUs, and the address they connect to."""

import sys

import pytest

from async_rl.launch.commands import Commands, assign_gpus, visible_gpus
from async_rl.launch.server_keeper import local_address


def test_commands_name_module_config_and_place():
    from pathlib import Path

    commands = Commands(config=Path("r/config.toml"), out=Path("r"), ranks=2, resume=Path("r/checkpoints/step_5"))
    python = sys.executable
    resume = ["--resume", "r/checkpoints/step_5"]
    assert commands.server() == [python, "-m", "async_rl.buffer.server", "r/config.toml", "--out", "r", *resume]
    assert commands.learner("tcp://h:1") == [
        *[python, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"],
        *["--nproc-per-node", "2"],
        *["--max-restarts", "1000000", "--log-dir", "r/logs/torchrun", "-m", "learner.main"],
        *["r/config.toml", "--out", "r", "--connect", "tcp://h:1"],
    ]
    assert commands.server(recover=True)[-3:] == ["--out", "r", "--recover"]
    alone = Commands(config=Path("r/config.toml"), out=Path("r"), ranks=1).learner("tcp://h:1")
    assert alone[:3] == [python, "-m", "learner.main"]  # needs no torchrun
    assert commands.actor("tcp://h:1", "actor0")[1:] == [
        *["-m", "actors.main", "r/config.toml", "--connect", "tcp://h:1", "--name", "actor0"]
    ]
    assert commands.scorer("tcp://h:1", "reward1", "reward")[1:] == [
        *[
            "-m",
            "actors.scorers.main",
            "r/config.toml",
            "--role",
            "reward",
            "--connect",
            "tcp://h:1",
            "--name",
            "reward1",
        ]
    ]
    assert commands.evaluator("tcp://h:1")[1:] == [
        "-m",
        "actors.evaluation.main",
        "r/config.toml",
        "--connect",
        "tcp://h:1",
    ]


def test_gpus_go_to_the_learner_first_and_actors_share_the_rest():
    assert assign_gpus([], 1, 2) == {}
    assert assign_gpus(["0", "1", "2"], 1, 3) == {
        "learner": "0",
        "actor0": "1",
        "actor1": "2",
        "actor2": "1",
        "evaluator": "1",
    }
    assert assign_gpus(["0"], 1, 1) == {"learner": "0", "actor0": "0", "evaluator": "0"}
    scored = assign_gpus(["0", "1", "2", "3"], 1, 2, ["reference0", "reference1"])
    assert (scored["actor1"], scored["reference0"], scored["reference1"]) == ("2", "3", "1")
    turns = assign_gpus(["0", "1"], 1, 1, ["reference0"], colocated=True)
    assert turns == {"learner": "0", "actor0": "0", "evaluator": "0", "reference0": "1"}
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}) == ["3", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


@pytest.mark.parametrize(
    ("bound", "local"),
    [
        ("tcp://0.0.0.0:55", "tcp://127.0.0.1:55"),
        ("tcp://[::]:55", "tcp://[::1]:55"),
        ("tcp://10.0.0.5:55", "tcp://10.0.0.5:55"),
    ],
)
def test_clients_on_this_host_use_the_loopback_when_the_server_listens_everywhere(bound, local):
    assert local_address(bound) == local
