"""`async-rl run` with an adapter, whole: trained, published, evaluated and saved."""

import importlib.util
import json

import pytest
from safetensors.torch import load_file

from tests.system.conftest import assert_sound, fresh_differences, overrides, rows, run

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
]


def test_arithmetic_trains_an_adapter_with_its_base_as_reference(tmp_path, small):
    out = tmp_path / "run"
    small |= {"lora.rank": 4, "steps": 2, "weights.path": "zmq", "algorithm.kl_coef": 0.05}
    done = run("run", "arithmetic", *overrides(small), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(out, bound=2, steps=2)
    assert [r["version"] for r in rows(out / "evals.jsonl")] == [0, 2]
    assert max(fresh_differences(out)) < 1e-4
    adapter = out / "checkpoints" / "step_2" / "adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert (settings["r"], settings["peft_type"], settings["base_model_name_or_path"]) == (
        4,
        "LORA",
        small["model.path"],
    )
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert all(t.abs().max() > 0 for name, t in tensors.items() if "lora_B" in name)
    assert summary["weights"]["bytes"] <= sum(t.numel() for t in tensors.values()) * 4 + 128 * len(tensors)
