"""`async-rl run` with weights that are sent on and as differences, whole."""

import json

import pytest

from tests.system.conftest import assert_sound, fresh_differences, overrides, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_two_actors_with_relays_and_differences_train_on_what_was_published(tmp_path, small):
    out = tmp_path / "run"
    small |= {"actors.count": 2, "eval.every": 0, "model.dtype": "bfloat16"}
    small |= {"weights.path": "zmq", "weights.relay": 2, "weights.delta": True}
    done = run("run", "arithmetic", *overrides(small), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(out, bound=2, steps=4)
    weights = summary["weights"]
    assert weights["mismatches"] == 0
    # two processes of one host: it pulls each version once, and nobody relays to it
    assert 0 < weights["learner_bytes"] <= weights["versions"] * weights["bytes"]
    assert (weights["relay_bytes"], weights["failed_deltas"], weights["relays_left"]) == (0, 0, 0)
    assert 0 < weights["delta_chunks"] < weights["chunks"]  # not those of the first version
    assert max(fresh_differences(out)) < 0.02  # in bfloat16; with other weights it would be larger
    clients = {client["name"]: client for client in json.loads((out / "books.json").read_text())["clients"]}
    assert all(clients[name]["relay"].startswith("tcp://127.0.0.1:") for name in clients if name.startswith("actor"))
