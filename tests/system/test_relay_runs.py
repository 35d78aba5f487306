"""`async-rl run` with weights that are sent on and as differences, whole."""

import json

import pytest

from tests.system.conftest import assert_sound, fresh_differences, overrides, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_two_actors_with_relays_and_differences_train_on_what_was_published(tmp_path, small):
    out = tmp_path / "run"
    small |= {"actors.count": 2, "weights.path": "zmq", "weights.relay": 2, "weights.delta": True, "eval.every": 0}
    done = run("run", "arithmetic", *overrides(small), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(out, bound=2, steps=4)
    assert summary["weights"]["mismatches"] == 0
    assert max(fresh_differences(out)) < 1e-4
    clients = {client["name"]: client for client in json.loads((out / "books.json").read_text())["clients"]}
    assert all(clients[name]["relay"].startswith("tcp://127.0.0.1:") for name in clients if name.startswith("actor"))
