"""The learner group: placement, and two real ranks that do what one does."""

import json
import os
import subprocess
from ipaddress import ip_address
from pathlib import Path

import pytest
import torch

from async_rl.errors import ConfigError
from async_rl.launch.commands import Commands
from async_rl.launch.preflight import child_environment
from learner.group import read_placement

WORKER = Path(__file__).with_name("group_worker.py")
ROOT = WORKER.parents[2]


def environment(**changes):
    return {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **changes}


def test_without_torchrun_the_error_says_how_to_start():
    with pytest.raises(ConfigError, match=r"WORLD_SIZE, RANK, LOCAL_RANK not set: .*`torchrun --nproc-per-node 4"):
        read_placement({}, 4, "cpu")


def test_one_rank_alone_needs_no_torchrun():
    placement = read_placement({}, 1, "cpu")
    assert (placement.rank, placement.world, placement.device) == (0, 1, torch.device("cpu"))


def test_another_number_of_ranks_than_configured_is_refused():
    with pytest.raises(ConfigError, match=r"started 2 ranks but learner\.ranks = 3"):
        read_placement(environment(), 3, "cpu")


def test_ranks_are_mapped_to_the_cpu_or_to_their_own_gpu(monkeypatch):
    assert read_placement(environment(), 2, "cpu").device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert read_placement(environment(), 2, "cuda").device == torch.device("cuda", 1)
    assert read_placement(environment(), 2, "auto").device == torch.device("cuda", 1)


def test_more_ranks_than_gpus_is_an_error_for_cuda_and_the_cpu_for_auto(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"of 2 processes, but 1 CUDA devices are visible"):
        read_placement(environment(), 2, "cuda")
    assert read_placement(environment(), 2, "auto").device == torch.device("cpu")


def run_ranks(world: int, scenario: str, out: Path, succeeds: bool = True) -> None:
    learner = Commands(config=Path("c.toml"), out=out.parent, ranks=2).learner("tcp://h:1")
    command = learner[: learner.index("--nproc-per-node")]  # as a run starts torchrun
    env = child_environment({**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(out.parent)}, WORKER.parent)
    env["PYTHONPATH"] = f"{ROOT}:{WORKER.parent}"
    worker = [f"--nproc-per-node={world}", str(WORKER), scenario, str(out), str(world)]
    done = subprocess.run([*command, *worker], env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode == 0) == succeeds, done.stderr[-3000:]


@pytest.mark.real
def test_two_ranks_make_the_same_parameters_as_one_with_every_kind_of_algorithm(tmp_path):
    for world in (1, 2):
        run_ranks(world, "train", tmp_path / f"{world}")
    one, two, other = (torch.load(tmp_path / name, weights_only=True) for name in ("1.0", "2.0", "2.1"))
    for name, expected in one.items():
        assert torch.equal(two[name]["data"], other[name]["data"])
        assert two[name]["kl_coef"] == other[name]["kl_coef"] == pytest.approx(expected["kl_coef"])
        # Adam divides by the gradient's size, so that rounding shows where gradients are tiny
        assert (expected["data"] - two[name]["data"]).abs().max() < 5e-5, name
        for ours, single in zip(two[name]["metrics"], expected["metrics"], strict=True):
            for key in ("advantage/mean", "advantage/std", "masked_fraction", "tokens/step", "kl/behaviour"):
                assert ours[key] == pytest.approx(single[key], abs=1e-5), (name, key)
    assert one["decoupled_ppo"]["metrics"][0]["masked_fraction"] > 0.05
    assert one["ppo"]["kl_coef"] != 0.1


@pytest.mark.real
def test_ranks_whose_parameters_differ_stop_and_name_the_tensor(tmp_path):
    run_ranks(2, "differ", tmp_path / "said")
    for rank in (0, 1):
        said = (tmp_path / f"said.{rank}").read_text()
        assert "different parameters: lm_head.weight;" in said


@pytest.mark.real
def test_neither_torchrun_nor_its_ranks_listen_where_other_hosts_could_reach_them(tmp_path):
    run_ranks(2, "listen", tmp_path / "said")
    for rank in (0, 1):
        addresses = json.loads((tmp_path / f"said.{rank}").read_text())
        assert addresses
        assert all(ip_address(address.removeprefix("::ffff:")).is_loopback for address in addresses), addresses


@pytest.mark.real
@pytest.mark.parametrize(("scenario", "within_s"), [("kill", 5.0), ("freeze", 10.0)])
def test_a_rank_that_is_killed_or_frozen_is_one_sentence_on_the_others_within_the_deadline(
    tmp_path, scenario, within_s
):
    run_ranks(2, scenario, tmp_path / "said", succeeds=scenario == "freeze")
    took, exit_code, *said = (tmp_path / "said").read_text().splitlines()
    assert float(took) < within_s
    assert float(took) > 1.5 or scenario == "kill"
    assert exit_code == "75"
    assert said[0].startswith(
        "rank 0 has lost the others in the all_reduce of the gradients of step 1: one has died, or"
    )
    assert len(said) == 1
