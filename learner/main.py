"""One rank of the learner group, started by torchrun.

torchrun --nproc-per-node N -m learner.main CONFIG.toml --out DIR --connect tcp://HOST:PORT [--resume CHECKPOINT]

join the group ─► hello ─► model, optimiser (from the checkpoint) ─► broadcast ─► publish the start version
  ─► train until done or stopped ─► checkpoint ─► done ─► the server's stop ─► close
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.client import Client, Stopped
from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError
from async_rl.models import load_tokenizer, resolve_model
from async_rl.process import die_with_parent, leave, run_guarded
from async_rl.timer import StateTimer
from learner.checkpoint import TrainerState, load_tensors, model_folder, read_state
from learner.group import LearnerGroup
from learner.leader import Leader
from learner.networks import load_networks
from learner.trainer import Trainer
from learner.updater import Updater

CONNECT_TIMEOUT_S = 60.0
SMALL_GROUP = 4


def main() -> None:
    """Parse the command line and run this rank."""
    parser = argparse.ArgumentParser(description="one rank of the learner group; start it with torchrun")
    parser.add_argument("config")
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--connect", required=True, help="address of the buffer server, tcp://HOST:PORT")
    parser.add_argument("--resume", type=Path, help="checkpoint folder to continue from")
    args = parser.parse_args()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher turns Ctrl-C into an orderly stop
    terminations: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminations.append(number))
    config = load_config(args.config)
    group = LearnerGroup.start(config.learner.ranks, config.model.device, config.learner.timeout_s)
    timer = StateTimer()
    name = f"learner{group.rank}"
    with Client(args.connect, "learner", name, config.contract_hash(), group.rank, group.world) as client:
        client.beat_info = lambda: {"timer": timer.drain()}
        try:
            welcome = client.connect(CONNECT_TIMEOUT_S)
            run(config, args.out, args.resume, group, client, welcome, timer, lambda: bool(terminations))
        except Stopped as stop:
            raise AsyncRLError(f"{name}: the run ended: {stop.reason}") from None
        except Exception as error:
            client.send("fatal", reason=f"{name}: {error or type(error).__name__}")
            raise


def run(
    config: Config,
    out: Path,
    resume: Path | None,
    group: LearnerGroup,
    client: Client,
    welcome: dict[str, Any],
    timer: StateTimer,
    terminated: Callable[[], bool],
) -> None:
    """Build the parts of this rank, train, and end in order."""
    source = model_folder(resume) if resume else resolve_model(config.model.path)
    state = read_state(resume, config) if resume else fresh_state(config)
    if welcome["next_step"] != state.step:
        raise AsyncRLError(
            f"the server continues with step {welcome['next_step']}, this learner with step {state.step}: start both "
            "with the same --resume"
        )
    updater = Updater(config, load_networks(config, source, group.device), group, timer)
    if resume:
        load_tensors(resume, updater)
    updater.lr, updater.kl_coef = group.broadcast_number(state.lr), group.broadcast_number(state.kl_coef)
    updater.skipped_in_row = state.skipped_in_row
    group.broadcast_flat(updater.flat)
    leader = None
    if group.rank == 0:
        warn(config)
        leader = Leader(
            config=config,
            out=out,
            client=client,
            run_id=welcome["run_id"],
            updater=updater,
            tokenizer=load_tokenizer(source),
            timer=timer,
            start=state.step,
        )
    trainer = Trainer(
        config=config,
        group=group,
        client=client,
        updater=updater,
        leader=leader,
        timer=timer,
        state=state,
        terminated=terminated,
    )
    try:
        completed = train(trainer, leader)
    finally:
        if leader:
            leader.close()
    group.close()
    print(f"learner{group.rank}: {'completed' if completed else 'stopped'} at step {trainer.state.step}", flush=True)


def train(trainer: Trainer, leader: Leader | None) -> bool:
    """Train, write the last checkpoint, say goodbye; True when all steps were made."""
    completed = trainer.run()
    if leader:
        leader.checkpoint(trainer.state, final=True)
        leader.finish(trainer.state, stopped=not completed)
    return completed


def fresh_state(config: Config) -> TrainerState:
    """Where a new run begins."""
    contract = config.contract_hash()
    return TrainerState(
        step=0,
        lr=config.learner.lr,
        kl_coef=config.algorithm.kl_coef,
        trained_tokens=0.0,
        skipped_in_row=0,
        contract=contract,
    )


def warn(config: Config) -> None:
    """Say what is allowed but unlikely to be meant."""
    if config.algorithm.advantage in ("grpo", "dr_grpo", "rloo") and config.sampling.group_size < SMALL_GROUP:
        print(
            f"async-rl: warning: sampling.group_size = {config.sampling.group_size}: the mean of fewer than "
            f"{SMALL_GROUP} rewards is a noisy baseline; 8 or more learn better",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    run_guarded(main)
    leave()
