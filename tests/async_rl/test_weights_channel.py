"""Blocks, the meeting of sender and receivers, deadlines, and over which networks weights may be broadcast."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from async_rl.config import parse_config
from async_rl.errors import ConfigError, WeightsError
from async_rl.launch.devices import check_broadcast
from async_rl.weights.channel import come, device_name, gather, within
from async_rl.weights.manifest import Tensor
from async_rl.weights.offer import Offer, blocks
from async_rl.weights.trust import check_receiver, sending_host


def tensor(offset, numel):
    return Tensor(f"t{offset}", "float32", (numel,), offset)


@pytest.mark.parametrize(
    ("most", "cuts"),
    [
        (1, [0, 48, 128, 192]),  # each tensor by itself, with the gap behind it
        (80, [0, 48, 128]),  # 0 to 100 is too much, 128 to 200 is not
        (112, [0, 128]),
        (200, [0]),
    ],
)
def test_blocks_hold_whole_tensors_and_are_all_bytes_in_order(most, cuts):
    tensors = [tensor(128, 8), tensor(0, 10), tensor(48, 13), tensor(192, 2)]  # 0-40, 48-100, 128-160, 192-200
    found = blocks(tensors, 200, most)
    assert [begin for begin, _ in found] == cuts
    assert [end for _, end in found] == [*cuts[1:], 200]


def test_a_tensor_that_is_longer_than_a_block_is_one_by_itself():
    assert blocks([tensor(0, 1000), tensor(4000, 1), tensor(4004, 1)], 4008, 8) == [(0, 4000), (4000, 4008)]


def test_an_offer_survives_the_wire_and_a_malformed_one_is_said():
    offer = Offer(epoch=1, version=2, store="h:1", group="g", rank=3, world=4, deadline_s=5.0)
    assert Offer.from_wire({**offer.to_wire(), "type": "offer"}) == offer
    assert (offer.order, offer.key) == ((1, 2), "g/1.2")
    with pytest.raises(WeightsError, match="malformed offer: KeyError"):
        Offer.from_wire({"epoch": 1})


def soon(seconds=5.0):
    return time.monotonic() + seconds


def test_receivers_begin_once_all_are_there():
    store, begun = dist.HashStore(), []
    receivers = [
        threading.Thread(target=lambda rank=rank: (come(store, "g/0.1", rank, soon()), begun.append(rank)))
        for rank in (1, 2)
    ]
    receivers[0].start()
    receivers[0].join(0.1)
    assert begun == []
    receivers[1].start()
    assert gather(store, "g/0.1", [1, 2], soon()) == []
    for receiver in receivers:
        receiver.join(5)
    assert sorted(begun) == [1, 2]


def test_if_one_does_not_come_the_others_are_told_and_the_sender_knows_which():
    store, said = dist.HashStore(), []

    def receive():
        with pytest.raises(WeightsError) as error:
            come(store, "g/0.1", 1, soon())
        said.append(str(error.value))

    receiver = threading.Thread(target=receive)
    receiver.start()
    began = time.monotonic()
    assert gather(store, "g/0.1", [1, 2], soon(0.2)) == [2]
    assert 0.1 < time.monotonic() - began < 2
    receiver.join(5)
    assert said == ["the broadcast did not begin: 1 of 2 receivers did not come"]
    with pytest.raises(WeightsError, match="the meeting with the learner failed: Wait timeout"):
        come(store, "g/0.2", 1, soon(0.1))  # nobody says anything


def test_what_does_not_come_back_is_left_behind():
    stuck = threading.Event()
    began = time.monotonic()
    with pytest.raises(WeightsError, match=r"a block was not there after 1\.\d s"):
        within(soon(0.1), stuck.wait, "a block")
    assert time.monotonic() - began < 3
    stuck.set()
    with pytest.raises(ZeroDivisionError):  # a fault of ours is no fault of the transfer
        within(soon(), lambda: 1 / 0, "a block")


def test_devices_of_processes_differ_on_the_cpu():
    name = device_name(torch.device("cpu"))
    assert name.startswith("cpu:")
    assert name == device_name(torch.device("cpu"))


def config(bind="tcp://127.0.0.1:*", trusted=False):
    weights = {"path": "broadcast", "trusted_network": trusted}
    return parse_config({"weights": weights, "buffer": {"bind": bind, "insecure": True}})


def test_weights_are_broadcast_on_the_loopback_or_where_somebody_vouches_for_the_network():
    assert sending_host(config()) == "127.0.0.1"
    assert sending_host(config("tcp://localhost:5")) == "127.0.0.1"
    assert sending_host(config("tcp://10.0.0.1:5", trusted=True)) == "10.0.0.1"
    assert sending_host(config("tcp://[fd00::1]:5", trusted=True)) == "fd00::1"
    with pytest.raises(ConfigError, match=r"over 10\.0\.0\.1, the address of this host: .* --trusted-network"):
        sending_host(config("tcp://10.0.0.1:5"))
    with pytest.raises(ConfigError, match=r"buffer\.bind = 'tcp://\*:5': the engines meet at one address"):
        sending_host(config("tcp://*:5", trusted=True))


def test_an_actor_host_has_to_agree():
    check_receiver(config(), "tcp://127.0.0.1:5")
    check_receiver(config(trusted=True), "tcp://10.0.0.1:5")
    with pytest.raises(ConfigError, match=r"the address of the learner's host: .* on every actor host"):
        check_receiver(config(), "tcp://10.0.0.1:5")


def test_processes_that_share_a_gpu_are_refused_before_they_start():
    check_broadcast({}, 4)
    check_broadcast({"learner": "0,1", "actor0": "1", "actor1": "2"}, 2)  # rank 1 is no member
    with pytest.raises(ConfigError, match=r"too few \(learner: 0, actor0: 1, actor1: 1\): set weights\.path = 'auto'"):
        check_broadcast({"learner": "0", "actor0": "1", "actor1": "1"}, 2)
    with pytest.raises(ConfigError, match="too few"):
        check_broadcast({"learner": "0", "actor0": "0"}, 1)
