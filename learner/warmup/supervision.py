"""Supervised lessons for a tiny model, until it is right on held-out problems often enough and not too often.

    lessons that are below the window ──a batch each in turn──► AdamW ──every 10 steps──► greedy accuracy on held-out
           ▲                                                                                       │
           └─── below: go on │ above: back along the last line of weights │ all inside: done ◄─────┘

What is left to learn is for reinforcement learning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from async_rl.errors import AsyncRLError

IGNORE = -100
"""Target where nothing is to be predicted."""
EVAL_EVERY = 10
_LR = 1e-3
_MAX_STEPS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One thing to learn, as far as the window."""

    name: str
    train: tuple[Tensor, Tensor]
    """Inputs and shifted targets, int64 [num_problems, length], see :func:`learner.warmup.main.pad`."""
    heldout: tuple[Tensor, Tensor]
    """The same of problems that are never trained."""
    enough: float
    """The accuracy to stop at."""
    too_much: float
    """The one that must not be passed: the rest is left to reinforcement learning."""
    batch: int = 64


@torch.no_grad()
def greedy_accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Share of rows that greedy decoding answers exactly.

    One forward pass is enough: greedy decoding gives the right answer if and only if, along the right answer, each next
    token is the most likely one.
    """
    predicted = model(input_ids=inputs).logits.argmax(-1)
    return float(((predicted == targets) | (targets == IGNORE)).all(1).float().mean())


def supervise(model: nn.Module, lessons: Sequence[Lesson], say: Callable[[str], None]) -> list[float]:
    """Train on right answers until every lesson's held-out accuracy is enough; returns these accuracies.

    Raises:
        AsyncRLError: an accuracy did not reach its window.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.01, foreach=True)
    start, before, active = time.monotonic(), _snapshot(model), list(lessons)
    for step in range(1, _MAX_STEPS + 1):
        loss = _step(model, optimizer, active[step % len(active)])
        if step % EVAL_EVERY:
            continue
        found = _accuracies(model, lessons)
        if any(accuracy >= lesson.too_much for lesson, accuracy in zip(lessons, found, strict=True)):
            for lesson in active:
                if greedy_accuracy(model, *lesson.heldout) >= lesson.too_much:
                    step_back(model, before, lesson)
            found = _accuracies(model, lessons)
        before = _snapshot(model)
        active = [lesson for lesson, accuracy in zip(lessons, found, strict=True) if accuracy < lesson.enough]
        if not active or step % (10 * EVAL_EVERY) == 0:
            text = "  ".join(f"{lesson.name} {accuracy:.3f}" for lesson, accuracy in zip(lessons, found, strict=True))
            say(f"step {step:4d}  loss {loss:.3f}  held-out {text}  {time.monotonic() - start:.1f} s")
        if not active:
            return found
    raise AsyncRLError(
        f"the tiny model has not learnt enough in {step} steps: held-out "
        + ", ".join(f"{lesson.name} not {lesson.enough}" for lesson in active)
    )


def step_back(model: nn.Module, before: list[Tensor], lesson: Lesson) -> float:
    """Bisect the line from ``before`` to the present weights for a point in the window; returns its accuracy.

    A few updates can carry the model across the whole window; how many depends on the processor's rounding.
    """
    after, low, high = _snapshot(model), 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        with torch.no_grad():
            for parameter, a, b in zip(model.parameters(), before, after, strict=True):
                parameter.copy_(torch.lerp(a, b, middle))
        accuracy = greedy_accuracy(model, *lesson.heldout)
        if lesson.enough <= accuracy < lesson.too_much:
            break
        low, high = (low, middle) if accuracy >= lesson.too_much else (middle, high)
    return accuracy


def _accuracies(model: nn.Module, lessons: Sequence[Lesson]) -> list[float]:
    return [greedy_accuracy(model, *lesson.heldout) for lesson in lessons]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, lesson: Lesson) -> float:
    inputs, targets = lesson.train
    rows = torch.randint(len(inputs), (lesson.batch,))
    logits = model(input_ids=inputs[rows]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), ignore_index=IGNORE)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _snapshot(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]
