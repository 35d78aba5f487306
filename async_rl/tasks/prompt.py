"""Between text and tokens: a problem's prompt as token ids, sampled ids as text. Both sides of a run use these two."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from async_rl.tasks.problem import Message, Problem
from async_rl.tasks.spelling import encode, guard

if TYPE_CHECKING:
    from async_rl.config import TaskConfig


def encode_prompt(tokenizer: Any, problem: Problem, task: TaskConfig) -> tuple[int, ...]:
    """Return the token ids [num_prompt] of ``instruction + prompt``, as the last turn of a chat when ``task.chat``.

    In a chat, and in what an environment says, control tokens are text; in a plain prompt of the data they are tokens,
    because the data may hold prompts in which a template was filled in before. In the instruction, which is a setting
    and no data, they are tokens: it may hold turns that were solved before (preset ``smollm2``).

    Args:
        tokenizer: a Hugging Face tokenizer.
        problem: its prompt is encoded.
        task: says whether and how the prompt is wrapped.

    Raises:
        ValueError: the tokenizer has no chat template, or one that refuses the conversation, or makes no token of the
            prompt.
    """
    text = task.instruction + problem.prompt
    marks: dict[str, str] = {}
    if task.chat:
        contents, marks = guard(tokenizer, [*(m["content"] for m in problem.before), problem.prompt])
        contents[-1] = task.instruction + contents[-1]
        roles = [*(m["role"] for m in problem.before), "user"]
        text = _render(tokenizer, [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)])
    elif task.environment:
        (guarded,), marks = guard(tokenizer, [problem.prompt])
        text = task.instruction + guarded
    ids = encode(tokenizer, text, marks, add_special_tokens=not task.chat)
    if not ids:
        raise ValueError(f"the tokenizer makes no token of the prompt {text!r}")
    return tuple(ids)


def _render(tokenizer: Any, messages: Sequence[Message]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs of the model's makers, and refuse roles, orders, ...
        raise ValueError(f"the model's chat template cannot render the conversation: {error}") from error
    return text


def decode_completion(tokenizer: Any, ids: Sequence[int], stop_ids: Collection[int]) -> str:
    """Return the text of the sampled ``ids`` before the first stop token, special tokens left out."""
    end = next((i for i, token in enumerate(ids) if int(token) in stop_ids), len(ids))
    kept = [int(token) for token in ids[:end]]
    text: str = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
