"""What the chaos script calls a loss: everything that is one, nothing that is none."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from chaos_verdict import verdict

_COUNTS = {"issued": 5, "open": 0, "scoring": 0, "ready": 0, "delivered": 0, "trained": 4, "filtered": 0, "failed": 1}
_TASKS = {"begun": 5, "held": 0, "waiting": 0, "trained": 4, "filtered": 0, "abandoned": 1}


def write_run(out, *, ordinals=((0, 1), (2, 3)), counts=_COUNTS, tasks=_TASKS, age=1, version=2, accuracy=0.9, uses=1):
    """A run of two steps with two tasks each."""
    rows = [json.dumps({"step": step, "ordinals": list(found)}) for step, found in enumerate(ordinals)]
    (out / "batches.jsonl").write_text("\n".join(rows) + "\n")
    staleness = {"max": age, "bound": 2}
    books = {"steps": 2, "books": counts, "tasks": tasks, "staleness": staleness}
    (out / "books.json").write_text(json.dumps(books))
    (out / "summary.json").write_text(json.dumps({"status": "completed", "reason": ""}))
    (out / "config.toml").write_text(f"steps = 2\n[buffer]\nmax_uses = {uses}\n")
    evaluation = {"version": version, "metrics": {"accuracy": accuracy}, "wall_s": 1.0, "samples": []}
    (out / "evals.jsonl").write_text(json.dumps(evaluation) + "\n")


def test_a_sound_run_has_no_losses_with_and_without_a_comparison(tmp_path):
    write_run(tmp_path)
    assert verdict(tmp_path, None) == []
    assert verdict(tmp_path, {"accuracy": 0.92}) == []


@pytest.mark.parametrize(
    ("changes", "undisturbed", "said"),
    [
        ({"ordinals": ((0, 1), (1, 2))}, None, "1 tasks were trained more than 1 times, such as ordinal 1"),
        ({"ordinals": ((0, 1), (2, 9))}, None, "1 trained tasks were never begun, such as ordinal 9"),
        ({"ordinals": ((0, 1, 2, 3),)}, None, "batches.jsonl has 1 steps of 2"),
        ({"ordinals": ((0, 1), (2,))}, None, "3 tasks are in batches.jsonl, the books say 4"),
        ({"counts": {**_COUNTS, "issued": 6}}, None, "the books do not close"),
        ({"tasks": {**_TASKS, "begun": 6}}, None, "a task was lost"),
        ({"tasks": {**_TASKS, "begun": 6, "held": 1}}, None, "a task was lost"),
        ({"age": 3}, None, "age 3 passed the bound 2"),
        ({"accuracy": 0.8}, {"accuracy": 0.9}, "accuracy ended at 0.8, undisturbed at 0.9"),
        ({"version": 1}, {"accuracy": 0.9}, "the last version (2) was not evaluated"),
        ({}, {}, "there is nothing to compare with"),
    ],
)
def test_each_kind_of_loss_is_named(tmp_path, changes, undisturbed, said):
    write_run(tmp_path, **changes)
    losses = verdict(tmp_path, undisturbed)
    assert any(loss.startswith(said) for loss in losses), losses


def test_tasks_may_be_trained_as_often_as_the_run_allows(tmp_path):
    write_run(tmp_path, ordinals=((0, 1, 2), (1, 2, 3)), uses=2)
    assert verdict(tmp_path, None) == []


def test_a_run_that_did_not_complete_is_a_loss_by_itself(tmp_path):
    assert verdict(tmp_path, None) == ["the run ended as None: None"]
