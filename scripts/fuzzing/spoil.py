"""Spoils valid input: a value of plain types (a header, JSON) at any of its places, or raw bytes.

{"count": 3, "groups": [...]} ─► a place ─► taken away, doubled, nested, or another value in its stead
"""

from __future__ import annotations

import json
from typing import Any

from fuzzing.choices import Choices

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 255, 256, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 61, 1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1,
    0.0, -0.0, 0.5, -1.5, 1e15, 1e29, 1e299, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    "", "a", "x" * 300, "\0", "a\nb", "\x1b[31m", "\u2028", "../../etc", "/dev/null", "nan", "1e999", "tokens",
    "rewards", "versions", "obs/policy", "hidden/actor0", "episode_returns", "final_obs/policy", "float32", "int32",
    "bool", "object", "<script>", "é\U0001f600",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"a": {}},
    [None] * 9,
    {"": 0},
    [0, 0, 0, 0],
    {"a": [1, "b"]},
)
BYTES: tuple[Any, ...] = (b"", b"\0" * 8, b"\xff" * 8)


def value(choices: Choices, plain: Any, *, binary: bool = True) -> Any:
    """``plain`` with one to four places spoilt; the original stays.

    Args:
        choices: what to do where.
        plain: maps, lists, texts, numbers.
        binary: whether bytes may stand in it, which JSON has no type for.
    """
    for _ in range(1 + choices.below(4)):
        plain = _spoil(choices, plain, binary, depth=0)
    return plain


def data(choices: Choices, content: bytes) -> bytes:
    """``content`` with one to four pieces cut, doubled, overwritten or put in."""
    spoilt = bytearray(content)
    for _ in range(1 + choices.below(4)):
        at = choices.below(len(spoilt) + 1)
        end = min(len(spoilt), at + choices.below(64))
        match choices.below(8):
            case 0:
                del spoilt[at:]
            case 1:
                del spoilt[at:end]
            case 2:
                spoilt[at:at] = spoilt[at:end]
            case 3:
                spoilt[at:end] = choices.blob(64)
            case 4:
                spoilt[at : at + 8] = choices.pick((0, 1, 255, 1 << 32, 1 << 62, (1 << 64) - 1)).to_bytes(8, "little")
            case 5:
                spoilt[at:at] = choices.pick((b"[" * 5000, b"9" * 5000, b"\xff\xfe", b'"', b"\n", b"null", b"1e999"))
            case _ if at < len(spoilt):
                spoilt[at] ^= 1 << choices.below(8)
    return bytes(spoilt)


def text(choices: Choices, plain: Any) -> bytes:
    """The JSON of a value that is spoilt as a value, and now and then as bytes, too."""
    content = json.dumps(value(choices, plain, binary=False)).encode()
    return data(choices, content) if choices.below(4) == 3 else content


def nasty(choices: Choices, binary: bool = True) -> Any:
    """A value that nobody expects."""
    kinds = (NUMBERS, TEXTS, OTHERS, BYTES) if binary else (NUMBERS, TEXTS, OTHERS)
    return choices.pick(choices.pick(kinds))


def _spoil(choices: Choices, plain: Any, binary: bool, depth: int) -> Any:
    stop = depth >= 8 or choices.below(4) == 3
    if isinstance(plain, dict) and plain and not stop:
        key = choices.pick(list(plain))
        return {**plain, key: _spoil(choices, plain[key], binary, depth + 1)}
    if isinstance(plain, list) and plain and not stop:
        at = choices.below(len(plain))
        return [*plain[:at], _spoil(choices, plain[at], binary, depth + 1), *plain[at + 1 :]]
    if isinstance(plain, dict):
        return _spoil_map(choices, plain, binary)
    if isinstance(plain, list):
        return _spoil_list(choices, plain, binary)
    if isinstance(plain, bytes) and choices.below(2):
        return data(choices, plain)
    if type(plain) is int and choices.below(2):
        return max(-(1 << 63), min(plain + choices.pick((1, -1, 2, 1000)), (1 << 64) - 1))
    return nasty(choices, binary)


def _spoil_map(choices: Choices, plain: dict[Any, Any], binary: bool) -> Any:
    keys = list(plain)
    match choices.below(4):
        case 0 if keys:
            gone = choices.pick(keys)
            return {k: v for k, v in plain.items() if k != gone}
        case 1 if len(keys) > 1:
            first, second = choices.pick(keys), choices.pick(keys)
            return {**plain, first: plain[second], second: plain[first]}
        case 2:
            return nasty(choices, binary)
        case _:
            return {**plain, str(choices.pick(TEXTS)): nasty(choices, binary)}


def _spoil_list(choices: Choices, plain: list[Any], binary: bool) -> Any:
    at = choices.below(len(plain) + 1)
    match choices.below(5):
        case 0:
            return [*plain[:at], *plain[at + 1 :]]
        case 1:
            return [*plain[:at], *plain[at : at + 1] * choices.pick((2, 3, 50)), *plain[at + 1 :]]
        case 2:
            return [*plain[:at], nasty(choices, binary), *plain[at:]]
        case 3:
            nested: Any = plain
            for _ in range(choices.pick((1, 5, 30, 40, 200))):
                nested = [nested]
            return nested
        case _:
            return nasty(choices, binary)
