"""A short run of the fuzzing (scripts/fuzz.py) with hypothesis as the source of bytes, and the faults that it found."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
from buffer_helpers import answer, ledger, make
from hypothesis import HealthCheck, given, settings, strategies
from server_helpers import config, hello

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from fuzzing.choices import Choices  # noqa: E402
from fuzzing.targets import SHARES, TARGETS  # noqa: E402

from async_rl.buffer import event_log, journal  # noqa: E402
from async_rl.buffer.door import refusal  # noqa: E402
from async_rl.buffer.fields import numbers, slug  # noqa: E402
from async_rl.buffer.files import RunFiles  # noqa: E402
from async_rl.buffer.roster import Roster, Session  # noqa: E402
from async_rl.config import load_any, to_toml  # noqa: E402
from async_rl.errors import ConfigError, WireError  # noqa: E402
from async_rl.form import parse  # noqa: E402
from async_rl.report.page import render  # noqa: E402
from async_rl.report.svg import nice_ticks  # noqa: E402
from async_rl.runfolder import RunFolder  # noqa: E402
from async_rl.summary import summarize  # noqa: E402
from async_rl.wire import LIMITS, decode_groups, encode_groups, unpack_header  # noqa: E402

SLOW = ("service", "config: text", "run folder")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_comes_is_taken_or_refused_by_its_reason(target, tmp_path):
    run = target.make(tmp_path)

    @settings(
        max_examples=25 if target.name.startswith(SLOW) else 120,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategies.binary(max_size=400))
    def feed(data):
        run(Choices(data))

    feed()


def test_decisions_are_read_off_the_bytes_in_order_and_end_as_zero():
    choices = Choices(bytes([3, 1, 1, 200]))
    assert choices.below(10) == 3
    assert choices.below(300) == 257  # two bytes: 1 + 256
    assert choices.pick("abc") == "c"  # 200 mod 3
    assert choices.spent
    assert choices.below(10) == 0


def test_every_target_gets_its_share():
    assert set(SHARES) == {target.name for target in TARGETS}
    assert min(SHARES.values()) > 0


# ---------------------------------------------------------------- faults that were found


def test_a_header_of_empty_lists_is_refused_before_it_fills_the_memory():
    count = LIMITS.containers + 1
    header = b"\x82\xa4type\xa1x\xa1y\xdd" + struct.pack(">I", count) + b"\x90" * count
    with pytest.raises(WireError, match="too_many_containers"):
        unpack_header(header)
    assert unpack_header(msgpack.packb({"type": "x", "y": [[]] * 1000}))["y"] == [[]] * 1000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"meta": {"text": "x" * (2 << 20)}}, "meta_too_large"),
        ({"arrays": msgpack.packb([["tokens", "int32", [None]], ["tokens", "int32", [None]]])}, "bad_header"),
        ({"arrays": msgpack.packb([["n" * 201, "int32", [None]]])}, "bad_header"),
        ({"arrays": msgpack.packb([[f"n{i}", "int32", [None]] for i in range(65)])}, "too_many_arrays"),
    ],
)
def test_a_group_with_too_much_about_it_is_refused(change, reason):
    head, *frames = encode_groups("submit", [make(0)])
    header = unpack_header(head)
    header["groups"][0].update(change)
    with pytest.raises(WireError) as refused:
        decode_groups(header, [frames[0], frames[0]])
    assert refused.value.reason == reason


def test_a_mask_that_is_neither_0_nor_1_never_reaches_the_learner():
    books = ledger()
    ticket = books.issue("a", 0, 0.0)
    group = answer(ticket)
    mask = group.arrays["loss_mask"].copy()
    mask[mask == 0] = 2  # the learner trains on whatever is not 0: prompts, with log-probabilities that nobody checked
    spoilt = dict(group.arrays, loss_mask=mask)
    object.__setattr__(group, "arrays", spoilt)
    assert books.submit("a", group, 0.0).reason == "mask_contradicts_versions"


def test_a_token_group_with_an_array_more_than_the_others_have_is_refused():
    books = ledger()
    group = answer(books.issue("a", 0, 0.0))
    object.__setattr__(group, "arrays", {**group.arrays, "episode_x": np.zeros(3, np.float32)})
    assert books.submit("a", group, 0.0).reason == "unknown_array"


def test_names_that_come_and_go_are_not_kept_for_good():
    roster = Roster()
    fields = {"role": "actor", "rank": 0, "world": 1, "pid": 1, "host": "h", "heard": 0.0, "seq": 0}
    stays = Session(identity=b"stays", name="stays", **fields)
    roster.join(stays)
    for i in range(5000):
        session = Session(identity=b"%d" % i, name=f"n{i}", **fields)
        roster.join(session)
        roster.leave(session, "bye")
    assert roster.named("stays") is stays
    assert roster.last("n4999").gone == "bye"
    assert roster.last("n0") is None
    assert len(roster.to_plain()) < 600


def test_what_clients_count_stays_small():
    assert len(numbers({f"n{i}": 1.0 for i in range(10_000)})) == 512
    assert numbers({"a": float("inf"), "b" * 500: 1.0, "c": 1e299, "d": 2}) == {"d": 2.0}
    assert slug({"type": "fail", "reason": "a\nb"}, {}) == "a b"
    many = {f"r{i}": 1 for i in range(64)}
    assert slug({"type": "fail", "reason": "new"}, many) == "other"
    assert slug({"type": "fail", "reason": "r3"}, many) == "r3"


@pytest.mark.parametrize("field", ["host", "stage", "group"])
def test_a_hello_with_a_field_that_does_not_fit_into_a_log_is_refused(field):
    header = unpack_header(hello(config(), **{field: "x" * 201}))
    assert "200 printable characters" in refusal(header, config(), [])
    header = unpack_header(hello(config(), **{field: "a\x1b[2J"}))
    assert "200 printable characters" in refusal(header, config(), [])


def test_a_path_that_no_system_knows_lies_nowhere(tmp_path):
    files = RunFiles(tmp_path)
    assert files.inside("a\0b") is None
    files.close()


@pytest.mark.parametrize("text", ["steps = " + "9" * 5000, "steps = 0x" + "f" * 5000, "x = " + "[" * 5000])
def test_numbers_and_nesting_without_end_are_wrong_settings(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_any(str(path))
    with pytest.raises(ConfigError):
        load_any("arithmetic", [text.replace(" ", "").replace("x=", "steps=")])


def test_a_length_that_lies_is_not_believed(tmp_path):
    journal.save(journal.freeze(ledger()), tmp_path)
    (tmp_path / "groups.bin").write_bytes(struct.pack("<QQ", 1, 1 << 62))
    with pytest.raises(ConfigError, match="cut short"):
        journal.load(tmp_path)
    events = tmp_path / "events-0.bin"
    events.write_bytes(b"async_rl events\n" + struct.pack("<QII", (1 << 64) - 1, 1, 0))
    assert list(event_log._records([events])) == []  # cut off, as what a crash left
    assert events.stat().st_size == 16


def test_books_that_do_not_close_are_a_damaged_checkpoint(tmp_path):
    books = ledger()
    books.issue("a", 0, 0.0)
    frozen = journal.freeze(books)
    frozen.fields["issued"] = 7
    with pytest.raises(ConfigError, match="do not close"):
        journal.thaw(frozen, books.rules, lambda ordinal: 0)


def test_the_report_of_files_of_wrong_types_shows_what_is_sound(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(config()))
    (tmp_path / "books.json").write_text(
        json.dumps({"step": "x", "books": [1], "staleness": {"histogram": {"0": 5, "9" * 30: 1, "a": 2}}, "tokens": 3})
    )
    rows = [
        {"step": "no"},
        {"step": 1, "accuracy": "high", "reward/mean": 0.5, "time": 1.0},
        [1],
        {"step": 2, "x": 1e999},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n" + "[" * 5000)
    (tmp_path / "evals.jsonl").write_text('{"version": null}\n{"version": 3, "metrics": {"accuracy": 0.5, "r": []}}\n')
    (tmp_path / "timeline.jsonl").write_text('{"spans": [["a", 1, 2], ["a", 5, 4], 3]}\n{"name": 3, "spans": 3}\n')
    (tmp_path / "samples.jsonl").write_text('{"prompt": 3, "completions": [1, "two"], "rewards": [null, "x"]}\n')
    run = RunFolder(tmp_path)
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert run.metrics[0] == {"step": 1, "reward/mean": 0.5, "time": 1.0}
    assert run.evals == [{"version": 3, "metrics": {"accuracy": 0.5}}]
    assert run.timeline == [{"spans": [["a", 1.0, 2.0]]}]
    assert run.samples == [{"completions": ["", "two"], "rewards": [None, None]}]
    summary = summarize(run, None)
    assert summary["steps"] == 0
    assert summary["staleness"] == {"histogram": {"0": 5}}
    assert "two" in render(run)


def test_damaged_json_is_nothing():
    assert [parse(text) for text in ("", "{", "[" * 5000, "1" * 5000, b"\xff\xfe")] == [None] * 5
    assert parse('{"a": 1}') == {"a": 1}


def test_ticks_between_two_neighbouring_floats_are_one():
    assert nice_ticks(0.0, 5e-324) == [0.0]
