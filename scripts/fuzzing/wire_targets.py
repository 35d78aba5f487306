"""Decoders of what comes off a socket: headers, groups, annotations, manifests, and all that carries weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from async_rl.data import Annotation
from async_rl.errors import WeightsError, WireError
from async_rl.weights.delta import apply, encode
from async_rl.weights.filling import Base, Filling
from async_rl.weights.manifest import Manifest
from async_rl.weights.pull import Pull, TransferError
from async_rl.weights.server import WeightServer, request_of
from async_rl.wire import decode_annotations, decode_groups, encode_annotations, encode_groups, unpack_header
from fuzzing import spoil
from fuzzing.choices import Choices
from fuzzing.samples import fragment, manifest, token_group

Run = Callable[[Choices], list[str]]
"""Feeds one input, or a sequence of them; for each the reason why it was refused, empty where it was accepted."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that reads input from outside."""

    name: str
    make: Callable[[Path], Run]
    """Prepares it; it may use the folder, which is its own."""


def packed(plain: Any) -> bytes:
    """Msgpack of whatever spoiling has made."""
    return bytes(msgpack.packb(plain, use_bin_type=True))


def refused(act: Callable[[], object]) -> str:
    """Why it was refused; empty if it was not. Any other error goes on up: it is a fault."""
    try:
        act()
    except WireError as error:
        return error.reason
    except TransferError as error:
        return error.reason
    except WeightsError as error:
        return str(error).partition(":")[0][:40]
    return ""


def message(choices: Choices, frames: list[Any]) -> list[bytes]:
    """An encoded message with header, frames or both spoilt."""
    header, *arrays = [bytes(frame) for frame in frames]
    where = choices.below(4)
    if where != 2:
        plain = msgpack.unpackb(header, raw=False)
        for entry in plain.get("groups", ()):
            if "arrays" in entry and choices.below(2):
                entry["arrays"] = packed(spoil.value(choices, msgpack.unpackb(entry["arrays"], raw=False)))
        header = packed(spoil.value(choices, plain))
    if where == 1:
        header = spoil.data(choices, header)
    if where >= 2 and arrays:
        at = choices.below(len(arrays))
        arrays[at] = spoil.data(choices, arrays[at])
        if choices.below(8) == 7:
            arrays.append(choices.blob(32))
    return [header, *arrays]


def _header(folder: Path) -> Run:
    seed = {"type": "beat", "seq": 1, "timer": {"state": "idle", "spans": [["idle", 0.0, 1.0]]}, "x": [b"", None]}

    def run(choices: Choices) -> list[str]:
        match choices.below(4):
            case 0:
                raw = choices.blob(200)
            case 1:
                raw = spoil.data(choices, packed(seed))
            case _:
                raw = packed(spoil.value(choices, seed))
        return [refused(lambda: unpack_header(raw))]

    return run


def _groups(folder: Path) -> Run:
    seeds = [
        encode_groups("submit", [token_group(0), token_group(1)], seq=1),
        encode_groups("submit", [fragment(0)], seq=1),
    ]

    def run(choices: Choices) -> list[str]:
        head, *frames = message(choices, list(choices.pick(seeds)))
        return [refused(lambda: decode_groups(unpack_header(head), frames))]

    return run


def _annotations(folder: Path) -> Run:
    group = token_group()
    items = [
        Annotation(ordinal=0, attempt=0, stage="reward", values=group.rewards),
        Annotation(ordinal=1, attempt=2, stage="reference", values=group.arrays["logprobs"]),
    ]
    seed = encode_annotations("annotate", items, seq=1)

    def run(choices: Choices) -> list[str]:
        head, *frames = message(choices, list(seed))
        return [refused(lambda: decode_annotations(unpack_header(head), frames))]

    return run


def _manifest(folder: Path) -> Run:
    seed = manifest(3).to_wire()

    def run(choices: Choices) -> list[str]:
        fields = msgpack.unpackb(packed(spoil.value(choices, seed)), raw=False)
        if not isinstance(fields, dict):
            return ["no map"]
        return [refused(lambda: Manifest.from_wire(fields))]

    return run


def _weights_server(folder: Path) -> Run:
    server = WeightServer("tcp://127.0.0.1:*", None)
    held = manifest(3)
    server._shelf.put(held.segment, Filling.whole(held, memoryview(bytes(8))))
    seed = {"type": "get", "version": 3, "chunk": 1, "base": held.checksum}

    def run(choices: Choices) -> list[str]:
        parts = message(choices, [packed(seed)])
        if choices.below(8) == 7:
            parts.append(choices.blob(32))
        return [refused(lambda: server._shelf.answer(request_of(parts)))]

    return run


class _Mute:
    """Stands for a socket."""

    def send(self, request: bytes) -> None:
        """Nobody hears it."""


class _Part:
    """Stands for a frame of ZeroMQ."""

    def __init__(self, content: bytes) -> None:
        self.buffer = memoryview(content)


def _puller(folder: Path) -> Run:
    wanted = manifest(3)
    seed = [packed({"type": "chunk", "version": 3, "chunk": 1}), b"\0\0\x40\x40"]

    def run(choices: Choices) -> list[str]:
        filling = Filling(wanted, memoryview(bytearray(8)))
        filling.lead_from(Base("base", memoryview(bytes(8))))
        pull = Pull(filling, "", (), 1.0, lambda *_, **__: _Mute(), Counter())  # type: ignore[arg-type,return-value]
        [source] = pull.sources
        pull.ask(source)
        found = []
        for _ in range(1 + choices.below(8)):
            said = message(choices, seed) if choices.below(2) else seed
            parts: Any = [_Part(part) for part in said]
            good: list[bool] = []
            reason = refused(lambda parts=parts, good=good: good.append(pull.receive(source, parts)))  # type: ignore[misc]
            found.append(reason or ("" if good == [True] else "no_good_chunk"))
            if reason:
                break
        return found

    return run


def _differences(folder: Path) -> Run:
    base = memoryview(bytes(range(256)) * 16)
    seeds = [encode(base, memoryview(bytes(base[::-1])), itemsize) for itemsize in (2, 4)]

    def run(choices: Choices) -> list[str]:
        frame = spoil.data(choices, choices.pick(seeds))
        return [refused(lambda: apply(memoryview(bytearray(base)), frame))]

    return run


TARGETS = (
    Target("wire: header", _header),
    Target("wire: groups", _groups),
    Target("wire: annotations", _annotations),
    Target("weights: manifest", _manifest),
    Target("weights: requests", _weights_server),
    Target("weights: replies", _puller),
    Target("weights: differences", _differences),
)
