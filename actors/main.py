"""One actor process: ``python -m actors.main CONFIG.toml --connect tcp://HOST:PORT --name actor0``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from actors.engines.factory import make_engine
from actors.players.factory import Setting, make_player
from actors.receiver import Receiver
from actors.rollout import Rollout, Stop
from async_rl.client import Client
from async_rl.config import load_config
from async_rl.curve import ClientKeys
from async_rl.models import resolve_model
from async_rl.process import run_guarded
from async_rl.tasks import load_task
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest

CONNECT_TIMEOUT_S = 60.0


def main() -> None:
    """Parse the command line, build the parts, roll out until stopped."""
    parser = argparse.ArgumentParser(description="one rollout actor")
    parser.add_argument("config")
    parser.add_argument("--connect", required=True, help="address of the buffer server, tcp://HOST:PORT")
    parser.add_argument("--name", default=f"actor-{os.getpid()}")
    args = parser.parse_args()
    config = load_config(args.config)
    timer = StateTimer()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher turns Ctrl-C into an orderly stop
    keys = ClientKeys.of(config.buffer.keys)
    with Client(args.connect, "actor", args.name, config.contract_hash(), keys=keys) as client:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        client.beat_info = lambda: {"timer": timer.drain()}
        welcome = client.connect(CONNECT_TIMEOUT_S)
        folder = resolve_model(config.model.path)
        data = load_task(config.task, config.seed)
        with contextlib.ExitStack() as stack:
            engine = make_engine(config, folder, args.name)
            stack.callback(engine.close)
            setting = Setting(config=config, folder=folder, verifier=data.verifier, search=Path(args.config).parent)
            player = make_player(setting, engine)
            stack.callback(player.close)
            receiver = Receiver(config.weights.path, lambda: client.weights_address, welcome["run_id"], keys=keys)
            stack.callback(receiver.close)
            rollout = Rollout(
                config=config,
                name=args.name,
                client=client,
                engine=engine,
                receiver=receiver,
                player=player,
                problems=list(data.train),
                timer=timer,
            )
            client.beat_info = lambda: {
                "timer": timer.drain(),
                "in_flight": rollout.in_flight(),
                "info": rollout.info(),
            }
            manifest = welcome.get("manifest")
            began = time.monotonic()
            stop = rollout.run(Manifest.from_wire(manifest) if manifest else None)
    report(args.name, stop, time.monotonic() - began, rollout.counts)


def report(name: str, stop: Stop, seconds: float, counts: Mapping[str, int]) -> None:
    """Say how it ended; an error of the run is this process's exit code, too."""
    print(f"{name}: stopped after {seconds:.1f} s ({stop.reason}): {dict(counts)}", flush=True)
    if stop.error:
        sys.exit(1)


if __name__ == "__main__":
    run_guarded(main)
