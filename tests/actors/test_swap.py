"""Versions after the learner has begun anew: their order is (epoch, version), and the same number is loaded again."""

import os
from collections import Counter

import torch
from control_fakes import SPACES, control, published
from loop_fakes import manifest

from actors.control.policy import Policy
from actors.evaluation.evaluator import Evaluator, Result
from actors.receiver import Prepared
from actors.swap import WeightSwap
from async_rl.control.networks import build_actor
from async_rl.errors import WeightsError
from async_rl.timer import StateTimer
from async_rl.weights.offer import Offer


class Holder:
    def __init__(self):
        self.loaded, self.version, self.proven, self.last_pause_s = [], -1, False, 0.0

    def load_weights(self, published, data):
        self.loaded.append(published.order)
        self.version, self.proven = published.version, True
        return published.checksum


class Receiver:
    """Prepares at once."""

    def __init__(self, data=b"abcd"):
        self.prepared, self.data, self.descriptor = None, data, os.eventfd(1)

    def fileno(self):
        return self.descriptor

    def fetch(self, published):
        self.prepared = Prepared(manifest=published, data=memoryview(self.data), transfer_s=0.0, path="shm")

    def ready(self):
        prepared, self.prepared = self.prepared, None
        return prepared


class Line:
    """The server's end: each look takes the next entry of the script."""

    def __init__(self, script=()):
        self.script, self.sent, self.descriptor = list(script), [], os.eventfd(1)

    def fileno(self):
        return self.descriptor

    def receive(self, timeout_s):
        return self.script.pop(0) if self.script else [({"type": "stop", "reason": "over", "error": False}, [])]

    def send(self, kind, **fields):
        self.sent.append((kind, fields))


def test_back_from_7_to_4_and_then_to_another_5_each_version_is_really_loaded():
    holder, line = Holder(), Line()
    swap = WeightSwap(holder, Receiver(), line, StateTimer(), Counter(), "a")
    for announced in (manifest(5), manifest(7), manifest(4, 1), manifest(5, 1)):
        swap.announce(announced)
        assert swap.behind
        swap.commit()
        assert not swap.behind
    assert holder.loaded == [(0, 5), (0, 7), (1, 4), (1, 5)]
    assert [(f["epoch"], f["version"]) for kind, f in line.sent if kind == "live"] == holder.loaded
    swap.announce(manifest(9))  # late, of the epoch before
    assert not swap.behind
    swap.commit()
    assert holder.loaded[-1] == (1, 5)


class Engine(Holder):
    """Receives by broadcast, too, unless something is wrong."""

    def __init__(self):
        super().__init__()
        self.wrong, self.places = "", []

    def devices(self):
        return ["cpu:0"]

    def receive_weights(self, published, offer):
        self.places.append((published.order, offer.rank))
        if self.wrong:
            raise WeightsError(self.wrong)
        return self.load_weights(published, b"")


def offered(version, epoch=0):
    return Offer(epoch=epoch, version=version, store="h:1", group="g", rank=3, world=4, deadline_s=1.0)


def test_a_version_that_is_offered_is_received_at_once_and_not_pulled():
    engine, receiver, line = Engine(), Receiver(), Line()
    swap = WeightSwap(engine, receiver, line, StateTimer(), Counter(), "a")
    swap.expect(offered(5))
    swap.announce(manifest(5))
    assert (swap.behind, receiver.prepared) == (True, None)
    swap.commit(lambda: False)  # the others wait for it, whatever runs here
    assert (engine.places, swap.behind) == ([((0, 5), 3)], False)
    ((kind, live),) = line.sent
    assert (kind, live["version"], live["broadcast"]) == ("live", 5, True)
    swap.announce(manifest(6))  # without an offer: pulled
    swap.commit()
    assert (engine.loaded, engine.places) == ([(0, 5), (0, 6)], [((0, 5), 3)])
    assert "broadcast" not in line.sent[-1][1]


def test_a_version_that_was_missed_is_pulled_and_an_offer_of_another_one_is_none(capsys):
    engine, receiver, line, counts = Engine(), Receiver(), Line(), Counter()
    swap = WeightSwap(engine, receiver, line, StateTimer(), counts, "a")
    engine.wrong = "the broadcast did not begin"
    swap.expect(offered(5))
    swap.announce(manifest(5))
    swap.commit()
    assert engine.loaded == [(0, 5)]  # the receiver of this test is there at once
    assert counts["broadcasts_missed"] == 1
    assert "a: version 5 is pulled: the broadcast did not begin" in capsys.readouterr().out
    swap.announce(manifest(7))
    swap.commit()
    assert len(engine.places) == 1
    swap.expect(offered(8))
    swap.announce(manifest(8))
    swap.announce(manifest(9))  # before it came to it
    swap.commit()
    assert (engine.loaded[-1], len(engine.places)) == ((0, 9), 1)


def test_what_was_pulled_while_a_newer_version_was_broadcast_is_not_loaded():
    engine, receiver = Engine(), Receiver()
    swap = WeightSwap(engine, receiver, Line(), StateTimer(), Counter(), "a")
    swap.announce(manifest(5))
    pulled, receiver.prepared = receiver.prepared, None  # on its way
    swap.expect(offered(6))
    swap.announce(manifest(6))
    swap.commit()
    receiver.prepared = pulled
    swap.commit()
    assert (engine.loaded, swap.is_due) == ([(0, 6)], False)


def evaluate(script, exam=lambda between: (between(), Result({"return": 1.0}))[1]):
    config = control(eval={"every": 2}, steps=9)
    first, data = published(build_actor(config, SPACES), 2)
    line = Line([[({"type": "version", "manifest": m}, [])] for m in script(first)])
    policy = Policy(config, SPACES, torch.device("cpu"), greedy=True)
    Evaluator(config, line, policy, Receiver(data), exam, StateTimer()).run(None, 0)
    return [(f["epoch"], f["version"]) for kind, f in line.sent if kind == "eval"]


def wire(first, version, epoch):
    return {**first.to_wire(), "version": version, "epoch": epoch}


def test_what_was_found_of_a_version_that_became_void_in_the_middle_is_not_told(capsys):
    # the exam of (0, 6) looks at the messages and finds that the run goes on from 4; that of (1, 4) finds (1, 5)
    told = evaluate(lambda first: [wire(first, 6, 0), wire(first, 4, 1), wire(first, 5, 1), wire(first, 6, 1)])
    assert told[0] == (1, 4)
    assert (0, 6) not in told
    assert "evaluator: version 6 is void, the learner has begun anew before it" in capsys.readouterr().out


def test_a_version_from_before_the_new_beginning_keeps_its_evaluation():
    assert evaluate(lambda first: [wire(first, 2, 0), wire(first, 4, 1)])[0] == (0, 2)
