"""One actor process: ``python -m actors.main CONFIG.toml --connect tcp://HOST:PORT --name actor0``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from actors.engines.factory import make_engine
from actors.receiver import Receiver
from actors.rollout import Rollout, Stop
from actors.verify import VerifierPool
from async_rl.client import Client
from async_rl.config import load_config
from async_rl.models import load_tokenizer, resolve_model, stop_token_ids
from async_rl.process import run_guarded
from async_rl.tasks import load_task
from async_rl.tasks.prompt import decode_completion, encode_prompt
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
    with Client(args.connect, "actor", args.name, config.contract_hash()) as client:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        client.beat_info = lambda: {"timer": timer.drain()}
        welcome = client.connect(CONNECT_TIMEOUT_S)
        folder = resolve_model(config.model.path)
        tokenizer, stops = load_tokenizer(folder), stop_token_ids(folder)
        data = load_task(config.task, config.seed)
        verifiers = VerifierPool(
            config.task.verifier or data.verifier,
            config.task.timeout_s,
            config.task.verifiers,
            Path(args.config).parent,
        )
        engine = make_engine(config, folder, args.name)
        receiver = Receiver(config.weights.path, welcome["weights_address"], welcome["run_id"])
        rollout = Rollout(
            config=config,
            name=args.name,
            client=client,
            engine=engine,
            receiver=receiver,
            verifiers=verifiers,
            problems=list(data.train),
            encode=lambda problem: encode_prompt(tokenizer, problem, config.task),
            decode=lambda ids: decode_completion(tokenizer, ids, stops),
            timer=timer,
        )
        client.beat_info = lambda: {"timer": timer.drain(), "in_flight": rollout.in_flight(), "info": rollout.info()}
        manifest = welcome.get("manifest")
        began = time.monotonic()
        try:
            stop = rollout.run(Manifest.from_wire(manifest) if manifest else None)
        finally:
            receiver.close()
            verifiers.close()
            engine.close()
    report(args.name, stop, time.monotonic() - began, rollout.counts)


def report(name: str, stop: Stop, seconds: float, counts: dict[str, int]) -> None:
    """Say how it ended; an error of the run is this process's exit code, too."""
    print(f"{name}: stopped after {seconds:.1f} s ({stop.reason}): {counts}", flush=True)
    if stop.error:
        sys.exit(1)


if __name__ == "__main__":
    run_guarded(main)
