import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_rl import doctor
from async_rl.config import parse_config
from async_rl.doctor import configuration, isolation, machine, open_files, run_doctor, shared_memory
from async_rl.errors import ConfigError
from async_rl.launch import preflight


def env_here(tmp_path):
    return preflight.child_environment(os.environ, tmp_path)


def by_name(findings):
    return {f.name: f for f in findings}


def test_this_machine_is_described_and_every_finding_that_is_wrong_has_a_remedy():
    found = by_name(machine())
    for name in ("python", "torch", "pyzmq", "processors", "GPUs", "memory", "/dev/shm", "open files", "isolation"):
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


def test_a_machine_that_cannot_cut_off_the_network_is_told_what_that_means():
    assert isolation("").level == "ok"
    kept = isolation("unshare: Operation not permitted")
    assert kept.level == "note"
    assert "keep the network: unshare: Operation not permitted" in kept.detail
    assert "user namespaces" in kept.remedy


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
        "rewards": "ok",
        "model": "wrong",
    }
    assert found["address"].remedy.startswith("make some with async-rl keys DIR")


def random_model(folder):
    """A random Qwen2 of 2 layers, so that nothing depends on what the cache holds."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from learner.warmup.main import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.2,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_learner_agree_on_log_probabilities_weights_and_stamps(tmp_path, dtype):
    model = {"path": random_model(tmp_path / "model"), "dtype": dtype}
    config = parse_config({"model": model, "sampling": {"temperature": 0.7}})
    found = by_name(configuration(config, env_here(tmp_path)))
    for name in ("model", "read-back", "log-probabilities", "delivered weights", "version stamps"):
        assert found[name].level == "ok", found[name]


@pytest.mark.real
def test_a_planted_fault_is_named_and_the_exit_code_is_1(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(f'[model]\npath = "{random_model(tmp_path / "model")}"\n')
    assert run_doctor(str(tmp_path / "config.toml"), [], "temperature-learner") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "note planted the learner ignores the temperature" in shown
    assert "the learner's log-probabilities are those at temperature 1 instead of 0.7" in shown


@pytest.mark.real
@pytest.mark.vllm
def test_a_tensor_that_never_gets_into_vllm_is_named_by_both_lines_of_defence(tmp_path):
    model = {"path": random_model(tmp_path / "model")}
    config = parse_config({"model": model, "actors": {"engine": "vllm", "slots": 16}})
    found = by_name(configuration(config, env_here(tmp_path), "missing"))
    assert found["log-probabilities"].level == "ok", found
    for name in ("read-back", "delivered weights"):
        assert found[name].level == "wrong", found[name]
        assert "model.layers." in found[name].detail


@pytest.mark.parametrize(("source", "fault"), [(None, "shift"), ("arithmetic", "shfit")])
def test_a_fault_that_cannot_be_planted_is_refused(source, fault):
    with pytest.raises(ConfigError, match=f"--plant {fault}: give a CONFIG and one of temperature, "):
        run_doctor(source, [], fault)


def test_the_mock_engine_has_no_log_probabilities_to_compare(tmp_path):
    config = parse_config({"actors": {"engine": "mock"}})
    (line,) = doctor.probe(config, {}, tmp_path)
    assert line.level == "note"


def alive(pid):
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.real
def test_a_probe_ends_with_the_doctor_however_that_ends(tmp_path):
    note, deadline = tmp_path / "pid", time.monotonic() + 30.0
    probe = f"import os, time; open({str(note)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(1000)"
    code = (
        "import sys, pathlib; from async_rl.doctor import _run; "
        f"_run([sys.executable, '-c', {probe!r}], {{}}, pathlib.Path({str(tmp_path / 'log')!r}))"
    )
    killed = subprocess.Popen([sys.executable, "-c", code])
    while not (note.is_file() and note.read_text().endswith(".")):
        assert time.monotonic() < deadline
    pid = int(note.read_text().removesuffix("."))
    killed.kill()
    killed.wait(10.0)
    while alive(pid):
        assert time.monotonic() < deadline
