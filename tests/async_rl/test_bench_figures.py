"""Figures of benchmarks: ratios are medians of pairs, bars say whether they are met, JSON holds every value."""

import json

import pytest

from async_rl.bench.figures import Figure, paired, show

SPEED = Figure("copy", "GB/s", (4.0, 6.0, 9.0, 8.0, 5.0), "memcpy", (8.0, 8.0, 10.0, 8.0, 8.0), bar=0.7)


def test_a_ratio_is_the_median_of_the_pairs_not_of_the_medians():
    # 0.5, 0.75, 0.9, 1.0, 0.625
    assert SPEED.ratio == 0.75
    assert SPEED.median == 6.0
    assert SPEED.spread == pytest.approx((8 - 5) / 2 / 6)


@pytest.mark.parametrize(
    ("bar", "at_most", "met"), [(0.7, False, True), (0.8, False, False), (0.8, True, True), (None, False, None)]
)
def test_a_bar_is_held_against_the_ratio(bar, at_most, met):
    assert Figure("copy", "GB/s", SPEED.values, "memcpy", SPEED.baseline_values, bar, at_most).met is met


def test_without_a_baseline_a_bar_is_held_against_the_median():
    assert Figure("latency", "ms", (4.0, 6.0, 5.0), bar=5.0, at_most=True).met
    assert Figure("latency", "ms", (4.0,), bar=5.0).met is False
    assert Figure("latency", "ms", (4.0,)).spread == 0


def test_ours_and_the_baseline_take_turns_and_the_first_pair_is_dropped():
    order = []

    def named(name):
        def run():
            order.append(name)
            return float(len(order))

        return run

    assert paired(named("a"), named("b"), repeats=2) == ((4.0, 5.0), (3.0, 6.0))
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_all_values_are_written_with_what_is_needed_to_repeat_them(tmp_path, capsys):
    show("copies", [SPEED], tmp_path / "out.json", bytes=7)
    assert "met" in capsys.readouterr().out
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["bench"], told["bytes"], told["machine"]["cores"] > 0) == ("copies", 7, True)
    (row,) = told["figures"]
    assert (row["values"], row["ratio"], row["met"]) == ([4.0, 6.0, 9.0, 8.0, 5.0], 0.75, True)
