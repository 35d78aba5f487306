"""What is checked before anything starts, and what a resumed run must have."""

import json
import os
import subprocess
import sys

import pytest
from buffer_helpers import ledger

from async_rl.buffer import journal
from async_rl.config import BufferConfig, TaskConfig, parse_config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch import preflight
from async_rl.launch.session import _configure
from async_rl.runfolder import CHECKPOINT_FILES, MODEL_FILES


def test_a_folder_with_files_is_refused_and_an_empty_one_taken(tmp_path):
    assert preflight.prepare_out(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").touch()
    with pytest.raises(ConfigError, match=r"not empty.*--resume"):
        preflight.prepare_out(tmp_path / "used")
    with pytest.raises(ConfigError, match="a file of this name"):
        preflight.prepare_out(tmp_path / "used" / "x")


def test_a_port_that_is_taken_is_named_before_a_process_starts():
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(ConfigError, match=r"buffer.bind.*in use.*another port"):
            preflight.check_address(BufferConfig(bind=f"tcp://127.0.0.1:{holder.getsockname()[1]}"))
    elsewhere = BufferConfig(bind="tcp://192.0.2.77:5555", insecure=True)
    with pytest.raises(
        ConfigError, match=r"--rendezvous = 'tcp://192\.0\.2\.77:5555': .*; name an address of this host"
    ):
        preflight.check_address(elsewhere, "--rendezvous")


def test_addresses_that_others_can_reach_need_consent():
    preflight.check_address(BufferConfig(bind="tcp://127.0.0.1:*"))
    preflight.check_address(BufferConfig(bind="tcp://0.0.0.0:*", insecure=True))
    with pytest.raises(ConfigError, match="insecure"):
        preflight.check_address(BufferConfig(bind="tcp://0.0.0.0:*"))
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        preflight.check_address(BufferConfig(bind="127.0.0.1:80"))
    with pytest.raises(ConfigError, match="as the learner host printed it"):
        preflight.check_connect("tcp://*:80", "")


@pytest.mark.parametrize("port", ["0", "65536", "99999999"])
def test_a_port_that_cannot_be_is_refused_and_no_other_asked_in_its_place(port):
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        preflight.check_connect(f"tcp://localhost:{port}", "")
    preflight.check_connect("tcp://localhost:65535", "")


def test_a_verifier_is_imported_in_another_process_and_its_fault_named(tmp_path):
    (tmp_path / "mine.py").write_text("def score(prompts, completions):\n    return []\nnumber = 3\n")
    env = preflight.child_environment(os.environ, tmp_path)
    preflight.check_verifier(TaskConfig(verifier="mine:score"), env)
    for spec, fault in {
        "mine": "module:function",
        "mine:missing": "AttributeError",
        "mine:number": "number is no function",
        "absent:score": "No module named 'absent'",
    }.items():
        with pytest.raises(ConfigError, match=fault):
            preflight.check_verifier(TaskConfig(verifier=spec), env)


def test_a_verifier_whose_import_takes_all_memory_or_never_ends_holds_nothing_up(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text("held = bytearray(3 << 30)\ndef score(completions): pass\n")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(99)\n")
    env = preflight.child_environment(os.environ, tmp_path)
    with pytest.raises(ConfigError, match="greedy:score' cannot be used: MemoryError"):
        preflight.check_verifier(TaskConfig(verifier="greedy:score", memory_bytes=1 << 30), env)
    hangs = TaskConfig(verifier="hangs:score")
    with pytest.raises(AsyncRLError, match="interrupted while the verifier was tried"):
        preflight.check_verifier(hangs, env, lambda: True)
    monkeypatch.setattr(preflight, "IMPORT_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match="importing it took more than"):
        preflight.check_verifier(hangs, env)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}"}, "safetensors"),
        ({"config.json": "{}", "m.safetensors": ""}, "tokenizer"),
        ({"config.json": "{}", "m.safetensors": "", "tokenizer.json": ""}, "names no architecture"),
        (
            {"config.json": '{"architectures": ["BertModel"]}', "m.safetensors": "", "tokenizer.json": ""},
            "no causal language model",
        ),
    ],
)
def test_a_model_folder_is_checked_before_it_is_loaded(tmp_path, files, fault):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=fault):
        preflight.check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"eos_token_id": None}, "has an eos_token_id; add one"),
        ({"vocab_size": None}, "vocab_size = None"),
        ({"n_positions": None}, "max_position_embeddings = None"),
        ({"n_positions": 16}, "reads at most 16 tokens"),
    ],
)
def test_what_a_run_reads_from_the_models_configuration_is_checked_first(tmp_path, change, fault):
    # the names of GPT-2
    model = {"architectures": ["GPT2LMHeadModel"], "eos_token_id": 2, "vocab_size": 128, "n_positions": 17}
    for name in ("m.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("")
    (tmp_path / "config.json").write_text(json.dumps(model))
    preflight.check_model_folder(tmp_path)
    preflight.check_limits(parse_config({}), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model | change))
    with pytest.raises(ConfigError, match=fault):
        preflight.check_limits(parse_config({}), tmp_path)


def test_what_the_user_has_set_in_the_environment_stays(tmp_path):
    env = preflight.child_environment({"OMP_NUM_THREADS": "7", "PYTHONPATH": "/x"}, tmp_path)
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"], env["HF_HUB_OFFLINE"]) == ("7", "PASSIVE", "1")
    assert env["PYTHONPATH"] == os.pathsep.join([os.getcwd(), str(tmp_path), "/x"])


def test_a_run_that_still_goes_on_cannot_be_resumed_beside_itself(tmp_path):
    (tmp_path / "config.toml").write_text("")
    arguments = ["-m", "async_rl.buffer.server", str(tmp_path / "config.toml")]
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe) as server:
        assert server.stdout.readline()
        (tmp_path / "server.json").write_text(json.dumps({"pid": server.pid}))
        with pytest.raises(ConfigError, match=f"its run still goes on .server process {server.pid}."):
            _configure(None, [], None, tmp_path)
        server.stdin.close()
    assert _configure(None, [], None, tmp_path)[2] is None


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("steps = 7")
    (tmp_path / "batches.jsonl").write_text("{}\n")
    config, folder, checkpoint = _configure(None, [], None, tmp_path)
    assert (config.steps, folder, checkpoint) == (7, tmp_path, None)
    assert "ended before its first checkpoint, so it begins again" in capsys.readouterr().out


def test_resume_needs_a_complete_checkpoint_and_the_same_contract(tmp_path):
    from async_rl.config import parse_config, to_toml

    config = parse_config({"steps": 10})
    with pytest.raises(ConfigError, match="no run folder"):
        _configure(None, [], None, tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(config))
    model = MODEL_FILES[0]
    for step, names in {4: (*CHECKPOINT_FILES, model), 8: (*CHECKPOINT_FILES[1:], model), 9: CHECKPOINT_FILES}.items():
        folder = tmp_path / "checkpoints" / f"step_{step}"
        (folder / "hf").mkdir(parents=True)
        for name in names:
            (folder / name).write_text(json.dumps({}))
        journal.save(journal.freeze(ledger()), folder)
        if "ledger.json" not in names:
            (folder / "ledger.json").unlink()
    resumed, folder, checkpoint = _configure(None, ["steps=12"], None, tmp_path)
    assert (resumed.steps, folder, checkpoint) == (12, tmp_path, tmp_path / "checkpoints" / "step_4")
    with pytest.raises(ConfigError, match="must stay as in"):
        _configure(None, ["seed=1"], None, tmp_path)
    # killed behind its last checkpoint, it still lacks the evaluation of its last version
    assert _configure(None, ["steps=4"], None, tmp_path)[2] == tmp_path / "checkpoints" / "step_4"
    with pytest.raises(ConfigError, match="all 3 steps are done"):
        _configure(None, ["steps=3"], None, tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"status": "completed"}))
    with pytest.raises(ConfigError, match="all 4 steps are done"):
        _configure(None, ["steps=4"], None, tmp_path)
    with pytest.raises(ConfigError, match="leave --out away"):
        _configure(None, [], tmp_path / "other", tmp_path)
    (tmp_path / "server.json").write_text(json.dumps({"pid": os.getpid()}))  # a number that another program has now
    assert _configure(None, [], None, tmp_path)[1] == tmp_path


def test_a_damaged_checkpoint_is_passed_over_and_if_none_is_whole_that_is_said(tmp_path, capsys):
    from async_rl.config import parse_config, to_toml

    (tmp_path / "config.toml").write_text(to_toml(parse_config({"steps": 10})))
    for step in (2, 4, 6):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        (folder / "hf").mkdir(parents=True)
        for name in (*CHECKPOINT_FILES, MODEL_FILES[0]):
            (folder / name).write_text(json.dumps({}))
        journal.save(journal.freeze(ledger()), folder)
    (tmp_path / "checkpoints/step_6/hf/model.safetensors").write_bytes(b"cut")
    (tmp_path / "checkpoints/step_4/groups.bin").write_bytes(b"cut")
    assert _configure(None, [], None, tmp_path)[2] == tmp_path / "checkpoints" / "step_2"
    (tmp_path / "checkpoints/step_2/ledger.json").write_text(json.dumps({"schema": journal.SCHEMA - 1}))
    with pytest.raises(ConfigError, match="go on with the version of async-rl that wrote it"):
        _configure(None, [], None, tmp_path)
    said = capsys.readouterr().out
    assert "step_6 is passed over" in said
    assert "model.safetensors is no safetensors file" in said
    assert "step_4 is passed over" in said
    (tmp_path / "checkpoints/step_2/ledger.json").write_text("{")
    with pytest.raises(ConfigError, match="none of its checkpoints is whole"):
        _configure(None, [], None, tmp_path)
