"""Who waited for whom, in words: the sentence that stands over the picture of the states.

shares of the states by role ─► the largest wait ─► "the learner waited 31 % of its time for data: add actors"
"""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.report.usage import Seconds

NOTABLE = 0.05
"""A wait below this share of the time is not worth a word."""
_WAITS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("learner", "waiting_data"): ("the learner waited {share} of its time for data", "add actors, or make them faster"),
    ("learner", "reducing"): (
        "the ranks spent {share} of their time reducing gradients",
        "use fewer ranks, or a faster link",
    ),
    ("learner", "publishing"): (
        "the learner spent {share} of its time publishing weights and logging",
        "look at time/publish_s, the disk and the link; a broadcast waits for the slowest engine, too",
    ),
    ("learner", "checkpointing"): ("the learner spent {share} of its time on checkpoints", "raise checkpoint.every"),
    ("actors", "waiting_ticket"): (
        "the actors waited {share} of their time for tickets",
        "the learner is behind: add learner ranks, or use fewer actors",
    ),
    ("actors", "waiting_weights"): (
        "the actors waited {share} of their time for weights",
        "the link to the learner is slow, or the weights are large for it",
    ),
    ("actors", "paused"): (
        "the actors stood still {share} of their time for swaps of weights",
        "look at weights/pause_s",
    ),
    ("actors", "scoring"): (
        "the actors waited {share} of their time for rewards",
        "raise task.verifiers, or let scorers do it (reward.placement)",
    ),
}
"""Role and state of a wait: what is said, and what to do."""


def words(shares: Mapping[str, Seconds], max_staleness: int | None) -> str:
    """The answer in one or two sentences; empty when nothing was measured.

    Args:
        shares: for ``learner`` and ``actors`` each state's share of the time, start-up excluded.
        max_staleness: η of the run, if it is known; at 0 both sides take turns, whatever their speeds.
    """
    if not any(shares.get(role) for role in ("learner", "actors")):
        return ""
    waits = {key: shares.get(key[0], {}).get(key[1], 0.0) for key in _WAITS}
    turns = min(
        waits["learner", "waiting_data"], waits["actors", "waiting_ticket"] + waits["actors", "waiting_weights"]
    )
    if turns >= NOTABLE:
        told = f"the learner waited {waits['learner', 'waiting_data']:.0%} of its time for data and the actors "
        told += (
            f"{waits['actors', 'waiting_ticket'] + waits['actors', 'waiting_weights']:.0%} for tickets and weights: "
        )
        advice = "they took turns; " if max_staleness == 0 else "each waited for the other in turns; "
        return _sentence(told + advice + "raise buffer.max_staleness to let them overlap")
    notable = sorted((key for key in waits if waits[key] >= NOTABLE), key=lambda key: -waits[key])
    if not notable:
        return "Both sides were busy."
    sentences = [_WAITS[key][0].format(share=f"{waits[key]:.0%}") + ": " + _WAITS[key][1] for key in notable[:2]]
    return " ".join(_sentence(text) for text in sentences)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
