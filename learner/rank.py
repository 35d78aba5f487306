"""One rank of the learner group, whatever it trains; ``learner.main`` and ``learner.control.main`` are its processes.

(several hosts: muster ─►) join the group ─► newest checkpoint ─► hello(step, life of the group) ─► domain ─► broadcast
  ─► publish the start version ─► train until done or stopped ─► checkpoint ─► done ─► the server's stop ─► close

A rank whose partners are gone, or whom the server wants to begin anew, ends with an exit code that says: start me again
(:class:`async_rl.errors.StartAgainError`). Any other error ends the run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from async_rl.base_checksum import base_of
from async_rl.client import Client, Stopped
from async_rl.config import RunConfig
from async_rl.curve import ClientKeys
from async_rl.errors import AsyncRLError, DeadlineError, HandshakeError, StartAgainError
from async_rl.hosts import own_folder
from async_rl.process import die_with_parent, leave, spare_what_is_loaded
from async_rl.timer import StateTimer
from learner.broadcaster import choose_interface, open_broadcaster
from learner.domain import Domain
from learner.group import LearnerGroup, read_placement
from learner.leader import FINISH_TIMEOUT_S, Leader
from learner.meeting import Muster, kind_of_group, meet_in_a_file
from learner.shipping import discard
from learner.start import Start, find_start
from learner.trainer import Trainer

CONNECT_TIMEOUT_S = 60.0
_LOOK_S = 0.5
"""How often it is looked whether this process was asked to end."""

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Where this process stands; what a domain is built with."""

    group: LearnerGroup
    timer: StateTimer
    out: Path
    """Run folder; on a further learner host its own folder in there."""
    resume: Path | None = None
    """Checkpoint folder to continue from."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which publishes, logs and warns."""
        return self.group.rank == 0


def main(read: Callable[[str], C], build: Callable[[C, Rank], Domain]) -> None:
    """Parse the command line and run this rank.

    Args:
        read: the configuration of a file.
        build: the domain, with the parameters of a fresh run; :meth:`learner.domain.Domain.load` follows on a resume.
    """
    parser = argparse.ArgumentParser(description="one rank of the learner group; start it with torchrun")
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--connect", required=True, help="address of the buffer server, tcp://HOST:PORT")
    parser.add_argument("--nnodes", type=int, default=1, help="learner hosts")
    parser.add_argument("--node-rank", type=int, default=0, help="of this host, from 0")
    args = parser.parse_args()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher turns Ctrl-C into an orderly stop
    terminations: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminations.append(number))
    config = read(args.config)
    placement = read_placement(os.environ, config.learner.ranks, config.device, args.nnodes, args.node_rank)
    kind = kind_of_group(args.nnodes, placement.device)
    if args.node_rank == 0:
        choose_interface(config)
    meet = Muster(args.connect, config, kind, lambda: bool(terminations)) if args.nnodes > 1 else meet_in_a_file
    group = LearnerGroup(placement, config.learner.timeout_s, meet)
    rank = Rank(group=group, timer=StateTimer(), out=own_folder(args.out, args.node_rank))
    name = f"learner{group.rank}"
    start = find_start(config, args.out, group, lambda folder: build(config, replace(rank, resume=folder)), rank.out)
    with Client(
        args.connect,
        "learner",
        name,
        config.contract_hash(),
        rank=group.rank,
        world=group.world,
        step=start.state.step,
        group=start.life,
        keys=ClientKeys.of(config.buffer.keys),
        base=base_of(config),
    ) as client:
        client.beat_info = lambda: {"timer": rank.timer.drain()}
        client.dismissed = lambda error: leave_if_forsaken(name, error)
        try:
            welcome = client.connect(CONNECT_TIMEOUT_S)
            run(config, rank, build, start, client, welcome, lambda: bool(terminations))
        except StartAgainError:
            raise
        except HandshakeError as error:
            if error.code in ("ahead", "replaced", "forsaken"):
                raise StartAgainError(f"{name}: {error}") from None
            raise
        except Stopped as stop:
            raise AsyncRLError(f"{name}: the run ended: {stop.reason}") from None
        except Exception as error:
            if isinstance(error, DeadlineError) and args.node_rank > 0:  # the cable, or the server, may come back
                raise StartAgainError(f"{name}: {error}") from None
            client.send("fatal", reason=f"{name}: {error or type(error).__name__}")
            raise


def leave_if_forsaken(name: str, error: HandshakeError) -> None:
    """End this process, in whatever collective its main thread is, if the server says that nobody will join it."""
    if error.code == "forsaken":
        print(f"async-rl: {name}: {error}", file=sys.stderr, flush=True)
        leave(StartAgainError.exit_code)


def run(
    config: C,
    rank: Rank,
    build: Callable[[C, Rank], Domain],
    start: Start,
    client: Client,
    welcome: dict[str, Any],
    terminated: Callable[[], bool],
) -> None:
    """Build the parts of this rank, train, and end in order."""
    group, timer = rank.group, rank.timer
    state = start.state
    if welcome["next_step"] != state.step:
        raise AsyncRLError(
            f"the server continues with step {welcome['next_step']}, this learner with step {state.step}: they do not "
            "share a run folder, or the checkpoint was exchanged; start both again"
        )
    domain = start.domain(lambda folder: build(config, replace(rank, resume=folder)))
    if group.hosts > 1 and start.checkpoint is not None:
        discard(group, rank.out)
    if start.checkpoint is not None:
        domain.set_numbers({name: group.broadcast_number(n) for name, n in sorted(state.numbers.items())})
    group.broadcast_flat(domain.flat)
    leader = None
    if rank.is_leader:
        leader = Leader(
            config=config,
            out=rank.out,
            client=client,
            run_id=welcome["run_id"],
            epoch=welcome["epoch"],
            domain=domain,
            timer=timer,
            start=state.step,
            broadcaster=open_broadcaster(config, group.device),
        )
    trainer = Trainer(
        config=config,
        group=group,
        client=client,
        domain=domain,
        leader=leader,
        timer=timer,
        state=state,
        terminated=terminated,
    )
    spare_what_is_loaded()
    try:
        completed = train(trainer, leader)
        if group.rank != group.local_rank:
            await_end(client, config.learner.step_deadline_s + FINISH_TIMEOUT_S, terminated)
    finally:
        if leader:
            leader.close()
    group.close()
    print(f"learner{group.rank}: {'completed' if completed else 'stopped'} at step {trainer.state.step}", flush=True)


def train(trainer: Trainer, leader: Leader | None) -> bool:
    """Train, write the last checkpoint, say goodbye; True when all steps were made."""
    completed = trainer.run()
    trainer.checkpoint(final=True)
    if leader:
        leader.finish(trainer.state, stopped=not completed)
    return completed


def await_end(client: Client, timeout_s: float, terminated: Callable[[], bool]) -> None:
    """On a further host, stay until the run has ended: if rank 0 dies over the last checkpoint all must begin again.

    Args:
        client: of this rank.
        timeout_s: longest wait; the server's own deadlines are shorter.
        terminated: whether this process was asked to end.

    Raises:
        AsyncRLError: the run has failed.
        HandshakeError: all begin again.
        DeadlineError: the server is gone, or says nothing.
    """
    deadline = time.monotonic() + timeout_s
    while not terminated():
        if (left_s := deadline - time.monotonic()) <= 0:
            raise DeadlineError(f"the server did not end the run within {timeout_s:g} s of this rank's last step")
        ends = [h for h, _ in client.receive(min(left_s, _LOOK_S)) if h["type"] == "stop" and "step" not in h]
        if ends and ends[0]["error"]:
            raise AsyncRLError(f"the run failed: {ends[0]['reason']}")
        if ends:
            return
