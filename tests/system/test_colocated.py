"""``actors.placement = "colocated"``: generation and training take turns on one device."""

import importlib.util
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from tests.system.conftest import assert_sound, fresh_differences, overrides, rows, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
STEPS = 5
CLOCKS_S = 0.02
"""Each process places its spans by its own reading of the wall clock."""


def turns(out: Path) -> list[tuple[str, float, float]]:
    """Spans (role, start, end) in which a role used the device, by start; what one role does in a row is one span."""
    device = {"actor": ("generating", "paused"), "learner": ("training", "reducing")}
    spans = defaultdict(list)
    for row in rows(out / "timeline.jsonl"):
        spans[row["role"]] += [(s, e) for state, s, e in row["spans"] if state in device.get(row["role"], ())]
    merged: list[tuple[str, float, float]] = []
    for start, end, role in sorted((s, e, name) for name in device for s, e in spans[name]):
        if merged and merged[-1][0] == role:
            merged[-1] = (role, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((role, start, end))
    return merged


@pytest.mark.parametrize(
    "engine",
    [
        "torch",
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.vllm,
                pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
            ],
        ),
    ],
)
def test_actor_and_learner_take_turns_and_never_work_at_the_same_time(tmp_path, small, engine):
    out = tmp_path / "run"
    small |= {"actors.placement": "colocated", "actors.engine": engine, "buffer.max_staleness": 0, "steps": STEPS}
    done = run("run", "arithmetic", *overrides(small | {"eval.every": 0}), "--out", str(out), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(out, bound=0, steps=STEPS)
    assert summary["staleness"]["max"] == 0
    assert summary["weights"]["mismatches"] == 0
    assert max(fresh_differences(out)) < 1e-4
    taken = turns(out)
    assert [role for role, _, _ in taken] == ["actor", "learner"] * STEPS + ["actor"] * (taken[-1][0] == "actor")
    for (_, _, end), (_, start, _) in pairwise(taken):
        assert start > end - CLOCKS_S
