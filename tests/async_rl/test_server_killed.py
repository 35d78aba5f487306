from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from buffer_helpers import answer
from server_helpers import Peer, config, eventually, lines, manifest

from async_rl.config import to_toml
from async_rl.protocol import Ticket
from async_rl.weights.segment import Segment, unlink_run

STEPS, DEADLINE_S = 12, 30.0


class MockActor:
    """Answers tickets a little later, in any order, and says in its beats which it has."""

    def __init__(self, client, noise):
        self._client, self._noise = client, noise
        self._held, self._offered = {}, 0
        client.go_live(0)
        client.beat_info = lambda: {"in_flight": [[*key, 0.0] for key in list(self._held)]}

    def turn(self):
        for header, _ in self._client.receive(0.0):
            if header["type"] == "tickets":
                tickets = [Ticket.from_wire(t) for t in header["tickets"]]
                self._held |= {(t.ordinal, t.attempt): t for t in tickets}
            elif header["type"] == "cancel":
                for key in header["tickets"]:
                    self._held.pop(tuple(key), None)
            elif header["type"] == "version":
                self._client.go_live(header["manifest"]["version"])
        done = [key for key in self._held if self._noise.random() < 0.3]
        if done:
            self._client.send_groups([answer(self._held.pop(key)) for key in done])
        if self._offered != 4 - len(self._held):
            self._offered = 4 - len(self._held)
            self._client.send("credit", count=self._offered)


class MockLearner:
    """Asks for a step, calls it trained, and so on."""

    def __init__(self, client, run_id):
        self._client, self._run_id, self.step = client, run_id, 0
        self._segment = Segment(run_id, "0", 8)
        self._publish(-1, 0)

    def _publish(self, step, version):
        fields = {"run_id": self._run_id, "segment": str(self._segment.path)}
        wire = replace(manifest(version), **fields).to_wire()
        self._client.send("trained", step=step, manifest=wire, stats={})

    def turn(self):
        for header, _ in self._client.receive(0.0):
            if header["type"] == "shard":
                assert header["step"] == self.step
                self._publish(self.step, self.step + 1)
            elif header["type"] == "trained":
                assert header["step"] + 1 >= self.step, "an older answer"
                self.step = header["step"] + 1
                if self.step < STEPS:
                    self._client.send("next", step=self.step)


@pytest.mark.real
def test_a_server_that_is_killed_again_and_again_amid_traffic_trains_each_group_once(tmp_path):
    settings = config(steps=STEPS, buffer={"groups_per_step": 3, "heartbeat_s": 0.6})
    path, out = tmp_path / "c.toml", tmp_path / "run"
    path.write_text(to_toml(settings))
    command = [sys.executable, "-m", "async_rl.buffer.server", str(path), "--out", str(out)]
    log = open(tmp_path / "log", "w")  # noqa: SIM115
    process = subprocess.Popen(command, stdout=log, stderr=log)
    noise, kills, contract = random.Random(1), [4, 8], settings.contract_hash()
    clients = []

    def join(role, name, **fields):
        clients.append(Peer(first["address"], role, name, contract, **fields))
        clients[-1].connect(10.0)
        return clients[-1]

    try:
        eventually((out / "server.json").exists)
        first = json.loads((out / "server.json").read_text())
        learner = MockLearner(join("learner", "learner0", group="g"), first["run_id"])
        eventually(lambda: json.loads((out / "books.json").read_text())["weights"]["versions"] == 1)
        actors = [MockActor(join("actor", name), noise) for name in ("a", "b")]
        deadline = time.monotonic() + DEADLINE_S
        while learner.step < STEPS:
            assert time.monotonic() < deadline, f"stuck at step {learner.step}: {(tmp_path / 'log').read_text()}"
            for client in (learner, *actors):
                client.turn()
            if kills and learner.step >= kills[0]:
                kills.pop(0)
                process.kill()
                process.wait(10.0)
                process = subprocess.Popen([*command, "--recover"], stdout=log, stderr=log)
            noise_s = noise.random() * 0.01
            clients[0]._inbox._poll.poll(noise_s * 1000)
        clients[0].send("done", stopped=False)
        clients[0].until("stop")
        for client in clients:
            client.close()
        assert process.wait(10.0) == 0
    finally:
        for client in clients:
            client.close()
        process.send_signal(signal.SIGKILL)
        process.wait(10.0)
        log.close()
        unlink_run(first["run_id"])
    told = json.loads((out / "server.json").read_text())
    assert (told["address"], told["weights_address"], told["run_id"]) == (
        first["address"],
        first["weights_address"],
        first["run_id"],
    )
    rows = lines(out / "batches.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    ordinals = [ordinal for row in rows for ordinal in row["ordinals"]]
    assert len(set(ordinals)) == len(ordinals) == 3 * STEPS
    books = json.loads((out / "books.json").read_text())
    counts = books["books"]
    assert counts["trained"] == 3 * STEPS
    assert counts["issued"] == counts["trained"] + counts["filtered"] + counts["failed"]
    assert set(books["failed"]) <= {"actor_lost", "run_ended"}
    assert books["staleness"]["max"] <= 1
    assert not (out / "journal").exists()
