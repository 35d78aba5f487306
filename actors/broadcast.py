"""An actor's part in broadcasts: whether it takes part, over which interface, and what it tells the buffer server.

before the engine starts   choose_interface ─► environment of this process and its children
when it can generate       take_part ─► devices of its workers ─► server, which offers places (buffer/broadcasts.py)
"""

from __future__ import annotations

from actors.engines.base import BroadcastEngine, Engine
from actors.process import Process
from async_rl.config import RunConfig
from async_rl.errors import ConfigError
from async_rl.interfaces import interface_of, use_interface
from async_rl.route import route_to
from async_rl.weights.trust import check_receiver


def choose_interface(config: RunConfig, server: str) -> None:
    """Have NCCL use the interface that leads to the learner, which is the loopback if that is here.

    Raises:
        ConfigError: there is no way to it.
    """
    if config.weights.path == "broadcast":
        use_interface(interface_of(route_to(server)[0]))


def take_part(process: Process, engine: Engine) -> None:
    """Tell the server with which devices this actor can receive; one that may not says so once, and pulls."""
    if process.config.weights.path != "broadcast" or not isinstance(engine, BroadcastEngine):
        return
    try:
        check_receiver(process.config, process.address)
    except ConfigError as error:
        print(f"{process.name}: it pulls its weights: {error}", flush=True)
        return
    process.client.send("receives", devices=engine.devices())
