"""Hostile peers against a real server process, while two good actors and a learner make a run, which must end well."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from buffer_helpers import answer
from server_helpers import Cast, config, eventually, hello

from async_rl.client import Stopped
from async_rl.config import to_toml
from async_rl.errors import AsyncRLError
from async_rl.protocol import Ticket
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine
from async_rl.weights.segment import Segment
from async_rl.wire import decode_groups, encode_groups, pack_header, unpack_header

STEPS, MOST_STEPS, PACE_S = 400, 380, 0.25
"""While the attacks go on a step takes this time, so that there are tickets for the hostile, too; and no more are made
than this."""
WAIT_S = 40.0
GROWTH_BYTES = 500 << 20
"""A header of 16 MiB becomes a few hundred MiB of objects while it is looked at."""
CONNECTIONS = 10_000
SETTINGS = {"steps": STEPS, "buffer": {"heartbeat_s": 6.0, "max_staleness": 1, "groups_per_step": 2}}


@pytest.fixture
def settings():
    return config(**SETTINGS)


@pytest.fixture
def process(settings, tmp_path):
    """The server's process and what it tells of itself; killed after the test."""
    path, log = tmp_path / "c.toml", tmp_path / "log"
    path.write_text(to_toml(settings))
    command = [sys.executable, "-m", "async_rl.buffer.server", str(path), "--out", str(tmp_path / "run")]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        note = tmp_path / "run" / "server.json"
        eventually(note.exists)
        told = json.loads(note.read_text())
        yield SimpleNamespace(process=process, out=tmp_path / "run", log=log, contract=settings, **told)
    finally:
        process.kill()
        process.wait(10)
        print(log.read_text()[-3000:])


def memory(pid: int, field: str) -> int:
    """Bytes; VmHWM is the most that ever was resident."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


# ---------------------------------------------------------------- the good


class Good(threading.Thread):
    """A good client; what it dies of is raised in :meth:`end`."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self._work, self._error = work, None
        self.start()

    def run(self):
        try:
            self._work()
        except Stopped:
            pass
        except Exception as error:
            self._error = error

    def end(self):
        self.join(WAIT_S)
        assert not self.is_alive(), "a good client hangs"
        if self._error is not None:
            raise self._error


def version(run_id: str, segment: Segment, number: int) -> Manifest:
    data = memoryview(np.full(2, number, np.float32)).cast("B")
    segment.data[:] = data
    chunks = chunk_checksums(data, 8)
    return Manifest(
        version=number,
        run_id=run_id,
        tensors=(Tensor("w", "float32", (2,), 0),),
        nbytes=8,
        chunk_bytes=8,
        chunks=chunks,
        checksum=combine(chunks),
        segment=str(segment.path),
        host="h",
    )


def act(cast: Cast, name: str, done: threading.Event) -> None:
    """A good actor: commits each version, submits a proper group for each ticket."""
    actor = cast.join("actor", name)
    actor.send("credit", count=2)
    while not done.is_set():
        for header, _ in actor.receive(0.2):
            if header["type"] == "version" or (header["type"] == "welcome" and header["manifest"]):
                made = header["manifest"]
                actor.send("live", version=made["version"], checksum=made["checksum"], transfer_s=0.1, commit_s=0.1)
            elif header["type"] == "tickets":
                tickets = [Ticket.from_wire(t) for t in header["tickets"]]
                actor.send_groups([answer(ticket) for ticket in tickets])
                actor.send("credit", count=len(tickets))
            elif header["type"] == "stop":
                return


def learn(cast: Cast, run_id: str, segment: Segment, attacked: threading.Event) -> None:
    """A good learner, slow until all attacks are over."""
    learner = cast.join("learner", "learner0", step=0, group="g")
    first = version(run_id, segment, 0).to_wire()
    learner.request("trained", "trained", step=-1, manifest=first, stats={})
    for step in range(STEPS):
        assert attacked.wait(PACE_S if step < MOST_STEPS else WAIT_S) or step < MOST_STEPS, "the attacks took too long"
        header, frames = learner.request("next", "shard", WAIT_S, step=step)
        for group in decode_groups(header, frames):
            assert np.isfinite(group.rewards).all()
            assert group.arrays["versions"].max() <= step
            assert set(group.arrays) == {"tokens", "loss_mask", "logprobs", "versions"}
        made = version(run_id, segment, step + 1).to_wire()
        learner.request("trained", "trained", WAIT_S, step=step, manifest=made, stats={})
    learner.send("done", stopped=False)
    learner.until("stop")


# ---------------------------------------------------------------- the hostile


class Mallory:
    """A client that keeps to no rule, once it is let in."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._is_actor = False

    def live(self, manifest: dict) -> None:
        """Commit a version, and from now on each that comes, like a good actor: else there are no tickets."""
        self._is_actor = True
        self.send(pack_header({"type": "live", "version": manifest["version"], "checksum": manifest["checksum"]}))

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def until(self, *kinds: str) -> tuple[dict, list[bytes]]:
        while self.socket.poll(WAIT_S * 1000):
            head, *frames = self.socket.recv_multipart()
            header = unpack_header(head)
            if header["type"] == "version" and self._is_actor:
                self.live(header["manifest"])
            if header["type"] in kinds:
                return header, frames
        raise AssertionError(f"none of {kinds} came")


def zmtp(address: str) -> socket.socket:
    """A TCP connection on which a ZMTP handshake as a DEALER was made by hand: one descriptor, nothing else."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    raw = socket.create_connection((host, int(port)), WAIT_S)
    body = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    raw.sendall(greeting + bytes([4, len(body)]) + body)
    return raw


def frame(content: bytes) -> bytes:
    """The last frame of a message, as it goes over the line."""
    if len(content) < 256:
        return bytes([0, len(content)]) + content
    return b"\x02" + len(content).to_bytes(8, "big") + content


def speak_no_zmq(address: str) -> list[socket.socket]:
    """Noise, another protocol, half a greeting, and a frame that never ends; they stay open."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    noise = np.random.default_rng(0)
    opened = []
    for i in range(60):
        raw = socket.create_connection((host, int(port)), WAIT_S)
        raw.sendall([noise.bytes(400), b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0", b""][i % 4])
        opened.append(raw)
    for size in (1 << 62, (1 << 30) - 1):  # too large: cut off at once; allowed: held as far as it has come
        raw = zmtp(address)
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"\x02" + size.to_bytes(8, "big") + bytes(1 << 16))
        opened.append(raw)
    return opened


def send_bad_headers(mallory: Mallory, settings) -> None:
    """Headers that are too long, too deep, too full; each is refused by its reason."""
    nested: list = []
    for _ in range(40):
        nested = [nested]
    empties = b"\x82\xa4type\xa1x\xa1y\xdd" + (15 << 20).to_bytes(4, "big") + b"\x90" * (15 << 20)
    bad = {
        "header_too_large": bytes(17 << 20),
        "too_many_containers": empties,
        "too_deep": pack_header({"type": "beat", "x": nested}),
        "bad_msgpack": b"\xc1",
        "hello_first": pack_header({"type": "credit", "count": 1}),
        "hello": hello(settings, name="x" * 201),
        "bad_field": hello(settings, host=3),
    }
    for code, header in bad.items():
        mallory.send(header)
        assert mallory.until("refused")[0]["code"] == code


def flood_with_names(context: zmq.Context, address: str, settings) -> None:
    """Thousands of names, by one line that is somebody else each time."""
    flood = Mallory(context, address)
    for i in range(2500):
        flood.send(hello(settings, name=f"nobody{i}", pid=i))
        if i % 500 == 499:
            flood.until("welcome")
    flood.send(pack_header({"type": "bye"}))
    flood.socket.close()


def spoilt(ticket: Ticket) -> list:
    """Groups for one's own ticket that the learner must never see, each with the reason of its refusal."""
    good = answer(ticket)

    def change(**arrays):
        return replace(good, arrays={**good.arrays, **arrays})

    mask, logprobs = good.arrays["loss_mask"], good.arrays["logprobs"]
    total = sum(good.lengths)
    return [
        (replace(good, rewards=np.array([np.nan, np.inf], np.float32)), "bad_reward"),
        (change(logprobs=np.where(mask == 1, np.nan, logprobs).astype(np.float32)), "bad_logprobs"),
        (change(logprobs=np.where(mask == 1, np.inf, logprobs).astype(np.float32)), "bad_logprobs"),
        (change(tokens=np.full(total, 1 << 30, np.int32)), "token_outside_vocabulary"),
        (change(tokens=np.full(total, -1, np.int32)), "token_outside_vocabulary"),
        (change(versions=np.where(mask == 1, 1 << 30, -1).astype(np.int32)), "version_from_the_future"),
        (change(loss_mask=np.where(mask == 1, 1, 2).astype(np.uint8)), "mask_contradicts_versions"),
        (change(versions=good.arrays["versions"].astype(np.int64)), "bad_dtype"),
        (change(more=np.zeros(total, np.float32)), "unknown_array"),
        (replace(good, task_index=good.task_index + 1), "wrong_task"),
        (replace(good, meta={"x": "x" * (2 << 20)}), "meta_too_large"),
    ]


def submit_bad_groups(mallory: Mallory, settings) -> Counter:
    """Own tickets answered badly, forged ones, and replays; the reasons that came back."""
    mallory.send(hello(settings, name="mallory"))
    made = mallory.until("welcome")[0]["manifest"] or mallory.until("version")[0]["manifest"]
    mallory.live(made)
    told: Counter = Counter()
    for number in range(11):
        mallory.send(pack_header({"type": "credit", "count": 1}))
        header = {}
        while not header.get("tickets"):
            header = mallory.until("tickets")[0]
        ticket = Ticket.from_wire(header["tickets"][0])
        group, reason = spoilt(ticket)[number]
        for _ in range(2):  # and once more: a replay gets the same answer and changes nothing
            mallory.send(*encode_groups("submit", [group]))
            assert mallory.until("ack")[0]["results"][0][2:] in (
                ["filtered" if reason == "bad_reward" else "refused", reason],
                ["refused", reason],
            ), reason
            told[reason] += 1
            if reason == "meta_too_large":
                break
    # somebody else's that was accepted long ago (the answer of then comes again, and nothing is counted), and no one's
    for ordinal, attempt in ((0, 0), (10**6, 0), (1, 99), ((1 << 62) - 1, 0)):
        mallory.send(*encode_groups("submit", [replace(group, ordinal=ordinal, attempt=attempt, meta={})]))
        told[mallory.until("ack")[0]["results"][0][2]] += 1
    for ordinal in (-1, 1 << 63):
        mallory.send(pack_header({"type": "fail", "ordinal": ordinal, "attempt": 0, "reason": "r", "final": True}))
        told[mallory.until("refused")[0]["code"]] += 1
    return told


def read_nothing(context: zmq.Context, address: str, settings) -> zmq.Socket:
    """A monitor that asks for the status again and again and never reads an answer."""
    slow = context.socket(zmq.DEALER)
    slow.setsockopt(zmq.LINGER, 0)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    slow.connect(address)
    slow.send(hello(settings, role="monitor", name="slow"))
    for _ in range(3000):
        slow.send(pack_header({"type": "beat"}))
    return slow


def connect_thousands(address: str, settings, pid: int) -> list[socket.socket]:
    """As many connections as the system lets both sides have: most say nothing, some say hello and nothing more."""
    limits = [resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]]
    count = min(CONNECTIONS, *(limit - 300 for limit in limits))
    print(f"{count} connections")
    opened = []
    for i in range(count):
        opened.append(zmtp(address))
        if i % 20 == 0:
            opened[-1].sendall(frame(hello(settings, name=f"silent{i}", pid=i)))
    return opened


@pytest.mark.real
def test_hostile_peers_change_nothing_but_the_count_of_refusals(process, settings):
    segment = Segment(process.run_id, "0", 8)
    attacked, done = threading.Event(), threading.Event()
    context = zmq.Context()
    opened: list[socket.socket] = []
    base = memory(process.pid, "VmRSS")
    try:
        with Cast(process, settings) as cast:
            good = [Good(lambda name=name: act(cast, name, done)) for name in ("a", "b")]
            good.append(Good(lambda: learn(cast, process.run_id, segment, attacked)))
            began = time.monotonic()
            opened += speak_no_zmq(process.address)
            mallory = Mallory(context, process.address)
            send_bad_headers(mallory, settings)
            flood_with_names(context, process.address, settings)
            told = submit_bad_groups(mallory, settings)
            slow = read_nothing(context, process.address, settings)
            victim = cast.join("evaluator", "e")
            mallory.send(hello(settings, name="e", role="actor"))  # takes the name, and the place
            with pytest.raises(AsyncRLError, match="took the name"):
                victim.until("never")
            opened += connect_thousands(process.address, settings, process.pid)
            print(f"the attacks took {time.monotonic() - began:.1f} s")
            attacked.set()
            for client in good:
                client.end()
            peak = memory(process.pid, "VmHWM")
            slow.close()
            assert process.process.wait(WAIT_S) == 0, process.log.read_text()[-3000:]
    finally:
        done.set()
        context.destroy(0)
        for connection in opened:
            connection.close()
        segment.unlink()
    books = json.loads((process.out / "books.json").read_text())
    print(f"memory +{(peak - base) / 1e6:.0f} MB; refused: {books['refused']}")
    assert "Traceback" not in process.log.read_text()
    assert books["status"] == "completed"
    counts = books["books"]
    assert counts["issued"] == sum(counts.values()) - counts["issued"]
    assert counts["trained"] == STEPS * 2
    assert books["staleness"]["max"] <= 1
    for reason in ("header_too_large", "too_many_containers", "too_deep", "bad_msgpack", "hello", "never_issued"):
        assert books["refused"][reason], reason
    assert told.keys() - {"accepted", "late", "refused"} <= books["refused"].keys() | books["filtered"].keys()
    assert peak - base < GROWTH_BYTES


@pytest.mark.real
def test_a_server_whose_last_descriptor_is_taken_goes_on(process, settings):
    segment = Segment(process.run_id, "0", 8)
    attacked, done = threading.Event(), threading.Event()
    opened: list[socket.socket] = []
    most = 150
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
    try:
        with Cast(process, settings) as cast:
            good = [Good(lambda name=name: act(cast, name, done)) for name in ("a", "b")]
            good.append(Good(lambda: learn(cast, process.run_id, segment, attacked)))
            eventually((process.out / "books.json").exists)  # written with the first version: its segment is mapped
            opened += [zmtp(process.address) for _ in range(2 * most)]
            eventually(lambda: len(list(Path(f"/proc/{process.pid}/fd").iterdir())) == most)
            attacked.set()
            for client in good:
                client.end()
            assert process.process.wait(WAIT_S) == 0, process.log.read_text()[-3000:]
    finally:
        done.set()
        for connection in opened:
            connection.close()
        segment.unlink()
    assert "Too many open files; the run goes on" in process.log.read_text()
    assert "Traceback" not in process.log.read_text()
