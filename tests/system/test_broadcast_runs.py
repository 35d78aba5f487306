"""`async-rl run` whose versions go from the learner to all engines at once, whole."""

import pytest

from tests.system.conftest import assert_sound, fresh_differences, overrides, run, trained_rows

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_two_actors_receive_every_version_once_they_are_in_step(tmp_path, small):
    out = tmp_path / "run"
    small |= {"actors.count": 2, "weights.path": "broadcast", "eval.every": 0, "steps": 6}
    done = run("run", "arithmetic", *overrides(small), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = assert_sound(out, bound=2, steps=6)
    weights = summary["weights"]
    assert weights["mismatches"] == weights["broadcasts_failed"] == 0
    # the start version is pulled; the actor that is there for the first step receives all that follow
    assert weights["broadcasts_sent"] == 6
    assert 6 <= weights["broadcasts_received"] == weights["broadcasts_offered"] <= 12
    assert max(fresh_differences(out)) < 1e-4
    assert all(0 < row["time/broadcast_s"] < 20 for row in trained_rows(out))
