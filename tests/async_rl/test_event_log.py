from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from buffer_helpers import annotation, answer, rules

from async_rl.buffer import event_log
from async_rl.buffer.event_log import EventLog, read
from async_rl.buffer.journal import SCHEMA, Frozen, freeze
from async_rl.buffer.journaled import JournaledLedger, start
from async_rl.buffer.replay import recover
from async_rl.errors import ConfigError

NOTHING = Frozen({"schema": SCHEMA}, [])


def task_of(ordinal: int) -> int:
    return ordinal


@pytest.fixture
def books(tmp_path):
    ledger = JournaledLedger(rules(max_staleness=2), task_of)
    start(ledger, tmp_path / "journal")
    yield ledger
    ledger.detach(remove=False)


def back(folder: Path, now: float = 0.0) -> JournaledLedger:
    ledger = recover(folder, rules(max_staleness=2), task_of, None, now)
    ledger.detach(remove=False)
    return ledger


def some(ledger: JournaledLedger) -> None:
    """Two groups ready, one ticket open."""
    for _ in range(2):
        ticket = ledger.issue("a", ledger.version, 1.0)
        assert ticket is not None
        ledger.submit("a", answer(ticket), 2.0)
    ledger.issue("b", ledger.version, 3.0)


def test_what_is_appended_is_read_again_frame_by_frame(tmp_path):
    log = EventLog.open(tmp_path / "j")
    log.rotate(NOTHING)
    records = [[b"head"], [b"head", b"", b"x" * 5000, memoryview(bytes(70))], [b"h" * 100, b"y"]]
    for frames in records:
        log.append(frames)
    log.close(remove=False)
    base, found = read(tmp_path / "j")
    assert base.fields == NOTHING.fields
    assert [[bytes(f) for f in frames] for frames in found] == [[bytes(f) for f in frames] for frames in records]


def test_a_write_that_the_kernel_takes_in_pieces_is_whole(tmp_path, monkeypatch):
    writev = os.writev

    def reluctant(descriptor, buffers):
        return writev(descriptor, [memoryview(buffers[0])[:7]] if len(buffers[0]) else buffers)

    log = EventLog.open(tmp_path / "j")
    log.rotate(NOTHING)
    monkeypatch.setattr(os, "writev", reluctant)
    log.append([b"head", b"", b"x" * 50, b""])
    log.append([b"next"])
    log.close(remove=False)
    assert [[bytes(f) for f in r] for r in read(tmp_path / "j")[1]] == [[b"head", b"", b"x" * 50, b""], [b"next"]]


def test_a_batch_is_written_at_its_end_in_order_and_nothing_of_it_before(books, tmp_path, monkeypatch):
    file = tmp_path / "journal/events-0.bin"
    before, calls, writev = file.stat().st_size, [], os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: calls.append(1) or writev(descriptor, buffers))
    with books.batch():
        some(books)
        assert file.stat().st_size == before
        assert books.deliver() is not None
    assert len(calls) == 1
    again = back(tmp_path / "journal")
    assert (again.books(), again.next_step) == (books.books(), 1)


def test_a_batch_of_more_buffers_than_one_write_takes_is_whole(tmp_path):
    log = EventLog.open(tmp_path / "j")
    log.rotate(NOTHING)
    records = [[b"head", b"x" * (i % 7), b"%d" % i] for i in range(1000)]
    with log.batch():
        for frames in records:
            log.append(frames)
    log.close(remove=False)
    assert [[bytes(f) for f in frames] for frames in read(tmp_path / "j")[1]] == records


def test_a_base_that_is_begun_amid_a_batch_comes_after_what_waits(books, tmp_path):
    with books.batch():
        some(books)
        books.compact()
        books.issue("c", 0, 4.0)
    books._log.flush()
    assert [e.actor for e in back(tmp_path / "journal").open.values()] == ["b", "c"]


@pytest.mark.parametrize("always", [False, True])
def test_tickets_of_a_batch_are_on_record_in_their_place_whenever_a_new_base_is_begun(tmp_path, monkeypatch, always):
    """They are written with the event after them, when the ledger is beyond that already: no moment for a base."""
    monkeypatch.setattr(EventLog, "is_large", lambda log, held_bytes: always and not log._is_writing)
    books = JournaledLedger(rules(max_staleness=2), task_of)
    start(books, tmp_path / "journal")
    with books.batch():
        some(books)
        ticket = books.issue("c", 0, 4.0)
        assert ticket is not None
        books.submit("c", answer(ticket), 5.0)
        books._log.flush()  # the base before is complete: another one may begin
        assert books.issue("d", 0, 6.0) is not None
        assert books.deliver() is not None
        books._log.flush()
        assert books.issue("e", 0, 6.0) is not None
        books.train(0)
        assert books.issue("f", 1, 7.0) is not None
    wanted = freeze(books).fields
    books.detach(remove=False)
    again = recover(tmp_path / "journal", books.rules, task_of, None, 0.0)
    again.detach(remove=False)
    assert freeze(again).fields | {"open": []} == wanted | {"open": []}
    assert [entry.key for entry in again.open.values()] == [entry.key for entry in books.open.values()]


def test_tickets_are_on_record_though_a_new_base_that_has_them_is_never_completed(books, tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "_write_base", lambda *_: None)
    with books.batch():
        some(books)
        books.compact()
        books.issue("c", 0, 4.0)
    assert [e.actor for e in back(tmp_path / "journal").open.values()] == ["b", "c"]


def test_all_of_a_turn_is_on_record_at_its_end_when_answers_may_leave(books, tmp_path):
    with books.batch():
        some(books)
    before_answers = tmp_path / "copy"
    shutil.copytree(tmp_path / "journal", before_answers)  # the process is killed here
    again = back(before_answers)
    assert (again.issued, len(again.ready), len(again.open)) == (3, 2, 1)


def test_books_that_do_not_close_are_found_at_the_end_of_a_batch(books):
    def spoil():
        with books.batch():
            books.issued += 1
            books.issue("a", 0, 1.0)

    with pytest.raises(RuntimeError, match="do not close"):
        spoil()


def test_an_error_amid_a_batch_leaves_on_record_what_came_before_it(books, tmp_path):
    def fail():
        with books.batch():
            some(books)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert back(tmp_path / "journal").issued == 3


def test_a_ledger_that_is_fresh_restored_or_far_ahead_comes_back(books, tmp_path):
    some(books)
    books.note("phase", {"phase": "running"})
    books.note("phase", {"phase": "stopping"})
    books.deliver()
    again = back(tmp_path / "journal")
    assert (again.version, again.next_step, list(again.open), again.notes) == (
        0,
        1,
        [2],
        {"phase": {"phase": "stopping"}},
    )
    assert again.open[2].actor == "b"
    assert again.open[2].issued_at == 0.0  # the clock began anew: it is young
    assert back(tmp_path / "journal", 9.0).open[2].issued_at == 0.0  # as the recovery before has left it
    delivery = again.delivery(0)
    assert delivery is not None
    assert [g.ordinal for g in delivery.groups] == [0, 1]
    again.train(0)
    assert again.delivery(0) is None


def test_a_repeated_group_is_recognised_with_and_without_the_memory_of_answers(books, tmp_path):
    some(books)
    ticket = books.issue("a", 0, 4.0)
    assert ticket is not None
    books.lose("a")
    for compacted in (False, True):
        if compacted:
            books.compact()
            books._log.flush()
        again = back(shutil.copytree(tmp_path / "journal", tmp_path / str(compacted)))
        before = again.books()
        assert again.submit("a", answer(ticket), 5.0).outcome == "late"
        (first,) = [g for g in freeze(again).groups if g.ordinal == 0]
        assert again.submit("a", first, 5.0).outcome == "accepted"
        assert again.books() == before


def test_a_record_that_is_not_whole_is_cut_and_the_log_goes_on_behind_it(books, tmp_path):
    some(books)
    file = tmp_path / "journal/events-0.bin"
    before = file.stat().st_size
    books.issue("c", 0, 4.0)
    whole = file.read_bytes()
    for end in range(before, len(whole)):
        file.write_bytes(whole[:end])
        again = back(tmp_path / "journal")
        assert list(again.open) == [2]
        assert file.read_bytes()[:before] == whole[:before]
    again = recover(tmp_path / "journal", rules(max_staleness=2), task_of, None, 5.0)
    again.issue("d", 0, 6.0)
    again.detach(remove=False)
    assert [e.actor for e in back(tmp_path / "journal").open.values()] == ["b", "d"]


def test_any_other_damage_is_a_sentence(books, tmp_path):
    some(books)
    journal = tmp_path / "journal"
    file = journal / "events-0.bin"
    data = file.read_bytes()
    start_of_body = len(event_log._MAGIC) + event_log._HEAD.size
    for at in (3, len(event_log._MAGIC) + 8, len(event_log._MAGIC) + 12, start_of_body, start_of_body + 12):
        file.write_bytes(data[:at] + bytes([data[at] ^ 5]) + data[at + 1 :])
        with pytest.raises(ConfigError, match=r"damaged|not a journal"):
            back(journal)
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="given up on a full disk"):
        back(journal)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        back(journal)
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="does not fit"):
        recover(journal, rules(max_staleness=2, groups_per_step=1, steps=1), task_of, None, 0.0)
    (journal / "base-0/ledger.json").write_text("{")
    with pytest.raises(ConfigError, match=r"ledger\.json"):
        back(journal)
    with pytest.raises(ConfigError, match="there is no journal"):
        back(tmp_path / "none")


def test_a_new_base_replaces_the_old_pair_and_until_it_is_complete_both_files_of_events_count(books, tmp_path):
    some(books)
    journal = tmp_path / "journal"
    shutil.copytree(journal, tmp_path / "old")
    books.compact()
    books.issue("c", 0, 4.0)
    books._log.flush()
    assert sorted(p.name for p in journal.iterdir()) == ["base-1", "events-1.bin"]
    assert [e.actor for e in back(journal).open.values()] == ["b", "c"]
    # The server died before base-1 was complete.
    shutil.copy(journal / "events-1.bin", tmp_path / "old")
    (tmp_path / "old/base.tmp").mkdir()
    assert [e.actor for e in back(tmp_path / "old").open.values()] == ["b", "c"]
    os.truncate(tmp_path / "old/events-0.bin", (tmp_path / "old/events-0.bin").stat().st_size - 1)
    with pytest.raises(ConfigError, match="ends within a record"):
        back(tmp_path / "old")


def test_a_log_is_compacted_when_it_is_larger_than_what_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "LEAST_BYTES", 4000)
    ledger = JournaledLedger(rules(max_staleness=2, steps=1000), task_of)
    start(ledger, tmp_path)
    for step in range(60):
        while (ticket := ledger.issue("a", step, 0.0)) is not None:
            ledger.submit("a", answer(ticket), 0.0)
        assert ledger.deliver() is not None
        ledger.train(step)
    ledger._log.flush()
    assert not (tmp_path / "base-0").exists()
    assert not (tmp_path / "events-0.bin").exists()
    ledger.detach(remove=False)
    again = recover(tmp_path, ledger.rules, task_of, None, 0.0)
    assert again.books() == ledger.books()
    again.detach(remove=True)
    assert not tmp_path.exists()


@pytest.mark.parametrize("where", ["event", "base"])
def test_a_full_disk_switches_the_log_off_with_one_warning_and_a_checkpoint_tries_again(
    books, tmp_path, monkeypatch, capsys, where
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    some(books)
    journal = tmp_path / "journal"
    monkeypatch.setattr(*((os, "writev", full) if where == "event" else (event_log, "save", full)))
    if where == "base":
        books.compact()
        books._log.flush()
    for step in range(3):  # the run goes on
        while (ticket := books.issue("a", step, 0.0)) is not None:
            books.submit("a", answer(ticket), 0.0)
        books.lose("b")
        assert books.deliver() is not None
        books.train(step)
        books.compact()
        books._log.flush()
    assert capsys.readouterr().out.count("No space left on device") == 1
    with pytest.raises(ConfigError, match="there is no journal"):
        back(journal)
    monkeypatch.undo()
    books.compact()
    books._log.flush()
    books.issue("c", 3, 0.0)
    assert back(journal).books() == books.books()
    assert capsys.readouterr().out == ""


def test_a_stale_log_that_cannot_be_removed_cannot_be_recovered_either(books, tmp_path, monkeypatch, capsys):
    some(books)

    def refuse(*_, **__):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "writev", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    books.issue("c", 0, 4.0)
    books._log.flush()  # its thread removes, too
    monkeypatch.undo()
    assert "cannot be written" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="given up"):
        back(tmp_path / "journal")


def test_a_run_that_begins_removes_what_an_earlier_server_left(books, tmp_path):
    some(books)
    fresh = JournaledLedger(rules(max_staleness=2), task_of)
    start(fresh, tmp_path / "journal")
    fresh.detach(remove=False)
    assert back(tmp_path / "journal").issued == 0


@pytest.mark.parametrize("compacted", [False, True])
def test_a_delivered_step_comes_back_with_the_step_after_it_and_the_watchdog_s_recall_is_on_record(
    books, tmp_path, compacted
):
    some(books)
    books.deliver()
    books.watch(10.0, step_waits=True)
    assert books.watch(131.0, step_waits=True) is not None  # 120 s: ordinal 2 is taken from b
    if compacted:
        books.compact()
        books._log.flush()
    again = back(tmp_path / "journal", 200.0)
    assert (again.next_step, list(again.delivered), again.failed) == (1, [0], {"watchdog": 1})
    assert again.retry == [(2, 1, 2, 0)]
    again.train(0)


@pytest.mark.parametrize("compacted", [False, True])
def test_scorers_have_nothing_after_a_recovery_but_what_they_had_is_welcome(tmp_path, compacted):
    its_rules = rules(stages=("reward",))
    ledger = JournaledLedger(its_rules, task_of)
    start(ledger, tmp_path)
    for _ in range(2):
        ticket = ledger.issue("a", 0, 0.0)
        assert ticket is not None
        ledger.submit("a", answer(ticket), 0.0)
        ledger.lease("reward", "s", 1.0)
    if compacted:
        ledger.compact()
        ledger._log.flush()
    ledger.fail_stage("s", "reward", 1, 0, "broken", 2.0, final=False)
    ledger.detach(remove=False)
    again = recover(tmp_path, its_rules, task_of, None, 3.0)
    again.detach(remove=True)
    queue = again.scoring.queues["reward"]
    assert (queue.waiting, queue.leases["s"], queue.failed, queue.returned) == (2, 0, 1, 1)
    group = again.lease("reward", "t", 4.0)
    assert group is not None
    assert group.ordinal == 0
    assert again.annotate("s", annotation(group, "reward"), 5.0).outcome == "accepted"
    assert again.annotate("t", annotation(group, "reward"), 6.0).outcome == "late"
    assert list(again.ready) == [0]
