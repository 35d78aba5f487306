"""The server's door: who is let in, what it survives, and the process around it."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys

import pytest
from buffer_helpers import make
from server_helpers import NoWeights, Raw, config, eventually, hello, manifest, running

from async_rl.buffer import server as server_module
from async_rl.buffer.records import Limits
from async_rl.buffer.server import Server
from async_rl.client import Client, Stopped
from async_rl.config import to_toml
from async_rl.errors import ConfigError, HandshakeError
from async_rl.wire import SCHEMA_VERSION, encode_groups, pack_header


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"protocol": 99}, "install the same version"),
        ({"schema": 99}, "install the same version"),
        ({"contract": "other"}, "same config.toml"),
        ({"role": "king"}, "a role of actor"),
        ({"name": ""}, "a name of 1 to 200"),
        ({"name": "a\nb"}, "printable characters"),
        ({"role": "learner", "rank": 2, "world": 2}, "rank 2 of 2"),
        ({"role": "learner", "rank": 0, "world": 3}, "feeds 1 to 2 ranks"),
        ({"name": None}, "hello.name must be str"),
    ],
)
def test_a_client_that_does_not_fit_is_refused_with_a_sentence(server, settings, change, sentence):
    with Raw(server.address) as raw:
        refused = raw.ask(hello(settings, **change))
    assert refused["type"] == "refused"
    assert sentence in refused["reason"]


def test_ranks_must_belong_to_one_group(cast, server, settings):
    cast.learner(0, 2)
    with Raw(server.address) as raw:
        refused = raw.ask(hello(settings, role="learner", name="x", rank=0, world=1))
    assert "a group of 2" in refused["reason"]


def test_a_newcomer_with_the_same_name_takes_the_place_and_the_tickets_return(cast, server):
    cast.learner()
    old = cast.actor(credit=1)
    old.tickets(1)
    server.service.roster.named("a").pid = 1  # as if it were another process
    new = cast.actor(credit=1)
    assert [(t.ordinal, t.attempt) for t in new.tickets(1)] == [(0, 1)]
    with pytest.raises(HandshakeError, match="took the name"):
        old.until("never")


def test_an_address_that_others_reach_needs_consent_and_a_taken_port_is_a_sentence(tmp_path):
    def serve(**buffer):
        return Server(config(buffer=buffer), tmp_path, Limits(num_tasks=4), NoWeights())

    with pytest.raises(ConfigError, match=r"buffer\.insecure"):
        serve(bind="tcp://0.0.0.0:*")
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        serve(bind="nonsense")
    serve(bind="tcp://0.0.0.0:*", insecure=True).close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="another program listens"):
            serve(bind=f"tcp://127.0.0.1:{taken.getsockname()[1]}")


# ---------------------------------------------------------------- bad input


def test_the_server_survives_noise_and_counts_it(server, settings, cast):
    with Raw(server.address) as raw:
        assert raw.ask(b"")["code"] == "bad_msgpack"
        assert raw.ask(b"\xc1 not msgpack")["code"] == "bad_msgpack"
        assert raw.ask(pack_header({"type": 3}))["code"] == "bad_header"
        assert raw.ask(pack_header({"type": "credit", "count": 4}))["code"] == "hello_first"
        assert raw.ask(hello(settings))["type"] == "welcome"
        assert raw.ask(pack_header({"type": "sing"}))["code"] == "unknown_type"
        assert raw.ask(pack_header({"type": "done"}))["code"] == "wrong_role"
        assert raw.ask(pack_header({"type": "credit", "count": True}))["code"] == "bad_field"
        assert raw.ask(pack_header({"type": "credit", "count": 1 << 63}))["code"] == "bad_field"
        assert raw.ask(pack_header({"type": "fail", "ordinal": 1}))["code"] == "bad_field"
        assert raw.ask(pack_header({"type": "live", "version": 0, "checksum": 7}))["code"] == "bad_field"
        assert raw.ask(pack_header({"type": "submit", "schema": SCHEMA_VERSION, "groups": 3}))["code"] == "bad_header"
        noise = random.Random(0)
        for _ in range(200):
            raw.send(*[noise.randbytes(noise.randrange(40)) for _ in range(noise.randrange(1, 4))])
    assert server.service.refused["wrong_role"] == 1
    cast.learner()
    assert len(cast.actor(credit=2).tickets(2)) == 2


@pytest.mark.parametrize(
    "kind",
    ["credit", "submit", "annotate", "fail", "asleep", "live", "beat", "next", "trained", "snapshot", "eval", "dead"],
)
def test_no_field_of_any_type_can_end_the_server(tmp_path, kind):
    values = [None, -1, 1 << 61, 1.5, "x", b"x", [], [[]], {}, {"a": [1]}, True]
    role = {"next": "learner", "trained": "learner", "snapshot": "learner", "eval": "evaluator", "dead": "monitor"}
    role["annotate"] = "scorer"
    settings = config(reward={"placement": "scorer"})
    names = [
        "count", "received", "ordinal", "attempt", "reason", "final", "version", "checksum", "timer", "in_flight",
        "info", "cpu_s", "step", "manifest", "stats", "path", "metrics", "samples", "name", "seq", "groups", "schema",
    ]  # fmt: skip
    noise = random.Random(kind)
    with running(settings, tmp_path) as server, Raw(server.address) as raw:
        raw.send(hello(settings, role=role.get(kind, "actor"), stage="reward"))
        for _ in range(300):
            raw.send(pack_header({"type": kind, **{n: noise.choice(values) for n in names if noise.random() < 0.8}}))
        assert raw.ask(pack_header({"type": "sing"}))
        eventually(lambda: server.service.refused["unknown_type"] == 1)
        assert server.thread.is_alive()


def test_a_group_that_cannot_be_decoded_is_refused_and_its_ticket_returns(server, settings, cast):
    cast.learner()
    with Raw(server.address) as raw:
        raw.ask(hello(settings))
        live = {"type": "live", "version": 0, "checksum": manifest(0).checksum}
        raw.send(pack_header(live))
        tickets = raw.ask(pack_header({"type": "credit", "count": 1}))
        assert tickets["tickets"][0][:2] == [0, 0]
        frames = encode_groups("submit", [make(0)])
        ack = raw.ask(*map(bytes, [frames[0], *frames[1:-1], b"short"]))
        assert ack == {"type": "ack", "results": [[0, 0, "refused", "bad_shape"]]}
        again = raw.ask(pack_header({"type": "credit", "count": 1}))
        assert again["tickets"][0][:2] == [0, 1]
    assert server.service.refused["bad_shape"] == 1


@pytest.mark.real
def test_the_process_serves_ends_in_order_on_sigint_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config()))
    command = [sys.executable, "-m", "async_rl.buffer.server", str(path), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        note = tmp_path / "run" / "server.json"
        eventually(note.exists)
        told = json.loads(note.read_text())
        assert told["pid"] == process.pid
        with Client(told["address"], "learner", "learner0", config().contract_hash()) as learner:
            welcome = learner.connect(10.0)
            assert welcome["run_id"] == told["run_id"]
            assert welcome["weights_address"].startswith("tcp://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            with pytest.raises(Stopped, match="interrupted"):
                learner.request("next", "shard", step=0)
            learner.send("done", stopped=True)
        assert process.wait(10.0) == 0
    finally:
        process.kill()
        output, _ = process.communicate()
    assert "Traceback" not in output
    assert json.loads((tmp_path / "run" / "books.json").read_text())["status"] == "stopped"


@pytest.mark.real
def test_a_wrong_configuration_is_one_sentence_and_exit_code_one(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config(buffer={"bind": "tcp://0.0.0.0:*"})))
    command = [sys.executable, "-m", "async_rl.buffer.server", str(path), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("async-rl: buffer.bind")
    assert "Traceback" not in done.stderr


def test_a_server_that_is_late_at_every_look_still_takes_what_waits(tmp_path, settings, monkeypatch):
    """A process that was frozen just before it looked into its socket must not take it for empty."""
    monkeypatch.setattr(server_module, "_BURST_S", -1.0)
    with running(settings, tmp_path) as server, Raw(server.address) as raw:
        assert raw.ask(hello(settings, role="actor"))["type"] == "welcome"
