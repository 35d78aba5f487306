"""Learning-rate rules against numbers worked by hand."""

import pytest

from learner.algorithms.schedules import kl_adaptive_lr, warmup


@pytest.mark.parametrize(
    ("lr", "kl", "expected"),
    [
        (3e-4, 0.021, 2e-4),  # above twice the target: / 1.5
        (2e-4, 0.004, 3e-4),  # below half: * 1.5
        (3e-4, 0.02, 3e-4),  # in between, bounds included
        (3e-4, 0.005, 3e-4),
        (1.2e-6, 1.0, 1e-6),  # limits
        (9e-3, 0.0, 1e-2),
        (5e-7, 1.0, 5e-7),  # beyond a limit it stays: a high KL never raises it, a low one never lowers it
        (0.0, 1.0, 0.0),
        (2e-2, 0.0, 2e-2),
    ],
)
def test_kl_adaptive_learning_rate(lr, kl, expected):
    assert kl_adaptive_lr(lr, kl, target=0.01) == pytest.approx(expected)


def test_warmup_rises_linearly_to_one():
    assert [warmup(s, 4) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup(0, 0) == 1.0
