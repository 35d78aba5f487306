"""``bench weights`` made small: all figures are there and plausible; never how fast."""

import json

import pytest
import torch
from safetensors.torch import save_file

from async_rl.bench.weights import weights
from async_rl.errors import ConfigError
from async_rl.runfolder import CHECKPOINT_FILES
from async_rl.weights.files import SHM


@pytest.mark.parametrize("receivers", ["", "0", "1,x", "-1", "65"])
def test_what_is_no_number_of_receivers_is_refused(receivers):
    with pytest.raises(ConfigError, match="--receivers"):
        weights(nbytes=4, receivers=receivers)


@pytest.mark.real
def test_the_benchmark_of_weights_gives_all_its_figures(tmp_path):
    before = set(SHM.glob("async_rl-bench-*"))
    weights(nbytes=3_000_001, receivers="2", repeats=1, out=tmp_path / "w.json")
    told = json.loads((tmp_path / "w.json").read_text())
    assert told["nbytes"] == 3_000_004
    by_name = {figure["name"]: figure for figure in told["figures"]}
    whole = by_name["shm: publish + map + verify"]
    parts = by_name["shm: publish (copy, hash)"], by_name["shm: map + verify"]
    assert whole["median"] == pytest.approx(sum(part["median"] for part in parts))
    assert (whole["bar"], whole["at_most"]) == (3.0, True)
    assert by_name["zmq, 2 receivers: bytes sent / payload"]["values"] == [1.0]
    assert by_name["zmq, 2 receivers"]["bar"] is None  # what is promised is promised for one
    assert all(0 < figure["median"] < 1e6 for figure in told["figures"])
    assert set(SHM.glob("async_rl-bench-*")) <= before


@pytest.mark.real
def test_hosts_that_relay_are_measured_beside_one_alone(tmp_path):
    before = set(SHM.glob("async_rl-bench-*"))
    weights(nbytes=1_000_000, receivers="2", relay=2, repeats=1, out=tmp_path / "w.json")
    figures = json.loads((tmp_path / "w.json").read_text())["figures"]
    time_s, out_of_learner = figures
    assert (time_s["bar"], out_of_learner["bar"]) == (2.0, 5.0)
    assert out_of_learner["values"] == [1.0]  # whatever the machine does: nobody was given up
    assert time_s["baseline_values"][0] >= 1_000_000 / 20e6  # the link was paced
    assert set(SHM.glob("async_rl-bench-*")) <= before


def test_a_run_without_two_checkpoints_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no two checkpoints.*checkpoint.every=1"):
        weights(nbytes=None, receivers="1", delta=tmp_path)


@pytest.mark.real
def test_the_difference_of_two_checkpoints_is_sent_and_is_smaller(tmp_path):
    before = set(SHM.glob("async_rl-bench-*"))
    for step in (1, 2):
        folder = tmp_path / "run/checkpoints" / f"step_{step}"
        (folder / "hf").mkdir(parents=True)
        for name in (*CHECKPOINT_FILES, "hf/config.json"):
            (folder / name).write_text("{}")
        numbers = torch.linspace(0.01, 0.02, 300_000) + 2e-5 * step  # a third of a step of bfloat16
        save_file({"w": numbers}, folder / "hf/model.safetensors")
    weights(nbytes=None, receivers="1", delta=tmp_path / "run", repeats=1, out=tmp_path / "w.json")
    sent, by_difference, seconds = json.loads((tmp_path / "w.json").read_text())["figures"]
    assert (sent["bar"], by_difference["values"]) == (0.15, [1.0])
    assert 0 < sent["median"] < 0.2
    assert seconds["median"] > 0
    assert "step 1 to 2, 0.6 MB in bfloat16" in sent["name"]
    assert set(SHM.glob("async_rl-bench-*")) <= before
