"""One actor process: ``python -m actors.main CONFIG.toml --connect tcp://HOST:PORT --name actor0``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from actors.broadcast import choose_interface, take_part
from actors.engines.factory import make_engine
from actors.players.factory import Setting, make_player
from actors.process import command_line, joined
from actors.rollout import Rollout
from async_rl.config import load_config
from async_rl.models import resolve_model
from async_rl.process import run_guarded
from async_rl.tasks import load_task


def main() -> None:
    """Parse the command line, build the parts, roll out until stopped."""
    args = command_line("one rollout actor", f"actor-{os.getpid()}").parse_args()
    config = load_config(args.config)
    with joined("actor", config, args.connect, args.name) as process:
        choose_interface(config, args.connect)
        folder = resolve_model(config.model.path)
        data = load_task(config.task, config.seed)
        engine = process.parts.enter_context(contextlib.closing(make_engine(config, folder, args.name)))
        setting = Setting(config=config, folder=folder, verifier=data.verifier, search=Path(args.config).parent)
        player = process.parts.enter_context(contextlib.closing(make_player(setting, engine)))
        rollout = Rollout(
            config=config,
            name=args.name,
            client=process.client,
            engine=engine,
            receiver=process.receiver(relays=True),
            player=player,
            problems=list(data.train),
            timer=process.timer,
        )
        take_part(process, engine)
        process.run(rollout, lambda: rollout.run(process.manifest))


if __name__ == "__main__":
    run_guarded(main)
