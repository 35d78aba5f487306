"""Named algorithms: which settings each stands for. A key that the user gives wins over its recipe.

``algorithm.name`` ──► defaults of algorithm.* (and buffer.*) ──► what the user set on top

Named on the command line (``--set algorithm.name=``), a recipe also wins over the file's keys, which tune another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECIPES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "grpo": {},
    "dr_grpo": {"algorithm": {"advantage": "dr_grpo", "aggregation": "constant"}},
    "dapo": {"algorithm": {"clip_high": 0.28}, "buffer": {"replace_zero_variance": True}},
    "rloo": {"algorithm": {"advantage": "rloo"}},
    "reinforce_pp": {"algorithm": {"advantage": "reinforce_pp"}},
    "ppo": {"algorithm": {"advantage": "gae"}},
    "gspo": {"algorithm": {"loss": "gspo", "aggregation": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}},
    "cispo": {"algorithm": {"loss": "cispo", "clip_low": 1.0, "clip_high": 2.0}},
    "decoupled_ppo": {
        "algorithm": {
            "proximal": "recomputed",
            "correction": "truncate",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "minibatches": 2,
        }
    },
    "distillation": {
        "algorithm": {"advantage": "distill", "loss": "importance"},
        "buffer": {"replace_zero_variance": False},
    },
}
"""By name, section and key."""
_CLIPS = ("clip_low", "clip_high", "dual_clip")


def with_recipe(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Put the recipe of ``raw["algorithm"]["name"]`` under what ``raw`` says; an unknown name is left to validation."""
    algorithm = raw.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    recipe = RECIPES.get(name, {}) if isinstance(name, str) else {}
    merged = dict(raw)
    for section, values in recipe.items():
        given = raw.get(section, {})
        if isinstance(given, Mapping):  # anything else is refused by validation
            merged[section] = {**values, **given}
    return merged


def without_tuning(raw: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """``raw`` without the keys that recipe ``name`` sets; unchanged where it is tuned for that recipe already.

    The clips go together: those of another loss, or one side that was chosen for the other side's old value.
    """
    algorithm = raw.get("algorithm", {})
    if isinstance(algorithm, Mapping) and algorithm.get("name", "grpo") == name:
        return dict(raw)
    recipe = RECIPES.get(name, {}) if isinstance(name, str) else {}
    left = dict(raw)
    for section, values in recipe.items():
        gone = {*values, *(_CLIPS if {"loss", *_CLIPS} & {*values} else ())}
        if isinstance(raw.get(section), Mapping):
            left[section] = {key: value for key, value in raw[section].items() if key not in gone}
    return left
