"""One transfer for all receivers of a host: real processes that are killed and stopped in the middle of one."""

import contextlib
import errno
import fcntl
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import zmq

from actors.receiver import Prepared, Receiver
from async_rl.bench.weights_parts import Talker
from async_rl.launch.janitor import Janitor
from async_rl.process import host_id
from async_rl.weights.copies import Copies
from async_rl.weights.files import SHM
from async_rl.weights.leftovers import copy_files, unlink_unused
from async_rl.weights.manifest import Manifest
from async_rl.weights.segment import SegmentReader, unlink_run
from async_rl.weights.server import WeightServer
from async_rl.weights.turn import Turn
from async_rl.wire import pack_header, unpack_header
from learner.publisher import Publisher

NUMEL = 50_000
CHUNK = 10_000
NUM_CHUNKS = 4 * NUMEL // CHUNK

CHILD = """
import sys
from actors.bench import receiving
_, run_id, address, stall_s = sys.argv
made = receiving.Receiving("zmq", run_id, address, float(stall_s))
receiving.answer_lines({"fetch": made.fetch})
made.close()
"""


class World:
    """A publisher and a chunk server, and receivers that are closed at the end."""

    def __init__(self) -> None:
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.publisher = Publisher(self.run_id, [("w", (NUMEL,), 0, NUMEL)], chunk_bytes=CHUNK)
        self.server = WeightServer("tcp://127.0.0.1:*")
        self.server.start()
        self.receivers: list[Receiver] = []

    def publish(self, version: int) -> Manifest:
        manifest = self.publisher.publish(torch.full((NUMEL,), float(version)), version, evaluated=False)
        self.server.serve(manifest)
        return manifest

    def receiver(self) -> Receiver:
        self.receivers.append(Receiver("zmq", lambda: self.server.address, self.run_id, stall_s=0.2))
        return self.receivers[-1]

    @property
    def transfers(self) -> float:
        """Bytes that were sent, in versions."""
        return self.server.counts["bytes"] / self.publisher.nbytes

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.server.close()
        self.publisher.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()
    assert unlink_run(made.run_id) == []


class HaltingServer:
    """A chunk server that falls silent after some chunks, until it is told to go on."""

    def __init__(self, manifest: Manifest, chunks: int) -> None:
        self._manifest, self._left = manifest, chunks
        self._data = SegmentReader().open(manifest)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.peers: set[bytes] = set()
        self.silent, self.go_on, self._end = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            if not self._socket.poll(50):
                continue
            peer, request = self._socket.recv_multipart()
            self.peers.add(peer)
            if self._left == 0:
                self.silent.set()
                self.go_on.wait(20)
            self._left -= 1
            chunk = unpack_header(request)["chunk"]
            header = pack_header({"type": "chunk", "version": self._manifest.version, "chunk": chunk})
            self._socket.send_multipart([peer, header, bytes(self._manifest.chunk(self._data, chunk))])

    def close(self) -> None:
        self.go_on.set()
        self._end.set()
        self._thread.join(10)
        self._context.destroy(linger=0)


@contextmanager
def process(run_id: str, address: str, tmp_path: Path, stall_s: float) -> Iterator[Talker]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    log = tmp_path / f"{uuid.uuid4().hex}.log"
    with Talker([str(script), run_id, address, str(stall_s)], log) as talker:
        yield talker


def opened_by(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not holds():
        if time.monotonic() > deadline:
            return False
    return True


def value(prepared: Prepared | None) -> float:
    assert prepared is not None
    prepared.manifest.verify(prepared.data)
    return torch.frombuffer(bytearray(prepared.data), dtype=torch.float32).unique().item()


def copies_of(run_id: str) -> list[Path]:
    return [path for path in copy_files(run_id) if not path.name.endswith("@turn")]


@pytest.mark.real
def test_of_four_processes_one_pulls_and_all_verify(world: World, tmp_path: Path):
    with process(world.run_id, world.server.address, tmp_path, 5.0) as a:
        others = [process(world.run_id, world.server.address, tmp_path, 5.0) for _ in range(3)]
        with others[0] as b, others[1] as c, others[2] as d:
            for version in range(4):
                manifest = world.publish(version)
                for child in (a, b, c, d):
                    child.say("fetch", manifest=manifest.to_wire())
                told = [child.hear() for child in (a, b, c, d)]
                assert [t["checksum"] for t in told] == [manifest.checksum] * 4
                assert world.transfers == version + 1
            assert 2 <= len(copies_of(world.run_id)) <= 3  # the newest, and one or two for the next
    assert copy_files(world.run_id) == []  # the last one has removed them


@pytest.mark.real
@pytest.mark.parametrize(("number", "stall_s"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 0.3)])
def test_another_process_takes_over_when_the_one_that_pulls_dies_or_stands_still(
    world: World, tmp_path: Path, number: signal.Signals, stall_s: float
):
    manifest = world.publish(3)
    server = HaltingServer(manifest, chunks=NUM_CHUNKS // 2)
    try:
        with (
            process(world.run_id, server.address, tmp_path, 30.0) as first,
            process(world.run_id, server.address, tmp_path, stall_s) as second,
        ):
            first.say("fetch", manifest=manifest.to_wire())
            assert server.silent.wait(20)
            if number == signal.SIGSTOP:
                os.kill(first.pid, signal.SIGSTOP)
            second.say("fetch", manifest=manifest.to_wire())
            # the second queues for the turn: it has the FIFO open; the half that is there is not taken for a version
            turn = SHM / f"async_rl-{world.run_id}@turn"
            assert eventually(lambda: str(turn) in opened_by(second.pid))
            assert len(server.peers) == 1
            assert [path.name.partition("@")[2][:5] for path in copies_of(world.run_id)] == ["part-"]
            if number == signal.SIGKILL:
                os.kill(first.pid, signal.SIGKILL)
            server.go_on.set()
            told = second.hear()
            assert told["checksum"] == manifest.checksum
            assert len(server.peers) == 2
            if number == signal.SIGSTOP:  # one that wakes up again does no harm
                os.kill(first.pid, signal.SIGCONT)
                assert first.hear()["checksum"] == manifest.checksum
    finally:
        server.close()
    assert copy_files(world.run_id) == []


def test_a_copy_names_itself_so_that_an_engines_process_can_map_it(world: World):
    receiver, manifest = world.receiver(), world.publish(5)
    receiver.fetch(manifest)
    prepared = receiver.wait(10)
    assert value(prepared) == 5
    assert prepared is not None
    assert (prepared.path, prepared.manifest.host) == ("zmq", host_id())
    assert Path(prepared.manifest.segment).read_bytes() == prepared.data
    assert os.stat(prepared.manifest.segment).st_mode & 0o777 == 0o600
    assert prepared.data.readonly
    receiver.fetch(manifest)  # once more after it was taken, as after a failed read-back: it is still there
    assert value(receiver.wait(10)) == 5
    assert world.transfers == 1


def test_files_are_used_again_but_never_while_somebody_reads_them(world: World):
    slow, fast = world.receiver(), world.receiver()
    slow.fetch(world.publish(0))
    held = slow.wait(10)
    inodes = []
    for version in range(1, 8):
        fast.fetch(world.publish(version))
        prepared = fast.wait(10)
        assert value(prepared) == version
        assert prepared is not None
        inodes.append(os.stat(prepared.manifest.segment).st_ino)
        assert value(held) == 0
    assert len(set(inodes)) == 2
    assert len(copies_of(world.run_id)) == 3  # the slow one's, the fast one's, and one for the next
    slow.fetch(world.publish(8))
    assert value(slow.wait(10)) == 8


def test_a_copy_with_wrong_bytes_is_discarded_and_pulled_again(world: World, capsys: pytest.CaptureFixture[str]):
    first, second = world.receiver(), world.receiver()
    manifest = world.publish(2)
    first.fetch(manifest)
    prepared = first.wait(10)
    assert prepared is not None
    with open(prepared.manifest.segment, "r+b") as file:
        file.seek(123_456)
        file.write(b"!")
    second.fetch(manifest)
    assert value(second.wait(10)) == 2
    assert world.transfers == 2
    assert "chunk 12 " in capsys.readouterr().out
    assert not second.failures


def test_without_room_in_shared_memory_each_pulls_its_own_and_says_so_once(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    manifests = [world.publish(version) for version in range(2)]
    monkeypatch.setattr(os, "posix_fallocate", full)
    receiver = world.receiver()
    for version, manifest in enumerate(manifests):
        receiver.fetch(manifest)
        prepared = receiver.wait(10)
        assert value(prepared) == version
        assert prepared is not None
        assert prepared.copy is None
        assert prepared.manifest == manifest
    assert capsys.readouterr().out.count("No space left on device") == 1
    assert copies_of(world.run_id) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("what", ["copy", "turn"])
def test_what_another_user_has_put_there_is_not_taken(world: World, what: str, capsys: pytest.CaptureFixture[str]):
    manifest = world.publish(4)
    planted = SHM / f"async_rl-{world.run_id}@{'0.4' if what == 'copy' else 'turn'}"
    if what == "copy":
        planted.write_bytes(bytes(SegmentReader().open(manifest)))  # right, but it may change any time
    else:
        os.mkfifo(planted, 0o666)
    os.chown(planted, 12_345, -1)
    try:
        receiver = world.receiver()
        receiver.fetch(manifest)
        prepared = receiver.wait(10)
        assert value(prepared) == 4
        assert prepared is not None
        assert prepared.copy is None
        assert "user 12345" in capsys.readouterr().out
        unlink_unused(world.run_id)
        assert planted.exists()
    finally:
        planted.unlink()


def test_the_turn_has_one_holder_and_a_waiter_learns_of_its_end(tmp_path: Path):
    path, stop = tmp_path / "turn", os.eventfd(0)
    holder, waiter = Turn(path), Turn(path)
    try:
        assert holder.take()
        assert not waiter.take()
        threading.Timer(0.05, holder.close).start()
        assert waiter.wait(stop, patience_s=30.0)
        assert waiter.take()
        second = Turn(path)
        assert not second.take()
        os.eventfd_write(stop, 1)
        assert not second.wait(stop, patience_s=30.0)
        second.close()
    finally:
        waiter.close()
        os.close(stop)


def test_a_holder_that_shows_a_pulse_keeps_its_turn_and_one_that_does_not_loses_it(tmp_path: Path):
    path, stop, ended = tmp_path / "turn", os.eventfd(0), threading.Event()
    holder, waiter = Turn(path), Turn(path)
    assert holder.take()

    def beat() -> None:
        for _ in range(30):
            if ended.wait(0.02):
                return
            holder.pulse()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert not waiter.take()
        assert waiter.wait(stop, patience_s=0.2)
        assert not thread.is_alive()  # it came to an end before anybody doubted it
        assert not path.exists()
        following = Turn(path)
        assert following.take()
        following.close()
    finally:
        ended.set()
        thread.join(10)
        holder.close()
        waiter.close()
        os.close(stop)


@pytest.mark.real
def test_the_janitor_removes_copies_that_nobody_uses_and_leaves_the_others():
    name = f"test-{uuid.uuid4().hex[:8]}"
    unused, used, part = (SHM / f"async_rl-{name}@{end}" for end in ("0.1", "0.2", "part-0"))
    other = SHM / f"async_rl-{name}.longer@0.1"
    planted = [SHM / f"async_rl-{name}.planted@{end}" for end in ("turn", "0.1")]
    try:
        for path in (unused, used, part, other):
            path.touch(0o600)
        os.mkfifo(SHM / f"async_rl-{name}@turn", 0o600)
        for path in planted:
            path.symlink_to(used)
        with used.open() as held, other.open() as held_too:
            for file in (held, held_too):
                fcntl.flock(file, fcntl.LOCK_SH)
            with Janitor():
                pass
            assert copy_files(name) == [used]
            assert other.exists()
            assert all(path.is_symlink() for path in planted)
        # the run's own janitor knows its name, and asks nobody
        assert unlink_run(name) == [used]
        assert other.exists()
    finally:
        for path in (*copy_files(name), other, *planted):
            path.unlink(missing_ok=True)


def test_a_run_id_that_is_no_plain_name_is_refused():
    with pytest.raises(Exception, match="run id"):
        Copies("*")


@pytest.mark.real
def test_what_a_killed_receiver_leaves_is_removed_by_the_next_one(world: World, tmp_path: Path):
    with process(world.run_id, world.server.address, tmp_path, 5.0) as child:
        child.ask("fetch", manifest=world.publish(0).to_wire())
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert len(copy_files(world.run_id)) == 2  # the version and the turn
    receiver = world.receiver()
    receiver.fetch(world.publish(1))
    assert value(receiver.wait(10)) == 1
    assert [path.name.partition("@")[2] for path in copies_of(world.run_id)] == ["0.1"]
