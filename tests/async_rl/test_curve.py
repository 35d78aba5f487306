"""Keys: their files, who is let in by whom, and that strangers get nothing and break nothing."""

from __future__ import annotations

import os
import socket as plain
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq
from buffer_helpers import answer
from server_helpers import NoWeights, Peer, config, hello, manifest, running

from async_rl.buffer.records import Limits
from async_rl.buffer.server import Server
from async_rl.client import Client
from async_rl.config import BufferConfig, parse_control, to_toml
from async_rl.curve import ClientKeys, Gate, ServerKeys, check_open, make_keys, secure_client, secure_server
from async_rl.errors import ConfigError, DeadlineError, HandshakeError
from async_rl.launch import preflight
from async_rl.weights.manifest import Manifest, chunk_checksums, combine
from async_rl.weights.puller import Puller, TransferError
from async_rl.weights.segment import Segment, segment_path, unlink_run
from async_rl.weights.server import WeightServer
from async_rl.wire import LIMITS, pack_header

SOON_S = 0.4
"""Longer than a handshake on loopback takes."""


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def strange(tmp_path, folder):
    """Keys of a client that the server does not know, although it knows the server."""
    make_keys(tmp_path / "strange")
    (tmp_path / "strange" / "server.pub").write_text((folder / "server.pub").read_text())
    return tmp_path / "strange"


def secured(folder, **buffer):
    return config(buffer={"keys": str(folder), **buffer})


# ---------------------------------------------------------------- files


def test_two_pairs_are_made_and_only_the_owner_reads_the_secret_ones(folder):
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes["server.key"] == modes["client.key"] == 0o600
    assert sorted(modes) == ["client.key", "client.pub", "server.key", "server.pub"]
    server, client = ServerKeys.of(str(folder)), ClientKeys.of(str(folder))
    assert client.server == server.public
    assert server.clients == {client.public}
    assert zmq.curve_public(server.secret) == server.public
    assert zmq.curve_public(client.secret) == client.public
    for public in ("server.pub", "client.pub"):
        assert "secret = " not in (folder / public).read_text()


def test_keys_that_are_there_stay_and_a_lost_public_file_comes_back(folder):
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert make_keys(folder) == []
    (folder / "server.pub").unlink()
    assert [path.name for path in make_keys(folder)] == ["server.pub"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    (folder / "server.key").unlink()
    with pytest.raises(ConfigError, match=r"server\.pub is there without server\.key"):
        make_keys(folder)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
@pytest.mark.parametrize(("name", "side"), [("server.key", ServerKeys), ("client.key", ClientKeys)])
def test_a_secret_that_others_can_read_is_refused_with_the_remedy(folder, name, side, mode):
    (folder / name).chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 .*{name}"):
        side.of(str(folder))


@pytest.mark.parametrize("damage", ["", "secret = ", 'public = "short"\nsecret = "short"', "\x00", 'public = "{}"'])
def test_a_damaged_file_is_named_and_not_quoted(folder, damage):
    secret = ClientKeys.of(str(folder)).secret.decode()
    (folder / "client.key").write_text(damage + f"\n{secret}")
    with pytest.raises(ConfigError, match=r"client\.key is damaged") as caught:
        ClientKeys.of(str(folder))
    assert secret not in str(caught.value)


def test_missing_files_name_the_command_that_makes_them(tmp_path, folder):
    with pytest.raises(ConfigError, match="async-rl keys"):
        ServerKeys.of(str(tmp_path))
    (folder / "client.pub").unlink()
    with pytest.raises(ConfigError, match="no client is known"):
        ServerKeys.of(str(folder))


def test_more_clients_are_known_by_their_public_files(folder, strange):
    (folder / "clients").mkdir()
    (folder / "clients" / "host7.pub").write_text((strange / "client.pub").read_text())
    known = ServerKeys.of(str(folder)).clients
    assert known == {ClientKeys.of(str(folder)).public, ClientKeys.of(str(strange)).public}


def test_no_secret_is_in_what_is_printed_of_the_keys(folder):
    for keys in (ServerKeys.of(str(folder)), ClientKeys.of(str(folder))):
        assert keys.secret.decode() not in repr(keys)


# ---------------------------------------------------------------- settings


def test_the_contract_does_not_depend_on_keys_and_the_settings_survive_the_file(folder):
    for settings, secure in [
        (config(), secured(folder, insecure=True)),
        (parse_control({"domain": "control"}), parse_control({"domain": "control", "buffer": {"keys": str(folder)}})),
    ]:
        assert settings.contract_hash() == secure.contract_hash()
        assert f'keys = "{folder}"' in to_toml(secure)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost", "[::1]"])
def test_a_loopback_address_needs_no_keys(host):
    check_open(f"tcp://{host}:5555", "", insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.1", "[::]", "localhost.example.org", "127.example.org"])
def test_any_other_address_needs_keys_or_consent(host, folder):
    with pytest.raises(ConfigError, match=r"async-rl keys DIR .*--insecure"):
        check_open(f"tcp://{host}:5555", "", insecure=False)
    check_open(f"tcp://{host}:5555", str(folder), insecure=False)
    check_open(f"tcp://{host}:5555", "", insecure=True)


def test_bad_keys_are_found_before_anything_starts(folder):
    preflight.check_address(BufferConfig(bind="tcp://0.0.0.0:*", keys=str(folder)))
    preflight.check_connect("tcp://h:1", str(folder))
    (folder / "client.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        preflight.check_address(BufferConfig(keys=str(folder)))
    with pytest.raises(ConfigError, match="chmod 600"):
        preflight.check_connect("tcp://h:1", str(folder))


def test_a_server_on_all_interfaces_starts_with_keys(tmp_path, folder):
    limits = Limits(num_tasks=4)
    with Server(secured(folder, bind="tcp://0.0.0.0:*"), tmp_path, limits, NoWeights()) as server:
        port = server.address.rpartition(":")[2]
        with pytest.raises(ConfigError, match="another program listens"):
            Server(secured(folder, bind=f"tcp://0.0.0.0:{port}"), tmp_path, limits, NoWeights())


# ---------------------------------------------------------------- sockets


@contextmanager
def dealer(address: str, keys: ClientKeys | None = None) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        if keys is not None:
            secure_client(socket, keys)
        socket.connect(address)
        yield socket


def offer(socket: zmq.Socket, message: bytes) -> None:
    """Send as a stranger; a handshake that has failed by now leaves nobody to send to."""
    with suppress(zmq.Again):
        socket.send(message, zmq.NOBLOCK)


def strangers(folder, strange):
    """Everyone who must not come in: no keys, an unknown client, a client of another server."""
    other_server = ClientKeys(
        public=ClientKeys.of(str(folder)).public,
        secret=ClientKeys.of(str(folder)).secret,
        server=zmq.curve_keypair()[0],
    )
    return [None, ClientKeys.of(str(strange)), other_server]


def test_a_known_client_works_and_the_rest_is_let_in_nowhere(tmp_path, folder, strange):
    settings = secured(folder)
    with running(settings, tmp_path / "run") as server:
        keys = ClientKeys.of(str(folder))
        with (
            Peer(server.address, "learner", "learner0", settings.contract_hash(), keys=keys) as learner,
            Peer(server.address, "actor", "a", settings.contract_hash(), keys=keys) as actor,
        ):
            learner.connect(5)
            learner.request("trained", "trained", step=-1, manifest=manifest(0).to_wire(), stats={})
            actor.connect(5)
            for stranger in strangers(folder, strange):
                with dealer(server.address, stranger) as socket:
                    offer(socket, hello(settings, name="stranger"))
                    assert not socket.poll(SOON_S * 1000)
            with plain.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), 2) as raw:
                raw.sendall(os.urandom(4096))
                raw.settimeout(2)
                assert len(_everything(raw)) < 100  # ZeroMQ's greeting, nothing of the run
            assert server.service.roster.named("stranger") is None
            actor.go_live(0)  # those who are in go on
            actor.send("credit", count=1)
            assert actor.submit(answer(actor.tickets(1)[0]))[0][2] == "accepted"


def _everything(raw: plain.socket) -> bytes:
    received = b""
    try:
        while data := raw.recv(4096):
            received += data
    except OSError:
        return received
    return received


def test_the_error_of_a_client_without_the_right_keys_names_the_reason_in_time(tmp_path, folder, strange):
    settings = secured(folder)
    with running(settings, tmp_path / "run") as server:
        for stranger in strangers(folder, strange):
            began = time.monotonic()
            with (
                Client(server.address, "actor", "a", settings.contract_hash(), keys=stranger) as client,
                pytest.raises((DeadlineError, HandshakeError), match=r"no answer from tcp://.*wrong.*keys"),
            ):
                client.connect(SOON_S)
            assert time.monotonic() - began < 5


def test_a_client_with_keys_does_not_talk_to_a_server_without(tmp_path, folder):
    settings = config()
    with (
        running(settings, tmp_path / "run") as server,
        Client(server.address, "actor", "a", settings.contract_hash(), keys=ClientKeys.of(str(folder))) as client,
        pytest.raises((DeadlineError, HandshakeError), match="no answer"),
    ):
        client.connect(SOON_S)


def test_versions_are_pulled_with_keys_and_not_without(folder, strange):
    run_id, nbytes, chunk = f"test-{uuid.uuid4().hex[:8]}", 100_000, 4096
    data = os.urandom(nbytes)
    Segment(run_id, "0", nbytes).data[:] = data
    chunks = chunk_checksums(memoryview(data), chunk)
    version = Manifest(
        version=0,
        run_id=run_id,
        tensors=(),
        nbytes=nbytes,
        chunk_bytes=chunk,
        chunks=chunks,
        checksum=combine(chunks),
        segment=str(segment_path(run_id, "0")),
        host="",
    )
    server, stop = WeightServer("tcp://127.0.0.1:*", ServerKeys.of(str(folder))), os.eventfd(0)
    server.start()
    try:
        server.serve(version)
        for stranger in strangers(folder, strange):
            with dealer(server.address, stranger) as socket:
                offer(socket, pack_header({"type": "get", "version": 0, "chunk": 0}))
                assert not socket.poll(SOON_S * 1000)
        assert server.counts["served"] == 0
        stranger = Puller(server.address, stop, 0.1, ClientKeys.of(str(strange)))
        with pytest.raises(TransferError, match=r"no_progress|unreachable"):
            stranger.pull(version, memoryview(bytearray(nbytes)))
        stranger.close()
        puller, into = Puller(server.address, stop, 5.0, ClientKeys.of(str(folder))), bytearray(nbytes)
        puller.pull(version, memoryview(into))
        puller.close()
        assert bytes(into) == data
    finally:
        server.close()
        os.close(stop)
        unlink_run(run_id)


# ---------------------------------------------------------------- gate


@contextmanager
def router(
    context: zmq.Context, keys: ServerKeys, limit: int = LIMITS.frame_bytes, address: str = "tcp://127.0.0.1:*"
) -> Iterator[zmq.Socket]:
    with context.socket(zmq.ROUTER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, limit)
        secure_server(socket, keys)
        socket.bind(address)
        yield socket


def test_the_gate_counts_and_names_an_address_once(folder, strange, capfd):
    keys = ServerKeys.of(str(folder))
    with zmq.Context() as context:
        gate = Gate(context, keys)
        with router(context, keys) as socket:
            for _ in range(3):
                with dealer(socket.get_string(zmq.LAST_ENDPOINT), ClientKeys.of(str(strange))) as client:
                    offer(client, b"x")
                    assert not socket.poll(SOON_S * 1000)
            with dealer(socket.get_string(zmq.LAST_ENDPOINT), ClientKeys.of(str(folder))) as client:
                client.send(b"x")
                assert socket.poll(5000)
        gate.close()
    assert gate.counts["refused"] >= 3
    assert gate.counts["admitted"] == 1
    printed = capfd.readouterr().out
    assert printed.count("refused a client at 127.0.0.1") == 1
    assert "1 known" in printed


def test_without_a_gate_nobody_is_let_in(folder):
    keys = ServerKeys.of(str(folder))
    with zmq.Context() as context, router(context, keys) as socket:
        gate = Gate(context, keys)
        gate.close()
        with dealer(socket.get_string(zmq.LAST_ENDPOINT), ClientKeys.of(str(folder))) as client:
            offer(client, b"x")
            assert not socket.poll(SOON_S * 1000)


def test_the_longest_frame_passes_encrypted_and_a_longer_one_does_not(folder):
    """Encryption adds bytes to a frame, which the socket's limit counts."""
    keys, limit = ServerKeys.of(str(folder)), 5000
    with zmq.Context() as context:
        gate = Gate(context, keys)
        with (
            router(context, keys, limit) as socket,
            dealer(socket.get_string(zmq.LAST_ENDPOINT), ClientKeys.of(str(folder))) as client,
        ):
            client.send(b"x" * limit)
            assert socket.poll(5000)
            assert len(socket.recv_multipart()[1]) == limit
            client.send(b"x" * (limit + 100))
            assert not socket.poll(SOON_S * 1000)
        gate.close()


def test_a_client_comes_back_by_itself_to_a_server_that_was_started_again(folder):
    keys, address = ServerKeys.of(str(folder)), "tcp://127.0.0.1:*"
    with zmq.Context() as mine, mine.socket(zmq.DEALER) as client:
        client.set(zmq.LINGER, 0)
        secure_client(client, ClientKeys.of(str(folder)))
        for life in range(2):
            with zmq.Context() as context:
                gate = Gate(context, keys)
                with router(context, keys, address=address) as socket:
                    address = socket.get_string(zmq.LAST_ENDPOINT)
                    if life == 0:
                        client.connect(address)
                    client.send(b"%d" % life)
                    assert socket.poll(5000)
                    assert socket.recv_multipart()[1] == b"%d" % life
                gate.close()
