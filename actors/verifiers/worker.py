"""The verifier child: imports one function and calls it, one message at a time, until its parent goes.

    socket ──► {prompts, completions, columns} ──► f(**accepted) ──► checked rewards ──► socket

Started by ``actors.verifiers.child`` with descriptor, parent's pid, ``module:function``, parameters, limits, folders to
search. With parameters (JSON) the function is called once with them and returns the one that scores, so that a model is
loaded once in the life of a child. Limits are the fields of a :class:`~async_rl.sandbox.Sandbox` (JSON), or empty.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.verifiers.wire import Unpacker, pack
from async_rl.errors import ConfigError
from async_rl.process import die_with_parent
from async_rl.sandbox import Sandbox, limit_hit

_CHUNK = 1 << 16
_TRACEBACK_LINES = 6
_DETAIL_CHARACTERS = 2_000
_FLOAT32_MAX = 3.4028234663852886e38

Verifier = Callable[..., Any]


class LoadError(Exception):
    """The function cannot be had; the message says why, for the user."""


def load_verifier(verifier: str, parameters: Mapping[str, Any] | None = None) -> Verifier:
    """Import ``module:function``; with parameters, call it with them for the function that scores.

    Raises:
        LoadError: no such module or function, not callable, or the import or the call raised.
    """
    function = import_callable(verifier)
    if parameters is None:
        return function
    try:
        return function(**parameters)  # type: ignore[no-any-return]
    except ConfigError as error:
        raise LoadError(str(error)) from None
    except (Exception, SystemExit) as error:
        raise LoadError(f"{verifier} cannot start: {tail_of(error)}") from None


def import_callable(spec: str, kind: str = "function") -> Callable[..., Any]:
    """Import ``module:name``.

    Args:
        spec: where it is.
        kind: what the message calls it.

    Raises:
        LoadError: no such module or name, not callable, or the import raised.
    """
    module_name, _, name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            places = ", ".join(dict.fromkeys(sys.path[:2]))
            raise LoadError(f"no module {error.name!r} (searched first in {places})") from None
        raise LoadError(f"the import of {module_name!r} failed: {tail_of(error)}") from None
    except (Exception, SystemExit) as error:
        raise LoadError(f"the import of {module_name!r} failed: {tail_of(error)}") from None
    function = getattr(module, name, None)
    if function is None:
        near = difflib.get_close_matches(name, dir(module), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise LoadError(f"module {module_name!r} has no {kind} {name!r}{hint}")
    if not callable(function):
        raise LoadError(f"{name!r} in module {module_name!r} is {type(function).__name__}, not a {kind}")
    return function  # type: ignore[no-any-return]


def accepted_names(function: Verifier) -> frozenset[str] | None:
    """Names of the keyword arguments that ``function`` takes; None when it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None  # a builtin without a signature
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def check_rewards(result: Any, count: int) -> list[float]:
    """Return the verifier's result as ``count`` floats; None means "cannot be scored" and becomes NaN, as in TRL.

    Raises:
        ValueError: not a list of ``count`` numbers that float32 can hold; says what it is.
    """
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, list | tuple):
        raise ValueError(f"the verifier returned {type(result).__name__}, not a list of numbers")
    if len(values) != count:
        raise ValueError(f"the verifier returned {len(values)} rewards for {count} completions")
    rewards = []
    for i, value in enumerate(values):
        if value is not None and not hasattr(value, "__float__"):
            raise ValueError(f"reward {i} is {type(value).__name__} {value!r:.60}, not a number")
        reward = math.nan if value is None else float(value)
        if abs(reward) > _FLOAT32_MAX:
            raise ValueError(f"reward {i} is {reward}, too large for float32")
        rewards.append(reward)
    return rewards


def answer(function: Verifier, accepted: frozenset[str] | None, call: Mapping[str, Any]) -> dict[str, Any]:
    """Call the verifier once; whatever it does short of ending the process becomes a reply."""
    arguments = {"prompts": call["prompts"], "completions": call["completions"], **call["columns"]}
    if accepted is not None:
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    try:
        result = function(**arguments)
    except (Exception, SystemExit) as error:
        return {"outcome": slug_of(error), "rewards": None, "detail": tail_of(error)}
    try:
        rewards = check_rewards(result, len(call["completions"]))
    except Exception as error:  # float() of a user's object may raise anything
        return {"outcome": "bad_result", "rewards": None, "detail": str(error)[:_DETAIL_CHARACTERS]}
    return {"outcome": "ok", "rewards": rewards, "detail": ""}


def slug_of(error: BaseException) -> str:
    """The outcome of a call that raised: the limit that it hit, or ``error``."""
    limit = limit_hit(error)
    return "error" if limit is None else limit[0]


def tail_of(error: BaseException) -> str:
    """Return the last lines of a traceback, and which limit was hit if one was."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    if (limit := limit_hit(error)) is not None:
        lines[-1] += f" ({limit[1]})"
    return "\n".join(lines[-_TRACEBACK_LINES:])[-_DETAIL_CHARACTERS:]


def enter(limits: str, parent_pid: int) -> Sandbox | None:
    """Limit this process before any code of the user runs, and have it die with its parent."""
    sandbox = None
    if limits:
        fields = json.loads(limits)
        sandbox = Sandbox(**{**fields, "keep_env": tuple(fields["keep_env"])})
        if why := sandbox.enter():
            print(f"the user's code keeps the network, which cannot be cut off here: {why}", flush=True)
    die_with_parent(parent_pid)  # after a change of namespaces, which could undo it
    return sandbox


def main(argv: Sequence[str]) -> None:
    """Serve calls until the parent closes the socket."""
    descriptor, parent_pid, verifier, parameters, limits, *search = argv
    sandbox = enter(limits, int(parent_pid))
    sys.path[:0] = search
    # not inherited by what user code starts: the parent must see the end of the stream when this process ends
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    try:
        function = load_verifier(verifier, json.loads(parameters) if parameters else None)
    except LoadError as error:
        connection.sendall(pack({"ok": False, "detail": str(error)}))
        return
    accepted = accepted_names(function)
    connection.sendall(pack({"ok": True, "detail": ""}))
    unpacker = Unpacker()
    while data := connection.recv(_CHUNK):
        for call in unpacker.feed(data):
            if sandbox is not None:
                sandbox.grant_cpu()
            connection.sendall(pack(answer(function, accepted, call)))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # threads that the user's module left behind must not keep the process
