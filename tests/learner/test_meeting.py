"""Over which interface ranks of several hosts talk, and the store in which they meet."""

import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from async_rl.errors import ConfigError, StartAgainError
from async_rl.interfaces import interface_of, listen
from async_rl.route import joined, parted, route_to
from learner import meeting
from learner.group import read_placement


def test_the_way_to_the_server_names_address_and_interface():
    assert route_to("tcp://127.0.0.1:5555") == ("127.0.0.1", "127.0.0.1")
    assert route_to("localhost:5555")[1] == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    if Path("/proc/net/if_inet6").exists():
        assert interface_of("::1") == "lo"
    with pytest.raises(ConfigError, match=r"no network interface has the address 192\.0\.2\.1: name the one"):
        interface_of("192.0.2.1")
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid:1 cannot be reached from here"):
        route_to("tcp://no.such.host.invalid:1")


@pytest.mark.parametrize("address", ["10.0.0.1:5", "[fd00::1]:5"])
def test_an_address_is_taken_apart_and_put_together_again(address):
    assert joined(*parted(f"tcp://{address}")) == address


def meet(world, absent=()):
    """Each rank opens the store; what each got or raised."""
    listening, found = listen("127.0.0.1"), {}
    port = listening.getsockname()[1]

    def come(rank):
        try:
            found[rank] = meeting._open_store("127.0.0.1", port, rank, world, listening if rank == 0 else None)
        except StartAgainError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return port, found


def test_the_store_listens_on_the_one_address_alone():
    port, found = meet(2)
    assert all(isinstance(store, dist.Store) for store in found.values())
    found[0].set("key", "value")
    assert found[1].get("key") == b"value"
    with socket.socket() as other:  # the same port of another address of this host is free
        other.bind(("127.0.0.2", port))
        other.listen()


def test_a_rank_that_died_on_its_way_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(meeting, "STORE_TIMEOUT_S", 1.0)
    _, found = meet(3, absent={2})
    for rank in (0, 1):
        assert isinstance(found[rank], StartAgainError)
        assert f"rank {rank}: not all ranks came to 127.0.0.1:" in str(found[rank])


def test_ranks_are_numbered_host_by_host():
    under_torchrun = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    placement = read_placement(under_torchrun, 6, "cpu", hosts=3, host=2)
    assert (placement.rank, placement.world, placement.local_rank, placement.hosts) == (5, 6, 1, 3)
    alone = read_placement({}, 2, "cpu", hosts=2, host=1)
    assert (alone.rank, alone.world, alone.local_rank) == (1, 2, 0)
    with pytest.raises(ConfigError, match=r"started 2 ranks but learner\.ranks = 6 on each of 2 hosts"):
        read_placement(under_torchrun, 6, "cpu", hosts=2, host=0)
