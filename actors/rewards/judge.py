"""A judge: a language model behind an OpenAI-compatible address that grades answers, a function of the verifier form.

    template + {prompt, completion, columns} ─► POST URL/chat/completions ─► {"grade": x} ─► x in [0, 1]

A reply that is anything else is no grade and fails the call: a guess at what the judge meant would be a wrong reward.
The key is read from the environment, so that it is in no file and on no command line.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from async_rl.tasks.template import fill

KEY_VARIABLE = "ASYNC_RL_JUDGE_KEY"
MAX_TRIES = 5
"""Requests for one grade; only 429, 5xx and failed connections are tried again."""
FIRST_PAUSE_S = 0.25
"""Before the second try; twice as long before each further one, unless the server says how long."""
CONCURRENCY = 16
"""Most requests of one group at the same time."""
_SHOWN = 120


class JudgeError(Exception):
    """There is no grade; says why."""


def connect(url: str, model: str, template: str, limit_s: float) -> Callable[..., list[float]]:
    """Return the grading function; called once in the life of a child process.

    Args:
        url: base address; ``/chat/completions`` is put behind it.
        model: name of the model there.
        template: text with ``{prompt}``, ``{completion}`` and columns in braces.
        limit_s: longest time for one group, retries included.
    """
    key = os.environ.get(KEY_VARIABLE)
    judge = Judge(httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}), url, model)

    def score(prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        rows = zip(prompts, completions, strict=True)
        asked = [
            fill(template, {**{k: v[i] for k, v in columns.items()}, "prompt": prompt, "completion": completion})
            for i, (prompt, completion) in enumerate(rows)
        ]
        return judge.grades(asked, time.monotonic() + limit_s)

    return score


def parse_grade(reply: str) -> float:
    """The number in ``{"grade": NUMBER}``, between 0 and 1.

    Raises:
        JudgeError: the reply is not exactly that.
    """
    try:
        found = json.loads(reply)
    except ValueError:
        raise JudgeError(f"the reply is no JSON: {_short(reply)}") from None
    if not isinstance(found, dict) or found.keys() != {"grade"}:
        raise JudgeError(f'the reply is not {{"grade": NUMBER}}: {_short(reply)}')
    grade = found["grade"]
    if isinstance(grade, bool) or not isinstance(grade, int | float):
        raise JudgeError(f"the grade is no number: {_short(reply)}")
    if not 0 <= grade <= 1:  # NaN is not, either
        raise JudgeError(f"the grade is not between 0 and 1: {_short(reply)}")
    return float(grade)


class Judge:
    """Asks for grades, several at a time.

    Args:
        client: with the headers of every request.
        url: base address.
        model: name of the model there.
        pause: waits so many seconds; passed in by tests.
    """

    def __init__(
        self, client: httpx.Client, url: str, model: str, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self._client, self._url, self._model, self._pause = client, f"{url.rstrip('/')}/chat/completions", model, pause

    def grades(self, questions: Sequence[str], deadline: float) -> list[float]:
        """One grade per question, by ``deadline`` (``time.monotonic()``).

        Raises:
            JudgeError: some have none; says which, and why the first of them has none.
        """
        found: list[float] = []
        failures: list[tuple[int, JudgeError]] = []
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            futures = [threads.submit(self._grade, question, deadline) for question in questions]
            for i, future in enumerate(futures):
                try:
                    found.append(future.result())
                except JudgeError as error:
                    failures.append((i, error))
        if failures:
            first, why = failures[0]
            raise JudgeError(f"{len(failures)} of {len(questions)} answers have no grade; answer {first}: {why}")
        return found

    def _grade(self, question: str, deadline: float) -> float:
        wait_s, why = FIRST_PAUSE_S, "no time was left"
        for attempt in range(MAX_TRIES):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                response = self._ask(question, left_s)
            except httpx.TransportError as error:
                why, asked_s = f"{self._url} cannot be reached: {error or type(error).__name__}", None
            else:
                if response.status_code != 429 and response.status_code < 500:
                    return parse_grade(_content(response))
                why, asked_s = _status(response), _retry_after(response)
            pause_s = asked_s if asked_s is not None else wait_s * random.uniform(0.5, 1.0)
            if attempt == MAX_TRIES - 1 or pause_s >= deadline - time.monotonic():
                break
            self._pause(pause_s)
            wait_s *= 2
        raise JudgeError(why)

    def _ask(self, question: str, timeout_s: float) -> httpx.Response:
        body = {"model": self._model, "messages": [{"role": "user", "content": question}], "temperature": 0}
        return self._client.post(self._url, json=body, timeout=timeout_s)


def _content(response: httpx.Response) -> str:
    """The text of the first choice."""
    if response.status_code != 200:
        raise JudgeError(_status(response))
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        raise JudgeError(f"the response is no chat completion: {_short(response.text)}") from None
    if not isinstance(content, str):
        raise JudgeError(f"the message has no text: {_short(response.text)}")
    return content


def _status(response: httpx.Response) -> str:
    return f"{response.request.url} answered {response.status_code}: {_short(response.text)}"


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait; ``None`` where it gives none, or a date."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
