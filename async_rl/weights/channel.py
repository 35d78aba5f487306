"""A process group of its own for the bytes of versions, each call of it with a deadline.

    rank 0, the learner    meet: are all here? ──go──► group ─► broadcast(block) ─► broadcast(block) ─► ...
    rank r, a worker       here ───────────────go────► group ─► broadcast(block) ─► broadcast(block) ─► ...
                             └── no, or nobody says so in time ─► WeightsError: the version is pulled

NCCL on CUDA, gloo on the CPU, made directly over a store: no default group is touched, so a channel can be opened in a
process that has one, like a learner rank or vLLM's worker. All meet in the store before the first collective, so that
one who is missing is found without breaking anything. A collective that fails leaves the channel of no use.

What the backends do at a timeout differs: gloo raises; NCCL may wait in the creation of a communicator for ever. So
every call is made in a thread of its own, which is left behind if it does not come back.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from async_rl.errors import WeightsError
from async_rl.process import host_id
from async_rl.route import parted

T = TypeVar("T")

GRACE_S = 1.0
"""A backend that keeps its timeout ends by itself; after so much more it is not waited for."""
_ABORT_S = 5.0
_GO = b"go"


class Channel:
    """Made when all its members have met.

    Args:
        store: in which they met.
        name: of the group, new for each.
        rank: 0 sends.
        world: members.
        device: where blocks lie; of no other member if it is a CUDA device.
        here: address of this host on which the others reach it (gloo).
        deadline: ``time.monotonic()`` until which all must have come.

    Raises:
        WeightsError: they have not.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, world: int, device: torch.device, here: str, deadline: float
    ) -> None:
        self.name = name
        timeout = _left(deadline)
        make = _nccl if device.type == "cuda" else _gloo
        self._group: Any = within(
            deadline,
            lambda: make(dist.PrefixStore(name, store), rank, world, device, here, timeout),
            f"the communicator of {world} members",
        )

    def broadcast(self, block: torch.Tensor, deadline: float) -> None:
        """Send a block, or receive into it; it is complete on return.

        Args:
            block: uint8, contiguous, of the same length for all members, on the channel's device.
            deadline: ``time.monotonic()``.

        Raises:
            WeightsError: not done in time, or another member is gone. The channel is of no use then: close it.
        """
        if block.is_cuda:
            torch.cuda.current_stream(block.device).synchronize()  # what fills it may be queued on this thread's stream
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, _left(deadline)
        group = self._group

        def work() -> None:
            if block.is_cuda:
                torch.cuda.set_device(block.device)  # of this thread
            group.broadcast([block], options).wait(options.timeout)
            if block.is_cuda:
                torch.cuda.current_stream(block.device).synchronize()

        within(deadline, work, f"a block of {block.numel()} bytes")

    def close(self) -> None:
        """Give the communicator up, whatever the others do."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(WeightsError):  # it is of no use either way
                within(time.monotonic() + _ABORT_S, group.abort, "the end of a communicator")


def device_name(device: torch.device) -> str:
    """What a device is called among all hosts, its type first; of a CPU each process has its own."""
    if device.type == "cuda":
        return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type}:{host_id()}/{os.getpid()}"


# ---------------------------------------------------------------- the meeting


def gather(store: dist.Store, key: str, receivers: Sequence[int], deadline: float) -> list[int]:
    """As the sender: wait for the receivers, and tell them whether it begins.

    Args:
        store: where they meet.
        key: of the version.
        receivers: their ranks.
        deadline: ``time.monotonic()``.

    Returns:
        The ranks that did not come; if there are any, it does not begin.

    Raises:
        WeightsError: the store does not answer.
    """
    keys = {f"{key}/{rank}": rank for rank in receivers}

    def wait() -> list[int]:
        with contextlib.suppress(dist.DistStoreError):  # they have not all come; who is missing is looked at next
            store.wait(list(keys), _left(deadline))
        missing = [rank for name, rank in keys.items() if not store.check([name])]
        store.set(f"{key}/go", f"{len(missing)} of {len(keys)} receivers did not come" if missing else _GO.decode())
        return missing

    return within(deadline, wait, "the meeting of all receivers")


def forget(store: dist.Store, key: str, receivers: Sequence[int]) -> None:
    """As the sender: take the traces of a meeting out of the store; who comes to it now waits in vain."""
    for rank in (*receivers, "go"):
        store.delete_key(f"{key}/{rank}")


def come(store: dist.Store, key: str, rank: int, deadline: float) -> None:
    """As a receiver: say that we are here, and wait until it begins.

    Raises:
        WeightsError: it does not, or nobody says so in time.
    """

    def wait() -> bytes:
        store.set(f"{key}/{rank}", b"here")
        store.wait([f"{key}/go"], _left(deadline))
        return bytes(store.get(f"{key}/go"))

    said = within(deadline, wait, "the meeting with the learner")
    if said != _GO:
        raise WeightsError(f"the broadcast did not begin: {said.decode(errors='replace')[:200]}")


def reach(address: str, deadline: float) -> dist.Store:
    """Connect to the store of the sender.

    Raises:
        WeightsError: it cannot be reached in time.
    """
    host, port = parted(address)

    def connect() -> dist.Store:
        socket.create_connection((host, port), _left(deadline).total_seconds()).close()  # torch would try again
        return dist.TCPStore(host, port, None, False, _left(deadline), wait_for_workers=False)

    return within(deadline, connect, f"the learner's store at {address}")


# ---------------------------------------------------------------- deadlines


def within(deadline: float, work: Callable[[], T], what: str) -> T:
    """Do work of torch.distributed in a thread, which is left behind if it is not done in time.

    Args:
        deadline: ``time.monotonic()``; :data:`GRACE_S` later it is given up.
        work: what is done.
        what: for the sentence.

    Raises:
        WeightsError: not done in time, or it failed.
    """
    done: Future[T] = Future()
    began = time.monotonic()
    threading.Thread(target=_run, args=(done, work), name="weights-channel", daemon=True).start()
    try:
        return done.result(max(0.0, deadline - began) + GRACE_S)
    except TimeoutError:
        waited_s = time.monotonic() - began
        raise WeightsError(f"{what} was not there after {waited_s:.1f} s") from None
    except (RuntimeError, OSError) as error:  # all that gloo, NCCL and the store raise
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{what} failed: {said[:200]}") from error
    finally:
        del done  # an error that leads back to itself would keep the communicator, and the others' hopes, alive


def _run(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except (RuntimeError, OSError) as error:
        done.set_exception(error.with_traceback(None))  # nor may it lead here
    except BaseException as error:  # raised where the result is asked for
        done.set_exception(error)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


# ---------------------------------------------------------------- backends


def _gloo(store: dist.Store, rank: int, world: int, device: torch.device, here: str, timeout: timedelta) -> Any:
    store.set_timeout(timeout)
    group: Any = dist.ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname=here)]
    options._timeout = timeout
    return group(store, rank, world, options)


def _nccl(store: dist.Store, rank: int, world: int, device: torch.device, here: str, timeout: timedelta) -> Any:
    """The communicator itself is made by the first collective; what its store waits for then has the timeout."""
    # else its watchdog ends the process at a timeout; with it, and only then, waiting raises
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    store.set_timeout(timeout)
    group: Any = dist.ProcessGroupNCCL
    # its own timeout stays at ten minutes: it is that of all collectives to come, each of which is waited for with less
    return group(store, rank, world, group.Options())
