"""Some groups as text, for ``samples.jsonl``: those whose actor sent prompt and completions along. Pure."""

from __future__ import annotations

from typing import Any

from async_rl.data import Group


def sample_row(group: Group) -> dict[str, Any] | None:
    """The row of a group whose rewards are known; ``None`` if it has no text."""
    prompt, completions = group.meta.get("prompt"), group.meta.get("completions")
    if not isinstance(prompt, str) or not isinstance(completions, list):
        return None
    return {
        "ordinal": group.ordinal,
        "prompt": prompt,
        "completions": [str(c) for c in completions],
        "rewards": group.rewards.tolist(),
        "version": group.oldest_version,
    }
