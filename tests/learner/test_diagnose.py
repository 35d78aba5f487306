"""Which side is wrong: decided from arrays, expected values by hand."""

import numpy as np
import pytest

from learner.probe.diagnose import (
    SHIFT,
    TEMPERATURE,
    blame,
    difference,
    explain,
    judge_delivery,
    judge_split,
    judge_stamps,
    nearest,
    shifted,
)

LIMIT = 1e-3
SEQUENCE_N = np.array([0, 0, 0, 1, 1])


def made_up(T=0.5, seed=0, count=40, vocabulary=20):
    """Log-probabilities of the same tokens at temperature T and at 1, by the definition of softmax."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, vocabulary)) * 2
    token = rng.integers(vocabulary, size=count)
    at = [x[np.arange(count), token] - np.log(np.exp(x).sum(-1)) for x in (logits / T, logits)]
    return at[0], at[1], np.repeat(np.arange(count // 8), 8)


def test_a_shift_stays_inside_its_sequence():
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    np.testing.assert_array_equal(shifted(values, SEQUENCE_N, 1), [np.nan, 1, 2, np.nan, 4])
    np.testing.assert_array_equal(shifted(values, SEQUENCE_N, -1), [2, 3, np.nan, 5, np.nan])


def test_the_difference_is_over_what_both_have():
    assert difference(np.array([1.0, 2.0, 9.0]), np.array([1.5, 1.0, np.nan])) == pytest.approx(0.75)
    assert np.isnan(difference(np.array([1.0]), np.array([np.nan])))


def test_the_nearest_candidate_must_lie_within_the_limit():
    values = np.array([1.0, 2.0])
    candidates = {"far": [values + 1], "near": [values + 2, values + 5e-4], "none": []}
    assert nearest(values, candidates, LIMIT) == "near"
    assert nearest(values, candidates, 1e-4) is None
    assert nearest(values, {"empty": [np.array([np.nan, np.nan])]}, LIMIT) is None


def test_sides_that_agree_need_no_explanation():
    right, at_1, sequence = made_up()
    assert explain(right + 1e-5, right, sequence, temperature=0.5, limit=LIMIT, learner_at_1_N=at_1) is None


def test_the_side_that_ignores_the_temperature_is_named():
    right, at_1, sequence = made_up()
    engine = explain(at_1, right, sequence, temperature=0.5, limit=LIMIT, learner_at_1_N=at_1)
    assert engine.startswith("the engine's log-probabilities are those at temperature 1 instead of 0.5")
    learner = explain(right, at_1, sequence, temperature=0.5, limit=LIMIT, learner_at_1_N=at_1)
    assert learner.startswith("the learner's log-probabilities are those at temperature 1")


@pytest.mark.parametrize("by", [-1, 1])
def test_a_shift_is_seen_without_an_arbiter_but_laid_at_no_door(by):
    right, at_1, sequence = made_up()
    engine = np.where(np.isnan(shifted(right, sequence, by)), -1.0, shifted(right, sequence, by))
    text = explain(engine, right, sequence, temperature=0.5, limit=0.2, learner_at_1_N=at_1)
    assert text.startswith("one side's log-probabilities are shifted by one position")


def test_other_weights_are_explained_by_nothing_known():
    right, at_1, sequence = made_up()
    other, _, _ = made_up(seed=1)
    text = explain(other, right, sequence, temperature=0.5, limit=LIMIT, learner_at_1_N=at_1)
    assert "do not have the same weights" in text
    nan = explain(right * np.nan, right, sequence, temperature=0.5, limit=LIMIT, learner_at_1_N=at_1)
    assert "do not have the same weights" in nan


@pytest.mark.parametrize("side", ["engine", "learner"])
def test_the_arbiter_names_side_and_fault(side):
    right, at_1, sequence = made_up()
    faults = {TEMPERATURE: [at_1], SHIFT: [shifted(right, sequence, by) for by in (-1, 1)]}
    assert blame(side, right, right, faults, limit=LIMIT, T=0.5) is None
    for wrong, words in (
        (at_1, "temperature 1 instead of 0.5"),
        (np.nan_to_num(faults[SHIFT][0], nan=-3.0), "shifted by one position"),
        (right - 1, "neither temperature nor a shift"),
    ):
        text = blame(side, wrong, right, faults, limit=LIMIT, T=0.5)
        assert text.startswith(f"the {side}'s log-probabilities")
        assert words in text


def test_stamps_are_compared_with_what_was_loaded():
    loaded = np.array([0, 0, 1, 1])
    assert judge_stamps(loaded, loaded) is None
    assert "off by one: tokens that version 0 sampled are stamped 1 (4 of 4" in judge_stamps(loaded, loaded + 1)
    assert "off by one: tokens that version 1 sampled are stamped 0 (1 of 4" in judge_stamps(
        loaded, np.array([0, 0, 0, 1])
    )
    assert "wrong: tokens that version 0 sampled are stamped 3" in judge_stamps(loaded, loaded + 3)


def test_a_swap_in_flight_is_where_the_log_probabilities_say_it_is():
    """Errors of two sequences by offset of the swap; the second was swapped one token after its start."""
    right = [{-2: 3.0, -1: 2.0, 0: 1e-6, 1: 2.0}, {-1: 1.0, 0: 2e-6, 1: 1.5}]
    assert judge_split(right, LIMIT, 0.0) is None
    early = [{-2: 3.0, -1: 1e-6, 0: 2.0, 1: 2.0}, {-1: 1e-6, 0: 1.0, 1: 1.5}]
    assert "off by one" in judge_split(early, LIMIT, 0.0)
    assert "1 token(s) that the new version sampled carry the old one" in judge_split(early, LIMIT, 0.0)
    late = [{-1: 2.0, 0: 2.0, 1: 1e-6, 2: 3.0}] * 2
    assert "that the old version sampled carry the new one" in judge_split(late, LIMIT, 0.0)


def test_a_swap_that_no_place_explains_is_a_fault_unless_the_rest_is_far_worse():
    errors = [{-1: 8.0, 0: 1.0, 1: 10.0}]
    assert "no place of the swap" in judge_split(errors, LIMIT, 0.1)  # noise would be 0.8
    assert judge_split(errors, LIMIT, 0.2) is None  # noise would be 1.6
    assert "no place of the swap" in judge_split([{0: float("nan")}], LIMIT, 0.2)


def test_a_version_that_never_arrived_is_told_from_a_corrupted_one():
    new, old = made_up()[0], made_up(seed=1)[0]
    assert judge_delivery(new + 1e-5, new, old, limit=LIMIT) is None
    assert judge_delivery(old, new, old, limit=LIMIT) == "previous"
    assert judge_delivery(new + 0.1, new, old, limit=LIMIT) == "unknown"
