"""Text that must stay text: what looks like a control token in it is encoded letter by letter.

    contents ──guard──► contents with a mark for each control token ──template──► text ──encode──► token ids

Only the chat template may bring control tokens. A tool's output or a user's question that holds ``<|im_end|>`` would
else end a turn, or begin one of another role.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

_FIRST_MARK, _LAST_MARK = 0xE000, 0xF8FF
"""Private characters of Unicode, which no text needs."""


def guard(tokenizer: Any, texts: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Put a mark of one character in the place of each control token.

    Args:
        tokenizer: a Hugging Face tokenizer.
        texts: that are to stay text.

    Returns:
        The texts, and the control token that each mark stands for; no marks for texts that hold none, as nearly all.
    """
    found = [token for token in _control_tokens(tokenizer) if any(token in text for text in texts)]
    marks = dict(zip(_unused(texts), found, strict=False))
    guarded = list(texts)
    for mark, token in marks.items():  # the longest first, as the tokenizer finds them
        guarded = [text.replace(token, mark) for text in guarded]
    return guarded, marks


def encode(tokenizer: Any, text: str, marks: Mapping[str, str], *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text in which :func:`guard` has set marks; each mark becomes the letters of its token.

    Args:
        tokenizer: the same.
        text: holds guarded texts, and may hold control tokens elsewhere.
        marks: of :func:`guard`.
        add_special_tokens: whether the tokenizer adds what begins a sequence.
    """
    pieces = re.split(f"([{''.join(marks)}])", text) if marks else [text]
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        if piece in marks:
            ids += tokenizer(marks[piece], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        elif piece or i == 0:
            ids += tokenizer(piece, add_special_tokens=add_special_tokens and i == 0)["input_ids"]
    return ids


@lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Text of all special tokens, the longest first."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(sorted({*added, *tokenizer.all_special_tokens} - {""}, key=lambda t: (-len(t), t)))


def _unused(texts: Sequence[str]) -> Iterator[str]:
    used = set("".join(texts))
    return (chr(code) for code in range(_FIRST_MARK, _LAST_MARK + 1) if chr(code) not in used)
