"""What is sent is what was published: blocks of the flat vector, whole or in pieces, with or without a cast."""

import time
import uuid

import pytest
import torch

from async_rl.errors import WeightsError
from async_rl.weights import offer
from async_rl.weights.channel import reach
from async_rl.weights.segment import SegmentReader
from learner.broadcaster import Broadcaster, in_blocks
from learner.publisher import Publisher

LAYOUT = [("a", (3, 5), 0, 15), ("b", (7,), 32, 7), ("c", (40, 2), 64, 80), ("d", (1,), 160, 1)]
NUM_FLAT = 200  # 161 are published


def flat_vector():
    torch.manual_seed(0)
    flat = torch.zeros(NUM_FLAT)
    for _, _, first, numel in LAYOUT:
        flat[first : first + numel] = torch.randn(numel)
    flat[161:] = 7.0
    return flat


def whole(flat):
    return [(0, flat)]


def by_tensor(flat):
    return [(first, flat[first : first + numel].view(shape)) for _, shape, first, numel in LAYOUT]


def in_halves(flat):
    """Pieces that begin and end inside of tensors."""
    return [(0, flat[:70]), (70, flat[70:90]), (90, flat[90:])]


@pytest.fixture(params=["float32", "bfloat16"])
def publisher(request):
    made = Publisher(f"test-{uuid.uuid4().hex[:8]}", LAYOUT, 64, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("pieces", [whole, by_tensor, in_halves])
@pytest.mark.parametrize("most", [1, 100, 1 << 20])
def test_the_blocks_are_the_published_bytes(publisher, pieces, most, monkeypatch):
    monkeypatch.setattr(offer.blocks, "__defaults__", (most,))
    manifest = publisher.publish(flat_vector(), 0, evaluated=False)
    source = iter(pieces(flat_vector()))
    found = list(in_blocks(manifest, source, torch.device("cpu")))
    spans = offer.blocks(manifest.tensors, manifest.nbytes)
    assert [block.numel() for block in found] == [end - begin for begin, end in spans]
    # float32: a 0-60, b 128-156, c 256-576, d 640-644; bfloat16 half of it, so that a and b are one block of 78
    assert len(found) == {1: 4, 100: {644: 4, 322: 3}[publisher.nbytes], 1 << 20: 1}[most]
    assert torch.cat(found).numpy().tobytes() == bytes(SegmentReader().open(manifest))
    assert next(source, None) is None  # ranks that hold shards take part in every piece


def test_a_broadcast_to_nobody_who_comes_reads_all_pieces_and_says_who_is_missing(publisher):
    broadcaster = Broadcaster("127.0.0.1", torch.device("cpu"), 0.1)
    manifest = publisher.publish(flat_vector(), 0, evaluated=False)
    source = iter(by_tensor(flat_vector()))
    sent = broadcaster.send(manifest, "g", 3, source)
    assert (sent.missing, sent.error) == ((1, 2), "2 of 2 did not come in 0.1 s")
    assert next(source, None) is None
    assert 0.1 <= sent.seconds < 2
    broadcaster.close()


def test_the_store_keeps_the_last_meetings_alone(publisher, monkeypatch):
    monkeypatch.setattr("learner.broadcaster._KEPT", 2)
    broadcaster, manifest = (
        Broadcaster("127.0.0.1", torch.device("cpu"), 0.05),
        publisher.publish(flat_vector(), 0, False),
    )
    for group in "abc":
        assert broadcaster.send(manifest, group, 2, whole(flat_vector())).missing == (1,)
    assert [broadcaster._store.check([f"{group}/0.0/go"]) for group in "abc"] == [False, True, True]


def test_the_store_of_the_sender_has_one_address():
    senders = [Broadcaster("127.0.0.1", torch.device("cpu"), 0.1) for _ in range(2)]
    terms = [sender.terms for sender in senders]
    assert all(term["store"].startswith("127.0.0.1:") for term in terms)
    assert terms[0]["store"] != terms[1]["store"]
    assert terms[0]["device"] == terms[1]["device"]
    elsewhere = "127.0.0.2:" + terms[0]["store"].rpartition(":")[2]
    with pytest.raises(WeightsError, match="refused"):
        reach(elsewhere, time.monotonic() + 2)
