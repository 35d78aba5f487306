"""The benchmarks of transport and buffer, made small: all figures are there and plausible; never how fast."""

import json

import pytest

from async_rl.bench.buffer import buffer
from async_rl.bench.load_messages import BYTES_PER_TOKEN, Template, group_of
from async_rl.bench.transport import transport
from async_rl.errors import ConfigError
from async_rl.units import parse_bytes
from async_rl.wire import decode_groups, encode_groups, unpack_header


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("1KiB", 1024), ("1 MiB", 1 << 20), ("500MB", 500_000_000), ("2kB", 2000)]
)
def test_a_size_is_read_as_it_is_written(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5KiB", "KiB", "1 MiBs", "1i"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is no size"):
        parse_bytes(text)


def test_a_trajectory_has_the_bytes_that_were_asked_for():
    group = group_of(3, 1, 2, 5, size=4, nbytes=1024)
    assert len(group) == 4
    assert abs((group.nbytes - 4 * 4) / 4 - 1024) < BYTES_PER_TOKEN  # a reward of 4 bytes each
    assert group.oldest_version == 5


def test_a_template_answers_each_ticket_by_a_group_of_its_own():
    template = Template(2, 256)
    tickets = [[7, 0, 3, 2, 1, 9.0, 0], [8, 2, 4, 2, 1, 9.0, 0], [9, 0, 5, 2, 2, 9.0, 0]]
    head, *frames = encode_groups("submit", [template.group(ticket, "a") for ticket in tickets])
    for group, ticket in zip(decode_groups(unpack_header(head), frames), tickets, strict=True):
        assert [group.ordinal, group.attempt, group.task_index, len(group), group.oldest_version] == ticket[:5]


@pytest.mark.real
def test_the_benchmark_of_the_buffer_gives_all_its_figures(tmp_path):
    buffer(nbytes=256, actors=2, seconds=0.2, repeats=1, out=tmp_path / "b.json")
    figures = json.loads((tmp_path / "b.json").read_text())["figures"]
    assert [figure["unit"] for figure in figures] == 2 * ["trajectories/s", "trajectories/s", "µs CPU/trajectory", "ms"]
    assert all(0 < figure["median"] < 1e9 for figure in figures if figure["unit"] != "µs CPU/trajectory")
    assert [figure["bar"] for figure in figures] == 2 * [15_000.0, None, None, 5.0]


@pytest.mark.real
def test_the_benchmark_of_transport_gives_all_its_figures(tmp_path):
    transport(nbytes=1 << 16, count=4, repeats=1, out=tmp_path / "t.json")
    figures = json.loads((tmp_path / "t.json").read_text())["figures"]
    assert [figure["bar"] for figure in figures] == [0.8, None, None, None]
    assert all(0 < figure["median"] < 1000 and 0 < figure["ratio"] < 100 for figure in figures)
