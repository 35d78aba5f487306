"""A whole run with keys: it works, and no secret is in any of its files or in what it prints."""

import subprocess

import pytest
from conftest import command, environment, overrides, rows, summary_of

from async_rl.curve import ClientKeys, ServerKeys

SECRETS = {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef0badcafe", "HF_TOKEN": "hf_not-to-be-written"}


def files_with(folder, text: bytes):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and text in p.read_bytes())


@pytest.mark.real
def test_a_run_with_keys_completes_and_its_folder_holds_no_secret(tmp_path, small):
    keys, out = tmp_path / "keys", tmp_path / "run"
    env = {**environment(), **SECRETS, "WANDB_MODE": "offline", "HOME": str(tmp_path / "home")}
    (tmp_path / "home").mkdir()

    def call(*arguments):
        return subprocess.run(
            command(*arguments), capture_output=True, text=True, timeout=150, env=env, check=False, cwd=tmp_path
        )

    made = call("keys", str(keys))
    assert made.returncode == 0, made.stderr
    small |= {"actors.engine": "mock", "weights.path": "zmq", "log.wandb": True, "steps": 2, "eval.every": 0}
    done = call("run", "arithmetic", *overrides(small), "--keys", str(keys), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary_of(out)["status"] == "completed"
    assert len(rows(out / "batches.jsonl")) == 2
    assert f'keys = "{keys}"' in (out / "config.toml").read_text()

    server, client = ServerKeys.of(str(keys)), ClientKeys.of(str(keys))
    secrets = [*SECRETS.values(), server.secret.decode(), client.secret.decode()]
    assert all((out / name).exists() for name in ("report.html", "wandb", "logs/server.log", "logs/actor0.log"))
    for secret in secrets:
        assert files_with(out, secret.encode()) == []
        for printed in (made, done):
            assert secret not in printed.stdout + printed.stderr
    assert {p.name for p in keys.iterdir()} == {"server.key", "server.pub", "client.key", "client.pub"}
    # what the search would find if it were there
    assert files_with(tmp_path, server.secret) == ["keys/server.key"]
    assert "config.toml" in files_with(out, str(keys).encode())


@pytest.mark.real
def test_a_run_that_others_could_reach_needs_keys_or_consent(tmp_path, small):
    def call(*flags):
        arguments = ["arithmetic", *overrides(small | {"buffer.bind": "tcp://0.0.0.0:*"}), "--out", str(tmp_path / "r")]
        return subprocess.run(
            command("run", *arguments, *flags),
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
            check=False,
        )

    refused = call()
    assert refused.returncode == 2
    assert "async-rl keys DIR" in refused.stderr
    assert "--insecure" in refused.stderr
    missing = call("--keys", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "server.key" in missing.stderr
    assert not (tmp_path / "r" / "config.toml").exists()
    assert "Traceback" not in refused.stderr + missing.stderr
