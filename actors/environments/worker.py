"""The environment child: one event loop, many episodes, until its parent goes.

    socket ──► {episode, do: reset | act | close, ...} ──► task of the episode ──► Environment ──► reply ──► socket

Started by ``actors.environments.pool`` with: descriptor, parent's pid, ``task.environment``, parameters (JSON:
``timeout_s``), limits (see ``actors.verifiers.worker``), folders to search. A call that awaits for too long is given
up here, and the other episodes go on; one that blocks the loop holds up the replies, which the parent notices.
"""

from __future__ import annotations

import asyncio
import json
import math
import numbers
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from actors.environments.base import Environment, Turn
from actors.verifiers.wire import Unpacker, pack
from actors.verifiers.worker import LoadError, enter, import_callable, slug_of, tail_of
from async_rl.sandbox import Sandbox
from async_rl.tasks.environments import GYMNASIUM

_CHUNK = 1 << 18
_DETAIL_CHARACTERS = 2_000
_OBSERVATION_CHARACTERS = 1 << 20
_FLOAT32_MAX = 3.4028234663852886e38

Factory = Callable[[], Environment]


def load_environment(environment: str) -> Factory:
    """What makes an episode of ``task.environment``.

    Raises:
        LoadError: it cannot be imported or made; the message says why, for the user.
    """
    if environment == "calculator":
        from actors.environments.calculator import Calculator

        return Calculator
    if environment == "guess":
        from actors.environments.guess import Guess

        return Guess
    if environment.startswith(GYMNASIUM):
        return _gymnasium(environment.removeprefix(GYMNASIUM))
    factory: Factory = import_callable(environment, "class")
    missing = [name for name in ("reset", "act", "close") if not hasattr(factory, name)]
    if missing:
        raise LoadError(f"it has no {' and no '.join(missing)}; see actors.environments.base.Environment")
    return factory


def _gymnasium(name: str) -> Factory:
    from actors.environments.gymnasium_text import GymnasiumText, make

    try:
        make(name, {}).close()
    except ModuleNotFoundError as error:
        raise LoadError(f"{error.name} is not installed: pip install 'async-rl[control]'") from None
    except Exception as error:  # gymnasium and its plug-ins raise what they like
        raise LoadError(f"gymnasium cannot make {name!r}: {error}") from None
    return partial(GymnasiumText, name)


class Host:
    """The episodes of one child.

    Args:
        factory: makes an environment.
        timeout_s: limit of one call.
        reply: sends a message to the parent.
    """

    def __init__(self, factory: Factory, timeout_s: float, reply: Callable[[Mapping[str, Any]], None]) -> None:
        self._factory, self._timeout_s, self._reply = factory, timeout_s, reply
        self._environments: dict[int, Environment] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def handle(self, message: Mapping[str, Any]) -> None:
        """Begin what the parent asks for; the loop goes on with it."""
        episode = message["episode"]
        if message["do"] == "close":
            task = asyncio.create_task(self._close(episode))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        else:
            self._calls[episode] = asyncio.create_task(self._call(episode, message))

    async def _call(self, episode: int, message: Mapping[str, Any]) -> None:
        """One reset or act; whatever user code does short of ending the process becomes a reply."""
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, episode)
        try:
            if message["do"] == "reset":
                self._environments[episode] = environment = self._factory()
                reply = checked_observation(await environment.reset(message["columns"], message["seed"]))
            else:
                reply = checked_turn(await self._environments[episode].act(message["text"]))
        except asyncio.CancelledError as error:
            if self._calls.get(episode) is not asyncio.current_task():
                raise  # given up or closed; else by user code itself, from a task that it awaits
            reply = {"outcome": "error", "detail": tail_of(error)}
        except (Exception, SystemExit) as error:
            reply = {"outcome": slug_of(error), "detail": tail_of(error)}
        finally:
            timer.cancel()
        if self._calls.get(episode) is asyncio.current_task():  # else it was given up or closed
            self._reply({"episode": episode, **reply})

    def _give_up(self, episode: int) -> None:
        if (call := self._calls.pop(episode, None)) is None:  # closed in the same moment
            return
        call.cancel()
        detail = f"the environment took longer than {self._timeout_s:g} s"
        self._reply({"episode": episode, "outcome": "timeout", "detail": detail})

    async def _close(self, episode: int) -> None:
        """Cancel what the episode still does, then close it; a fault there concerns nobody any more but is printed."""
        call = self._calls.pop(episode, None)
        if call is not None and not call.done():
            call.cancel()
            await asyncio.wait([call])
        environment = self._environments.pop(episode, None)
        if environment is None:
            return
        try:
            await environment.close()
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            print(f"environment: close() failed: {tail_of(error)}", flush=True)


def checked_observation(result: Any) -> dict[str, Any]:
    """The reply to a reset."""
    fault = _fault_of(result)
    if fault:
        return {"outcome": "bad_result", "detail": f"reset returned {fault}"}
    return {"outcome": "ok", "observation": result, "reward": 0.0, "done": False}


def checked_turn(result: Any) -> dict[str, Any]:
    """The reply to an answer."""
    if not isinstance(result, Turn):
        fault = f"{type(result).__name__}, not a Turn"
    elif isinstance(result.reward, numbers.Real) and math.isfinite(result.reward):
        reward: float = float(result.reward)
        fault = _fault_of(result.observation) if abs(reward) <= _FLOAT32_MAX else f"reward {reward}, too large"
    else:
        fault = f"reward {result.reward!r:.60}, not a finite number"
    if fault:
        return {"outcome": "bad_result", "detail": f"act returned {fault}"}
    return {"outcome": "ok", "observation": result.observation, "reward": reward, "done": bool(result.done)}


def _fault_of(observation: Any) -> str:
    """Why it is no text that a tokenizer can read; empty if it is."""
    if not isinstance(observation, str):
        return f"{type(observation).__name__} as the observation, not text"
    if len(observation) > _OBSERVATION_CHARACTERS:
        return f"{len(observation)} characters as the observation, more than {_OBSERVATION_CHARACTERS}"
    try:
        observation.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair in the observation"
    return ""


async def serve(connection: socket.socket, factory: Factory, timeout_s: float, sandbox: Sandbox | None) -> None:
    """Handle messages until the parent closes the socket."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)

    def reply(message: Mapping[str, Any]) -> None:
        writer.write(pack(message))
        if sandbox is not None:
            sandbox.grant_cpu()  # episodes share the process: each sign of life gives the others their time

    host = Host(factory, timeout_s, reply)
    unpacker = Unpacker()
    while data := await reader.read(_CHUNK):
        if sandbox is not None:
            sandbox.grant_cpu()
        for message in unpacker.feed(data):
            host.handle(message)


def main(argv: Sequence[str]) -> None:
    """Load the environment, say so, serve."""
    descriptor, parent_pid, environment, parameters, limits, *search = argv
    sandbox = enter(limits, int(parent_pid))
    sys.path[:0] = search
    # not inherited by what user code starts: the parent must see the end of the stream when this process ends
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    try:
        factory = load_environment(environment)
    except LoadError as error:
        connection.sendall(pack({"ok": False, "detail": str(error)[:_DETAIL_CHARACTERS]}))
        return
    connection.sendall(pack({"ok": True, "detail": ""}))
    asyncio.run(serve(connection, factory, json.loads(parameters)["timeout_s"], sandbox))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # threads that the user's module left behind must not keep the process
