"""Which side is wrong when engine and learner disagree: pure functions from arrays of log-probabilities to a sentence.

    engine [N], learner [N], and what they would be under each known fault  ──nearest within the limit──►  sentence

At the start of a run there are the two sides only (:func:`explain`, for the trainer's first step):

    explain(engine_logprobs_N, learner_logprobs_N, sequence_N, temperature=T, limit=x, learner_at_1_N=...) -> str | None

``async-rl doctor`` has a third, the plain ``transformers`` forward, as arbiter (:func:`blame`): the side that agrees
with it is right. N counts sampled tokens, sequences one after the other, those of one sequence in order of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]
Side = Literal["engine", "learner"]

TEMPERATURE, SHIFT = "temperature", "shift"
"""Names of the faults that both sides may have."""


def difference(left_N: Floats, right_N: Floats) -> float:
    """Mean absolute difference over the positions that both have (NaN in ``right_N`` means none); NaN without any."""
    there_N = ~np.isnan(right_N)
    return float(np.abs(left_N[there_N] - right_N[there_N]).mean()) if there_N.any() else float("nan")


def shifted(logprobs_N: Floats, sequence_N: Ints, by: int) -> Floats:
    """Each token gets the value of the token ``by`` places before it in its sequence; NaN where there is none.

    Args:
        logprobs_N: one value per token.
        sequence_N: sequence of each token; those of one sequence stand together.
        by: positive or negative.
    """
    moved_N = np.full(len(logprobs_N), np.nan)
    index_N = np.arange(len(logprobs_N)) - by
    inside_N = (index_N >= 0) & (index_N < len(logprobs_N))
    inside_N[inside_N] = sequence_N[index_N[inside_N]] == sequence_N[inside_N]
    moved_N[inside_N] = logprobs_N[index_N[inside_N]]
    return moved_N


def nearest(logprobs_N: Floats, candidates: Mapping[str, Sequence[Floats]], limit: float) -> str | None:
    """Name of the candidate that differs least on average, if by at most ``limit``; each may have several forms."""
    found = {name: min(_known(difference(logprobs_N, f)) for f in forms) for name, forms in candidates.items() if forms}
    name = min(found, key=lambda n: found[n], default=None)
    return name if name is not None and found[name] <= limit else None


def blame(
    side: Side, logprobs_N: Floats, right_N: Floats, faults: Mapping[str, Sequence[Floats]], *, limit: float, T: float
) -> str | None:
    """What is wrong with one side, by the arbiter's values; None if nothing is.

    Args:
        side: whose log-probabilities these are.
        logprobs_N: what it says.
        right_N: what the arbiter says.
        faults: what the arbiter would say under each known fault (:data:`TEMPERATURE`, :data:`SHIFT`).
        limit: largest mean difference that is noise.
        T: the temperature that was asked for.
    """
    if difference(logprobs_N, right_N) <= limit:
        return None
    return sentence(side, nearest(logprobs_N, faults, limit), T)


def sentence(side: Side, fault: str | None, temperature: float) -> str:
    """The fault of one side in words; ``None`` is one that nothing known explains."""
    if fault == TEMPERATURE:
        return (
            f"the {side}'s log-probabilities are those at temperature 1 instead of {temperature:g}: it ignores "
            "sampling.temperature"
        )
    if fault == SHIFT:
        return f"the {side}'s log-probabilities are shifted by one position: each token has its neighbour's"
    return f"the {side}'s log-probabilities are wrong: neither temperature nor a shift by one position explains them"


def judge_stamps(loaded_N: Ints, stamped_N: Ints) -> str | None:
    """What is wrong with the stamps of tokens that the weights of ``loaded_N`` sampled; None if nothing is."""
    wrong_N = loaded_N != stamped_N
    if not wrong_N.any():
        return None
    loaded, stamped = int(loaded_N[wrong_N][0]), int(stamped_N[wrong_N][0])
    by_one = bool((np.abs(stamped_N - loaded_N)[wrong_N] == 1).all())
    return (
        f"the engine's version stamps are {'off by one' if by_one else 'wrong'}: tokens that version {loaded} sampled "
        f"are stamped {stamped} ({int(wrong_N.sum())} of {len(wrong_N)} tokens)"
    )


def judge_split(errors: Sequence[Mapping[int, float]], limit: float, share: float) -> str | None:
    """What is wrong with the stamps of sequences during which a version was swapped in; None if nothing is.

    Args:
        errors: of each sequence, for each offset (in tokens) of the swap from where the stamps say it was,
            how far the engine's log-probabilities are from what they would then be.
        limit: largest mean difference that is noise;
        share: or that share of the difference at the next best offset.
    """
    offsets = sorted(set.intersection(*(set(e) for e in errors)), key=abs)
    means = {by: float(np.mean([e[by] for e in errors])) for by in offsets}
    best = min(offsets, key=lambda by: means[by])
    noise = max(limit, share * min((means[by] for by in offsets if by != best), default=0.0))
    if not means[best] <= noise:
        return (
            "where a swap met running requests, no place of the swap near the stamped one explains the engine's "
            "log-probabilities: it was not between two steps, or actors.kv_cache is not what the engine does"
        )
    if best == 0:
        return None
    right, wrong = ("new", "old") if best < 0 else ("old", "new")
    return (
        f"the engine's version stamps are off by {'one' if abs(best) == 1 else abs(best)} where a swap met running "
        f"requests: in each, {abs(best)} token(s) that the {right} version sampled carry the {wrong} one"
    )


def judge_delivery(engine_N: Floats, right_N: Floats, previous_N: Floats, *, limit: float) -> str | None:
    """Whether requests after a swap are answered by the new weights; ``unknown`` if by neither, None if they are."""
    if difference(engine_N, right_N) <= limit:
        return None
    return "previous" if difference(engine_N, previous_N) <= limit else "unknown"


def explain(
    engine_logprobs_N: Floats,
    learner_logprobs_N: Floats,
    sequence_N: Ints,
    *,
    temperature: float,
    limit: float,
    learner_at_1_N: Floats | None = None,
) -> str | None:
    """Why the two sides disagree about tokens that exactly these weights sampled; None if they agree.

    Without an arbiter a shift cannot be laid at either door, and a temperature only where it differs from 1.

    Args:
        engine_logprobs_N: as the actor recorded them.
        learner_logprobs_N: the learner's, by the path that trains, at ``temperature``.
        sequence_N: sequence of each token; those of one sequence stand together, in order of time.
        temperature: ``sampling.temperature``.
        limit: largest mean difference that is noise.
        learner_at_1_N: the learner's at temperature 1; tells who ignores the temperature.

    Returns:
        A sentence without a full stop.
    """
    if difference(engine_logprobs_N, learner_logprobs_N) <= limit:
        return None
    if learner_at_1_N is not None and temperature != 1:
        if difference(learner_at_1_N, learner_logprobs_N) <= limit:
            return sentence("learner", TEMPERATURE, temperature)
        if difference(engine_logprobs_N, learner_at_1_N) <= limit:
            return sentence("engine", TEMPERATURE, temperature)
    forms = [shifted(learner_logprobs_N, sequence_N, by) for by in (-1, 1)]
    if nearest(engine_logprobs_N, {SHIFT: forms}, limit):
        return (
            "one side's log-probabilities are shifted by one position against the other's; `async-rl doctor` names it"
        )
    return (
        "the two sides do not have the same weights, tokens or sampling contract: neither temperature nor a shift by "
        "one position explains the difference; `async-rl doctor` tells which side is wrong"
    )


def _known(value: float) -> float:
    return value if value == value else float("inf")
