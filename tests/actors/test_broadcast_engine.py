"""The embedded engine receives versions from the learner's device: what it then holds, and what a failure leaves."""

import pytest
import torch
from broadcasting import Sender
from engine_models import MODELS, drain, greedy, make, plain, published, request

from actors.engines import incoming
from actors.engines.base import BroadcastEngine
from async_rl.errors import WeightsError
from async_rl.weights import offer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    MODELS["grouped"]().save_pretrained(folder)
    return folder


@pytest.fixture
def engine(folder):
    engine = make(folder)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch):
    """So small that a version has many."""
    monkeypatch.setattr(offer.blocks, "__defaults__", (4096,))
    monkeypatch.setattr(incoming, "PATIENCE_S", 0.2)


def other(folder):
    model = plain(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    return model


def test_a_version_comes_block_by_block_and_running_samples_go_on_with_it(engine, folder):
    model, sender = other(folder), Sender()
    manifest, data = published(model, 1)
    assert len(offer.blocks(manifest.tensors, manifest.nbytes)) > 3
    assert isinstance(engine, BroadcastEngine)
    engine.submit([request(0, temperature=0.0)])
    before = engine.step(0.0)
    assert engine.receive_weights(manifest, sender.begin(manifest, data)) == manifest.checksum
    assert sender.finish().error == ""
    assert (engine.version, engine.proven, before) == (1, True, [])
    done = drain(engine)[0, 0]
    assert done.versions.tolist() == [0] + [1] * (len(done.tokens) - 1)
    for version in (2, 3):  # over the same communicator
        manifest, data = published(model, version)
        engine.receive_weights(manifest, sender.begin(manifest, data))
        assert sender.finish().error == ""
    engine.submit([request(1, temperature=0.0)])
    assert drain(engine)[1, 0].tokens.tolist() == greedy(model, request(1).prompt, 10)


def test_a_broadcast_that_does_not_begin_changes_nothing(engine, folder):
    sender = Sender(deadline_s=0.5)
    manifest, data = published(other(folder), 1)
    with pytest.raises(WeightsError, match=r"the broadcast did not begin: 1 of 2 receivers did not come"):
        engine.receive_weights(manifest, sender.begin(manifest, data, world=3))
    sent = sender.finish()
    assert (sent.missing, sent.error) == ((2,), "1 of 2 did not come in 0.5 s")
    assert (engine.version, engine.proven) == (0, True)
    with pytest.raises(WeightsError, match=r"the learner's store at 127\.0\.0\.1:1 failed: .*refused"):
        engine.receive_weights(manifest, offer.Offer(**{**sender.offer(manifest).to_wire(), "store": "127.0.0.1:1"}))
    assert engine.proven
    engine.receive_weights(manifest, sender.begin(manifest, data))  # the next one does
    assert (sender.finish().error, engine.version) == ("", 1)


def test_bytes_that_are_not_those_of_the_manifest_are_not_sampled_from(engine, folder):
    manifest, data = published(other(folder), 1)
    wrong = bytearray(data)
    wrong[5000] ^= 1
    sender = Sender()
    with pytest.raises(WeightsError, match=r"version 1: the engine holds .*; what differs lies within model\."):
        engine.receive_weights(manifest, sender.begin(manifest, wrong))
    assert sender.finish().error == ""
    assert not engine.proven
    assert engine.load_weights(manifest, data) == manifest.checksum  # pulled
    assert engine.proven


def test_another_model_is_refused_before_anybody_waits(engine, folder):
    manifest, _ = published(plain(folder), 1)
    lacking = {**manifest.to_wire(), "tensors": manifest.to_wire()["tensors"][1:]}
    sender = Sender()
    with pytest.raises(WeightsError, match="is not of this model"):
        engine.receive_weights(type(manifest).from_wire(lacking), sender.offer(manifest))
    assert engine.proven
