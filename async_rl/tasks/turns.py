"""What stands between two answers of a model: an observation as token ids, in the chat template's words.

    sampled, end token │ <user> observation <end> <assistant> │ sampled, end token ...      no template: the text alone
                         before                after

Only the part between is ever rendered, from dummy conversations: what was sampled stays as it is. The observation is
text: a control token that stands in it is spelled out (``spelling``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import ConfigError
from async_rl.tasks.spelling import encode, guard

_DUMMIES = (("alpha", "beta", "gamma"), ("one", "two three", "[4+5]"))
"""Question, answer and observation of each conversation that is rendered."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Text around an observation."""

    before: str
    """From the end token of the answer on, that token left out."""
    after: str
    """Up to where the model's next answer begins."""


def observation_encoder(tokenizer: Any, stop_ids: Sequence[int], *, chat: bool) -> Callable[[str], tuple[int, ...]]:
    """What turns an observation into the token ids between two answers.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop_ids: ids that end an answer.
        chat: whether prompts are wrapped in the chat template.

    Raises:
        ConfigError: the template does not say what stands between two turns.
    """
    wrapping = template_wrapping(tokenizer, stop_ids) if chat else Wrapping("", "")

    def observe(observation: str) -> tuple[int, ...]:
        (guarded,), marks = guard(tokenizer, [observation])
        return tuple(encode(tokenizer, wrapping.before + guarded + wrapping.after, marks, add_special_tokens=False))

    return observe


def template_wrapping(tokenizer: Any, stop_ids: Sequence[int]) -> Wrapping:
    """The template's text between an answer and the next one, the observation as the user's turn.

    Raises:
        ConfigError: it is not the same in every conversation, it changes earlier turns, or an answer does not end with
            a token at which the model stops; says which.
    """
    stops = [tokenizer.decode([i]) for i in stop_ids]
    found = {_between(tokenizer, stops, *dummy) for dummy in _DUMMIES}
    if len(found) > 1:
        raise _undefined(f"what stands between two turns depends on their text: {sorted(w.before for w in found)}")
    return found.pop()


def _between(tokenizer: Any, stops: Sequence[str], question: str, answer: str, observation: str) -> Wrapping:
    turns = [("user", question), ("assistant", answer), ("user", observation)]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        start, whole = (
            tokenizer.apply_chat_template(part, add_generation_prompt=True, tokenize=False)
            for part in (messages[:1], messages)
        )
    except Exception as error:  # templates are programs of the model's makers
        raise _undefined(f"it cannot be rendered: {error}") from error
    if not whole.startswith(start + answer):
        raise _undefined("a conversation that goes on does not begin with the one before, as the model saw it")
    delta = whole.removeprefix(start + answer)
    stop = next((s for s in stops if s and delta.startswith(s)), None)
    if stop is None:
        raise _undefined(f"an answer is followed by {delta[:40]!r}, and the model stops at {' or '.join(stops)}")
    before, middle, after = delta.removeprefix(stop).partition(observation)
    if not middle or observation in after:
        raise _undefined(f"the observation {observation!r} does not appear in it exactly once")
    return Wrapping(before, after)


def _undefined(why: str) -> ConfigError:
    return ConfigError(
        f"task.environment with task.chat = true: the model's chat template does not fit several turns: {why}; use "
        "another model, or set task.chat = false"
    )
