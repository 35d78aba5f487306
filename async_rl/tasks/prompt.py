"""Between text and tokens: a problem's prompt as token ids, sampled ids as text. Both sides of a run use these two."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from async_rl.tasks.problem import Problem

if TYPE_CHECKING:
    from async_rl.config import TaskConfig


def encode_prompt(tokenizer: Any, problem: Problem, task: TaskConfig) -> tuple[int, ...]:
    """Return the token ids [num_prompt] of ``instruction + prompt``, as the last turn of a chat when ``task.chat``.

    Args:
        tokenizer: a Hugging Face tokenizer.
        problem: its prompt is encoded.
        task: says whether and how the prompt is wrapped.

    Raises:
        ValueError: the tokenizer has no chat template, or makes no token of the prompt.
    """
    text = task.instruction + problem.prompt
    if task.chat:
        messages = [*problem.before, {"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=not task.chat)["input_ids"]
    if not ids:
        raise ValueError(f"the tokenizer makes no token of the prompt {text!r}")
    return tuple(ids)


def decode_completion(tokenizer: Any, ids: Sequence[int], stop_ids: Collection[int]) -> str:
    """Return the text of the sampled ``ids`` before the first stop token, special tokens left out."""
    end = next((i for i, token in enumerate(ids) if int(token) in stop_ids), len(ids))
    kept = [int(token) for token in ids[:end]]
    text: str = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
