import os
import resource

import pytest

from async_rl import doctor
from async_rl.config import parse_config
from async_rl.doctor import configuration, judge_probe, machine, open_files, shared_memory
from async_rl.launch import preflight


def env_here(tmp_path):
    return preflight.child_environment(os.environ, tmp_path)


def by_name(findings):
    return {f.name: f for f in findings}


def test_this_machine_is_described_and_every_finding_that_is_wrong_has_a_remedy():
    found = by_name(machine())
    for name in ("python", "torch", "pyzmq", "processors", "GPUs", "memory", "/dev/shm", "open files"):
        assert name in found
    assert found["python"].level == "ok"
    assert all(f.remedy for f in found.values() if f.level == "wrong")


def test_a_missing_package_is_wrong_and_a_missing_extra_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor, "package_version", lambda name: None)
    found = by_name(machine())
    assert (found["torch"].level, found["vllm"].level) == ("wrong", "note")
    assert "pip install" in found["torch"].remedy
    assert "install_vllm_cpu.sh" in found["vllm"].remedy


def test_too_little_shared_memory_and_too_few_files_are_wrong():
    assert shared_memory(64 << 20).level == "wrong"
    assert shared_memory(1 << 30).level == "ok"
    assert open_files(256).remedy.startswith("ulimit")
    assert open_files(resource.RLIM_INFINITY).detail == "unlimited"


def test_the_probe_is_judged_by_its_mean_and_the_compute_type():
    result = {"tokens": 100, "mean": 4e-3, "max": 9e-2}
    assert judge_probe(result, parse_config({})).level == "wrong"
    assert judge_probe(result, parse_config({"model": {"dtype": "bfloat16"}})).level == "ok"
    assert judge_probe({"tokens": 100, "mean": 1e-6, "max": 1e-5}, parse_config({})).level == "ok"
    assert judge_probe({"tokens": 9, "mean": float("nan"), "max": 0.0}, parse_config({})).level == "wrong"


def test_everything_that_is_wrong_with_a_configuration_is_found_at_once(tmp_path):
    config = parse_config(
        {
            "model": {"path": str(tmp_path)},
            "task": {"data": str(tmp_path / "none.jsonl"), "verifier": "absent:f"},
            "buffer": {"bind": "tcp://0.0.0.0:*"},
        }
    )
    found = by_name(configuration(config, env_here(tmp_path)))
    assert {name: f.level for name, f in found.items()} == {
        "address": "wrong",
        "engine": "ok",
        "problems": "wrong",
        "verifier": "wrong",
        "model": "wrong",
    }
    assert found["address"].remedy.startswith("set buffer.insecure")


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_learner_agree_on_log_probabilities(tmp_path, dtype):
    """A random Qwen2 of 2 layers, so that nothing depends on what the cache holds."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from learner.warmup import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = parse_config(
        {"model": {"path": str(tmp_path / "model"), "dtype": dtype}, "sampling": {"temperature": 0.7}}
    )
    found = by_name(configuration(config, env_here(tmp_path)))
    assert found["model"].level == "ok", found["model"]
    assert found["log-probabilities"].level == "ok", found["log-probabilities"]


def test_a_wrong_temperature_would_be_seen():
    """The judge's limit lies far below what a temperature on one side only does."""
    import numpy as np

    logits = np.random.default_rng(0).normal(size=(1000, 20))

    def logprob(x):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    difference = np.abs(logprob(logits)[:, 0] - logprob(logits / 0.9)[:, 0])
    result = {"tokens": 1000, "mean": float(difference.mean()), "max": float(difference.max())}
    assert judge_probe(result, parse_config({})).level == "wrong"
