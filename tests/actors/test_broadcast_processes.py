"""Real processes: a learner that sends, receivers of which one is killed in the middle of a version."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from broadcast_worker import BLOCK, layout_of
from broadcasting import Sender

from async_rl.weights import offer
from learner.publisher import Publisher

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

DEADLINE_S = 3.0


class Receiver:
    def __init__(self):
        root = Path(__file__).parents[2]
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("broadcast_worker.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def hear(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def tell(self, manifest, offered, dies_at=-1):
        fields = manifest.to_wire()
        fields["chunks"] = fields["chunks"].hex()
        said = {"manifest": fields, "offer": offered.to_wire(), "dies_at": dies_at}
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()


@pytest.fixture
def receivers():
    started = [Receiver() for _ in range(3)]
    assert [receiver.hear() for receiver in started] == ["ready"] * 3
    yield started
    for receiver in started:
        receiver.process.kill()
        receiver.process.wait(10)
        receiver.process.stdin.close()
        receiver.process.stdout.close()


@pytest.fixture
def publisher():
    made = Publisher(f"broadcast-{uuid.uuid4().hex[:8]}", layout_of(), 1 << 14)
    yield made
    made.close()


def publish(publisher, version):
    torch.manual_seed(version)
    flat = torch.randn(publisher.nbytes // 4)
    with_gaps = torch.zeros_like(flat)
    for _, _, first, numel in layout_of():
        with_gaps[first : first + numel] = flat[first : first + numel]
    return publisher.publish(with_gaps, version, evaluated=False), with_gaps.numpy().tobytes()


def test_those_that_live_get_every_version_though_one_is_killed_in_the_middle(receivers, publisher, monkeypatch):
    monkeypatch.setattr(offer.blocks, "__defaults__", (BLOCK,))
    sender = Sender(DEADLINE_S)
    manifest, data = publish(publisher, 1)
    assert len(offer.blocks(manifest.tensors, manifest.nbytes)) > 8
    sender.begin(manifest, data, world=4)
    for rank, receiver in enumerate(receivers, 1):
        receiver.tell(manifest, sender.offer(manifest, rank, 4))
    assert sender.finish().error == ""
    heard = [receiver.hear() for receiver in receivers]
    assert [(h["checksum"], h["why"]) for h in heard] == [(manifest.checksum, "")] * 3

    manifest, data = publish(publisher, 2)
    sender.begin(manifest, data, world=4)
    for rank, receiver in enumerate(receivers, 1):
        receiver.tell(manifest, sender.offer(manifest, rank, 4), dies_at=3 if rank == 2 else -1)
    sent = sender.finish()
    assert sent.error
    assert sent.seconds < DEADLINE_S + 2
    killed = receivers.pop(1)
    assert killed.hear() is None
    heard = [receiver.hear() for receiver in receivers]
    assert [h["checksum"] for h in heard] == [manifest.checksum] * 2
    assert any("failed" in h["why"] or "was not there" in h["why"] for h in heard)
    assert max(h["seconds"] for h in heard) < DEADLINE_S + 5

    manifest, data = publish(publisher, 3)  # the next communicator has those that live
    sender.begin(manifest, data, world=3)
    for rank, receiver in enumerate(receivers, 1):
        receiver.tell(manifest, sender.offer(manifest, rank, 3))
    assert sender.finish().error == ""
    heard = [receiver.hear() for receiver in receivers]
    assert [(h["checksum"], h["why"]) for h in heard] == [(manifest.checksum, "")] * 2
