"""Distributions of lengths: what is drawn, what its mean is, what a file may hold."""

import json

import numpy as np
import pytest

from async_rl.errors import ConfigError
from async_rl.lengths import Lengths, read_lengths, request_rng


def test_the_99th_percentile_is_ten_times_the_median():
    lengths = Lengths(kind="lognormal", median=1000, p99_over_p50=10.0)
    assert lengths.sigma == pytest.approx(0.98979, abs=1e-5)  # ln 10 / 2.3263
    drawn = lengths.draw(np.random.default_rng(0), 200_000)
    assert np.quantile(drawn, 0.5) == pytest.approx(1000, rel=0.01)
    assert np.quantile(drawn, 0.99) == pytest.approx(10_000, rel=0.03)


@pytest.mark.parametrize("longest", [100, 1024, 1 << 30])
def test_the_mean_is_that_of_what_is_drawn(longest):
    lengths = Lengths(kind="lognormal", median=64, longest=longest)
    drawn = lengths.draw(np.random.default_rng(1), 1_000_000)
    assert drawn.max() <= longest
    assert lengths.mean() == pytest.approx(drawn.mean(), rel=0.005)


def test_the_mean_without_a_cut_is_the_textbooks():
    assert Lengths(kind="lognormal", median=64).mean() == pytest.approx(64 * np.exp(0.98979**2 / 2), rel=1e-4)


def test_constant_and_recorded_lengths_are_cut_too():
    rng = np.random.default_rng(0)
    assert Lengths(kind="constant", median=7, longest=5).draw(rng, 3).tolist() == [5, 5, 5]
    assert Lengths(kind="constant", median=7).mean() == 7
    assert Lengths(kind="lognormal", median=7, p99_over_p50=1).draw(rng, 2).tolist() == [7, 7]
    recorded = Lengths(kind="recorded", recorded=(1, 4, 100), longest=10)
    assert set(recorded.draw(rng, 200).tolist()) == {1, 4, 10}
    assert recorded.mean() == 5


def test_the_seed_of_a_request_decides_its_lengths():
    lengths = Lengths(kind="lognormal", median=64)
    first, again, other = (lengths.draw(request_rng(seed), 4).tolist() for seed in ((7, 1, 0), (7, 1, 0), (7, 2, 0)))
    assert first == again != other


@pytest.mark.parametrize(
    "text",
    ["[3, 5, 8]", "3\n5\n8\n", '{"length": 3}\n{"lengths": [5, 8]}\n', '{"lengths": [3, 5, 8]}'],
)
def test_a_file_of_lengths_has_one_of_some_forms(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    lengths = Lengths.parse(str(tmp_path / "lengths"), median=1)
    assert lengths.recorded == (3, 5, 8)


def test_the_texts_of_a_run_folder_are_measured_in_characters(tmp_path):
    rows = [{"completions": ["abc", ""]}, {"completions": ["abcde"]}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_lengths(tmp_path) == (3, 1, 5)


@pytest.mark.parametrize("text", ["", "[]", "[0]", "[true]", '["a"]', '{"x": 1}', "[NaN]", "null", "{"])
def test_what_holds_no_lengths_is_refused_with_what_is_expected(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ConfigError, match=r"expected a JSON list of numbers of 1 or more"):
        read_lengths(tmp_path / "lengths")
    with pytest.raises(ConfigError, match="write constant, lognormal, a file of lengths or a run folder"):
        Lengths.parse(str(tmp_path / "log-normal"), median=1)


@pytest.mark.parametrize("wrong", [{"median": 0}, {"longest": 0}, {"p99_over_p50": 0.5}, {"kind": "recorded"}])
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="1 or more"):
        Lengths(**({"kind": "lognormal", "median": 2.0} | wrong))
