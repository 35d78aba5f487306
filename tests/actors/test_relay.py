"""Hosts that send weights on: receivers that pretend to be hosts, and where a relay listens."""

import contextlib
import socket
import time
import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from actors.loop import TicketLoop
from actors.process import Process
from actors.receiver import Receiver
from actors.relay import Relay, open_relay
from async_rl.config import parse_config
from async_rl.curve import ClientKeys, ServerKeys, make_keys
from async_rl.errors import ConfigError
from async_rl.weights.segment import unlink_run
from async_rl.weights.server import WeightServer
from async_rl.weights.tree import Parent, addressed, parents
from learner.publisher import Publisher

NUMEL = 50_000
CHUNK = 10_000


class World:
    """A publisher, its chunk server, and hosts."""

    def __init__(self):
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.publisher = Publisher(self.run_id, [("w", (NUMEL,), 0, NUMEL)], CHUNK, "bfloat16")
        self.server = WeightServer("tcp://127.0.0.1:*", delta=True)
        self.server.start()
        self.hosts, self.relays = [], []

    def publish(self, version):
        flat = torch.linspace(0.01, 0.02, NUMEL) * (1 + 1e-3 * version)
        manifest = self.publisher.publish(flat, version, evaluated=False)
        self.server.serve(manifest)
        return manifest, flat.bfloat16()

    def add(self, count, *, delta=False):
        for number in range(count):
            self.relays.append(Relay("tcp://127.0.0.1:*", None))
            self.hosts.append(
                Receiver(
                    "zmq",
                    lambda: self.server.address,
                    self.run_id,
                    stall_s=2.0,
                    relay=self.relays[-1],
                    delta=delta,
                    host=f"h{number}",
                )
            )

    def join(self, fanout):
        for host, row in zip(self.hosts, parents(len(self.hosts), fanout), strict=True):
            host.follow(addressed(row, [relay.address for relay in self.relays]))

    def deliver(self, manifest):
        for host in self.hosts:
            host.fetch(manifest)
        return [host.wait(10) for host in self.hosts]

    def close(self):
        for host in self.hosts:
            host.close()
        self.server.close()
        self.publisher.close()


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()
    for number in range(len(made.hosts)):
        assert unlink_run(f"{made.run_id}-h{number}") == []


def bits(prepared):
    return torch.frombuffer(bytearray(prepared.data), dtype=torch.bfloat16)


def test_the_learner_sends_each_version_once_however_many_hosts_there_are(world):
    world.add(5)
    world.join(2)
    for version in (1, 2, 3):
        sent = world.server.counts["bytes"]
        manifest, flat = world.publish(version)
        for prepared in world.deliver(manifest):
            assert torch.equal(bits(prepared), flat)
        assert world.server.counts["bytes"] - sent == manifest.nbytes


def test_a_number_that_comes_again_with_other_bytes_in_a_later_epoch_is_another_version(world):
    world.add(3, delta=True)
    world.join(1)
    for epoch, version in ((0, 3), (0, 4), (1, 4)):  # back to 3, and on from there
        sent = world.server.counts["bytes"]
        manifest, flat = world.publish(10 * epoch + version)
        manifest = replace(manifest, version=version, epoch=epoch)
        world.server.serve(manifest)
        for prepared in world.deliver(manifest):
            assert (prepared.manifest.order, prepared.received.get("relays_left", 0)) == ((epoch, version), 0)
            assert torch.equal(bits(prepared), flat)
        assert world.server.counts["bytes"] - sent <= manifest.nbytes


def test_differences_go_through_the_trees_as_well(world):
    world.add(3, delta=True)
    world.join(2)
    world.deliver(world.publish(1)[0])
    sent = world.server.counts["bytes"]
    manifest, flat = world.publish(2)
    assert all(torch.equal(bits(prepared), flat) for prepared in world.deliver(manifest))
    assert 0 < world.server.counts["bytes"] - sent < manifest.nbytes / 2
    assert world.server.counts["differences"] == len(manifest.chunks)
    assert sum(relay.counts["differences"] for relay in world.relays) == 2 * len(manifest.chunks)


def test_a_host_that_is_gone_is_made_up_for_by_the_learner(world):
    world.add(4)
    world.join(2)
    world.deliver(world.publish(1)[0])
    world.hosts.pop(0).close()
    world.relays.pop(0)
    manifest, flat = world.publish(2)
    assert all(torch.equal(bits(prepared), flat) for prepared in world.deliver(manifest))
    assert world.server.counts["bytes"] > manifest.nbytes


def test_what_is_written_over_is_not_sent_on_any_more(world):
    world.add(1)
    for version in (1, 2, 3):
        world.deliver(world.publish(version)[0])
    world.publish(4)
    late = Receiver("zmq", lambda: world.server.address, world.run_id, stall_s=0.5, host="late")
    try:
        late.follow(addressed([(0, 0)], [world.relays[0].address]))
        manifest, flat = world.publish(5)
        late.fetch(manifest)  # the relay does not have it: it comes from the learner after a while
        assert torch.equal(bits(late.wait(10)), flat)
    finally:
        late.close()


def test_a_relay_lets_in_those_who_have_its_key(tmp_path):
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "others")
    ours, others = (ClientKeys.of(str(tmp_path / name)) for name in ("ours", "others"))
    assert ours.of_peer().server == ours.public
    assert ours.to_serve().clients == {ours.public}
    assert others.public not in ours.to_serve().clients


class Joined:
    """A process that has joined a run, and what it has told the server."""

    def __init__(self, **weights):
        self.said = []
        self.parts = contextlib.ExitStack()
        client = SimpleNamespace(
            send=lambda kind, **fields: self.said.append((kind, fields)), weights_address="tcp://127.0.0.1:1"
        )
        self.process = Process(
            name="a",
            config=parse_config({"weights": weights}),
            address="tcp://localhost:5555",
            client=client,
            keys=None,
            welcome={"run_id": f"test-{uuid.uuid4().hex[:8]}"},
            timer=None,
            parts=self.parts,
        )

    def relay(self):
        """Open its receiver; where it says that it can be reached."""
        self.process.receiver(relays=True)
        [(kind, fields)] = self.said
        assert (kind, fields["key"]) == ("relay", "")
        return fields["address"]


def test_without_relays_nothing_listens():
    joined = Joined()
    with joined.parts:
        joined.process.receiver(relays=True)
    assert joined.said == []


def test_a_fixed_port_is_had_by_one_process_of_a_host_and_the_other_says_that_it_cannot_listen(capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, second = (Joined(relay=2, relay_port=port, path="zmq") for _ in range(2))
    with first.parts, second.parts:
        assert first.relay() == f"tcp://127.0.0.1:{port}"
        assert second.relay() == ""
    told = capsys.readouterr().out
    assert f"tcp://127.0.0.1:{port}: Address already in use" in told
    assert "one process of a host has weights.relay_port" in told


def test_a_port_for_relays_is_refused_where_there_are_none():
    with pytest.raises(ConfigError, match=r"weights.relay_port = 7000.*weights.relay = 0"):
        parse_config({"weights": {"relay_port": 7000}})


def test_relays_and_differences_are_refused_where_nothing_is_sent():
    for name, value in (("relay", 4), ("delta", True)):
        with pytest.raises(ConfigError, match=rf"weights.{name} = {value}.*nothing is sent"):
            parse_config({"weights": {name: value, "path": "shm"}})


def test_an_open_address_without_keys_is_not_listened_on(monkeypatch, capsys):
    monkeypatch.setattr("actors.relay.route_to", lambda server: ("10.0.0.2", "10.0.0.1"))
    config = parse_config({"weights": {"relay": 4, "relay_port": 7000}})
    assert open_relay(config, "tcp://h:1", None) is None
    told = capsys.readouterr().out
    assert "weights.relay: this process would listen at tcp://10.0.0.2:7000: other hosts could reach it" in told
    assert "buffer.bind" not in told


def test_on_loopback_a_relay_listens_and_has_no_key():
    relay = open_relay(parse_config({"weights": {"relay": 4}}), "tcp://127.0.0.1:1", None)
    assert relay.address.startswith("tcp://127.0.0.1:")
    relay.close()


def test_one_that_does_not_lead_lets_the_other_begin_and_gets_the_version_all_the_same(world):
    world.add(1)
    world.hosts[0].follow([], leads=False)
    manifest, flat = world.publish(1)
    assert torch.equal(bits(world.deliver(manifest)[0]), flat)


def test_the_message_of_the_server_reaches_the_receiver():
    heard = []
    loop = SimpleNamespace(_receiver=SimpleNamespace(follow=lambda parents, leads: heard.append((parents, leads))))
    TicketLoop._handle(loop, [({"type": "parents", "parents": [["", -1], ["tcp://a:1", 2]], "leads": False}, [])])
    assert heard == [([Parent("", -1), Parent("tcp://a:1", 2)], False)]


def test_with_keys_versions_go_from_the_learner_to_a_host_and_on_to_the_next(tmp_path):
    make_keys(tmp_path)
    keys, run_id = ClientKeys.of(str(tmp_path)), f"test-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        publisher = Publisher(run_id, [("w", (NUMEL,), 0, NUMEL)], CHUNK)
        stack.callback(publisher.close)
        server = WeightServer("tcp://127.0.0.1:*", ServerKeys.of(str(tmp_path)))
        server.start()
        stack.callback(server.close)
        relays = [Relay("tcp://127.0.0.1:*", keys) for _ in range(2)]
        hosts = [
            Receiver("zmq", lambda: server.address, run_id, keys=keys, relay=relay, host=f"h{number}")
            for number, relay in enumerate(relays)
        ]
        for host, row in zip(hosts, parents(2, 1), strict=True):
            stack.callback(host.close)
            host.follow(addressed(row, [relay.address for relay in relays]))
        flat = torch.linspace(0, 1, NUMEL)
        manifest = publisher.publish(flat, 1, evaluated=False)
        server.serve(manifest)
        for host in hosts:
            host.fetch(manifest)
        for host in hosts:
            assert torch.equal(torch.frombuffer(bytearray(host.wait(10).data), dtype=torch.float32), flat)
        assert (server.counts["bytes"], relays[0].counts["bytes"]) == (manifest.nbytes, manifest.nbytes)


def test_who_is_to_be_told_its_parents_waits_for_that_with_its_first_version(world):
    world.add(1)
    manifest, flat = world.publish(1)
    world.deliver(manifest)
    late = Receiver("zmq", lambda: world.server.address, world.run_id, follows=True, host="late")
    try:
        sent = world.server.counts["bytes"]
        late.fetch(manifest)
        assert late.wait(0.2) is None
        late.follow([Parent(world.relays[0].address, 0)])
        prepared = late.wait(10)
        assert torch.equal(bits(prepared), flat)
        assert world.server.counts["bytes"] == sent
        assert prepared.received["relay_bytes"] == manifest.nbytes
    finally:
        late.close()


def test_what_a_broken_transfer_has_brought_is_not_sent_on_until_it_goes_on(world):
    world.add(1)
    [host], [relay] = world.hosts, world.relays
    world.deliver(world.publish(1)[0])
    manifest, _ = world.publish(2)
    world.publish(4)  # over it
    host.fetch(manifest)
    deadline = time.monotonic() + 10
    while not host.failures["superseded"]:
        assert time.monotonic() < deadline
        assert host.wait(0.01) is None
    held = relay._server._shelf._held.values()
    assert [filling.manifest.version for filling in held] == [1]
