"""Problems of reasoning-gym data sets, scored strictly: 1 for a right answer, 0 for everything else, nothing between.

    ONE_ANSWER    one right answer           ──►  tasks.exact, whole answer; the package's own scorer is never asked
    MANY_ANSWERS  several right answers      ──►  its own scorer, which was read; only a score of exactly 1 counts

The package's default scorer gives credit for text that contains the answer, some of its scorers evaluate text of the
model (``countdown``, ``puzzle24``, ...), some call any text right. Only what was read is allowed: these two lists.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from async_rl.errors import ConfigError
from async_rl.tasks import exact
from async_rl.tasks.problem import Problem

VERIFIER = "async_rl.tasks.reasoning_gym:score"

# fmt: off
ONE_ANSWER = frozenset(
    {
        "ab", "acre", "aiw", "arc_1d", "base_conversion", "basic_arithmetic", "binary_alternation",
        "binary_matrix", "bitwise_arithmetic", "caesar_cipher", "calendar_arithmetic", "chain_sum",
        "circuit_logic", "color_cube_rotation", "count_bits", "count_primes", "course_schedule",
        "decimal_chain_sum", "dice", "family_relationships", "gcd", "gsm_symbolic", "isomorphic_strings",
        "knights_knaves", "largest_island", "lcm", "leg_counting", "letter_counting", "list_functions",
        "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid", "needle_haystack",
        "number_sequence", "path_star", "prime_factorization", "products", "ransom_note", "rectangle_count",
        "rotate_matrix", "rotten_oranges", "self_reference", "simple_equations", "simple_geometry",
        "spell_backward", "spiral_matrix", "string_insertion", "string_manipulation", "string_splitting",
        "string_synthesis", "syllogism", "time_intervals", "word_sequence_reversal", "word_sorting",
    }
)
# fmt: on
"""Their question states the form of the answer, there is one, and 2,500 problems are made in seconds."""

MANY_ANSWERS = frozenset({"cryptarithm", "graph_color", "palindrome_generation", "shortest_path"})
"""Their scorers parse the whole answer with ``json``, ``int`` or ``split``, and give 1 only to a solution."""

_SIZE, _SEED = 2_500, 42


def problems(name: str) -> Iterator[tuple[object, Problem]]:
    """Make the problems of a data set, the same ones in every process.

    Yields:
        ``(question, problem)`` with the column ``answer``, or ``dataset`` and ``index`` for :func:`score`.

    Raises:
        ConfigError: the data set is not allowed, or the package is not installed.
    """
    check_allowed(name)
    data = _dataset(name)
    for index in range(_SIZE):
        entry = data[index]
        columns = {"answer": entry["answer"]} if name in ONE_ANSWER else {"dataset": name, "index": index}
        yield entry["question"], Problem(prompt=entry["question"], columns=columns)


def verifier(name: str) -> str:
    """Which function scores a data set, as ``module:function``."""
    return exact.VERIFIER if name in ONE_ANSWER else VERIFIER


def check_allowed(name: str) -> None:
    """Refuse data sets whose scoring was not read.

    Raises:
        ConfigError: says which are allowed.
    """
    allowed = ONE_ANSWER | MANY_ANSWERS
    if name in allowed:
        return
    if name == "countdown":
        raise ConfigError(
            "task.dataset = 'countdown': its scorer evaluates text of the model; set task.name = 'countdown', which "
            "parses it instead"
        )
    near = difflib.get_close_matches(name, allowed, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"task.dataset = {name!r} is not one of reasoning-gym's data sets that are scored strictly{hint} "
        f"(allowed: {', '.join(sorted(allowed))})"
    )


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    dataset: Sequence[str],
    index: Sequence[int],
    finish_reasons: Sequence[str],
    **_: object,
) -> list[float]:
    """1.0 for a finished answer that the data set's own scorer calls wholly right, else 0.0."""
    return [
        float(reason == "stop" and _is_right(name, i, text.strip()))
        for text, name, i, reason in zip(completions, dataset, index, finish_reasons, strict=True)
    ]


def _is_right(name: str, index: int, answer: str) -> bool:
    check_allowed(name)
    data = _dataset(name)
    return bool(data.score_answer(answer, entry=data[index]) == 1.0)


@functools.lru_cache(maxsize=4)
def _dataset(name: str) -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError(
            "task.name = 'reasoning_gym' needs reasoning-gym: pip install -c constraints.txt 'async-rl[tasks]'"
        ) from None
    return reasoning_gym.create_dataset(name, seed=_SEED, size=_SIZE)
