"""How a run has ended, in words and as a status: from the server's stop, its books, and how processes ended.

stop message ─┐
books.json ───┼─► (status, reason)          each function is a rule; the launcher says when it applies
children ─────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from async_rl.errors import StartAgainError
from async_rl.launch.children import Child
from async_rl.launch.interfaces import Status

Books = Mapping[str, Any]
"""The content of ``books.json``; empty before the server has written any in this session."""


def orderly_end(stop: Mapping[str, Any] | None, books: Books, *, asked: bool) -> tuple[Status, str]:
    """The server left by itself: its verdict counts.

    Args:
        stop: its message, if it reached us.
        books: the last ones.
        asked: whether the user wished the run to stop; a wish that came after the last step changes nothing.
    """
    status, said = books.get("status"), books.get("reason")
    reason = str(stop["reason"]) if stop else str(said) if said else "asked to stop" if asked else "done"
    if status == "failed":
        return "failed", reason
    if status == "completed":
        return "completed", reason
    return "stopped" if status == "stopped" or asked else "completed", reason


def failure(reason: str, learner: Child) -> str:
    """The server's sentence, and which rank was killed, or the end of the learner's log if it holds a traceback."""
    killed = learner.killed_rank()
    if killed:
        return f"{reason}; {killed}"
    return f"{reason}\n{last_lines(learner)}" if any("Traceback" in line for line in learner.tail(60)) else reason


def has_died_early(child: Child, books: Books) -> bool:
    """Whether a worker or a learner ended before its time.

    0 means that it left on purpose, but not while there are steps to train; before the first books there are.
    """
    code = child.poll()
    if code != 0:
        return code is not None
    return books.get("status", "running") == "running" and int(books.get("step", 0)) < int(books.get("steps", 1))


def was_accident(child: Child) -> bool:
    """Whether something else ended it, or one of its ranks: it said nothing about itself."""
    code = child.poll()
    return code is not None and (code < 0 or code == StartAgainError.exit_code or child.killed_rank() is not None)


def has_joined(child: Child, books: Books) -> bool:
    """Whether the server has met this life of it, as far as its books tell.

    The learner is one process here, whatever its ranks; those of torchrun have process ids of their own.
    """
    met = _met(child, books)
    return met is None or bool(met)


def has_begun(child: Child, books: Books) -> bool:
    """Whether it may hold something that it should put down before it ends: it has joined and built its parts.

    A learner's states are told with its beats only, and it may have made a short run between two of them.
    """
    met = _met(child, books)
    return met is None or any(client.get("role") == "learner" or client.get("state") != "starting" for client in met)


def _met(child: Child, books: Books) -> list[Mapping[str, Any]] | None:
    """What the books say of this life; ``None`` if they do not tell."""
    if child.name == "server" or "clients" not in books:
        return None
    met = [client for client in books["clients"] if child.name in (client.get("name"), client.get("role"))]
    under_torchrun = "torch.distributed.run" in child.command
    return [client for client in met if under_torchrun or client.get("pid") in (None, child.pid)]


def describe(child: Child) -> str:
    """Why a process ended: its own sentence if it left one, and the last lines of its log."""
    why = child.killed_rank() or child.cause()
    return f"{child.name} {child.describe_end()}{f': {why}' if why else ''}\n{last_lines(child)}"


def last_lines(child: Child) -> str:
    """The end of its log, as a quotation."""
    lines = "\n".join(f"  {line}" for line in child.tail())
    return f"last lines of {child.log}:\n{lines}" if lines else f"{child.log} is empty"


def cpu_seconds(children: Iterable[Child]) -> dict[str, float]:
    """User and system seconds per name, over all its lives."""
    found: dict[str, float] = {}
    for child in children:
        found[child.name] = found.get(child.name, 0.0) + child.cpu_s
    return {name: round(value, 3) for name, value in found.items()}
