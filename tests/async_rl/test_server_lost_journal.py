"""A journal that is lost, cut or not needed any more: where the server goes on, and what a learner hears of it."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from recovery_helpers import HEARTBEAT_S, closes, run_step, started
from server_helpers import config, lines
from service_helpers import Bench

from async_rl.buffer import journal
from async_rl.config import Config
from async_rl.errors import SchemaError


@pytest.fixture
def settings() -> Config:
    return config(steps=6, buffer={"heartbeat_s": HEARTBEAT_S})


@pytest.fixture
def bench(settings, tmp_path) -> Bench:
    return started(settings, tmp_path)


def test_without_a_journal_the_server_goes_on_from_the_newest_checkpoint_in_a_new_epoch(bench, tmp_path, capsys):
    run_step(bench, 0)
    save_checkpoint(bench, tmp_path, 1)
    for step in (1, 2):
        run_step(bench, step)
    tickets = bench.tickets("a", 1)
    bench.kill()
    shutil.rmtree(tmp_path / "journal")
    again = Bench(bench.settings, tmp_path, recover=True)
    assert "there is no journal" in capsys.readouterr().out
    assert (again.ledger.version, again.ledger.epoch) == (1, 1)
    ahead = again.join("learner", "l", group="g", step=4)
    assert (ahead["type"], ahead["code"]) == ("refused", "ahead")
    assert again.join("learner", "l", group="g", step=1)["code"] == "ahead", "it was at a step that is lost"
    again.join("actor", "a")
    assert again.live("a", 3) == []
    assert again.submit("a", tickets, versions=(3,))[0][2] in ("late", "refused")
    assert len(lines(tmp_path / "batches.jsonl")) == 3, "until a learner says where the run goes on"
    assert again.learner("second", step=1, epoch=1, pid=2)["epoch"] == 1
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0]
    again.live("a", 1, epoch=1)
    assert again.tickets("a", 2) != []
    assert closes(again.ledger)


def test_a_server_that_lost_its_journal_goes_on_from_the_checkpoint_that_was_just_being_written(bench, tmp_path):
    run_step(bench, 0)
    save_checkpoint(bench, tmp_path, 1)
    for step in (1, 2):
        run_step(bench, step)
    save_checkpoint(bench, tmp_path, 3, name=".step_3")
    bench.kill()
    shutil.rmtree(tmp_path / "journal")
    again = Bench(bench.settings, tmp_path, recover=True)
    assert again.ledger.version == 1
    assert again.join("learner", "l", group="g", step=3)["code"] == "ahead"
    assert again.service.newer is None, "the learner may yet die before the checkpoint has its name"
    (tmp_path / "checkpoints" / ".step_3").rename(tmp_path / "checkpoints" / "step_3")
    assert again.join("learner", "l", group="other", step=4, pid=2)["code"] == "ahead"
    assert again.service.newer is None, "it says so, but there is nothing"
    assert again.join("learner", "l", group="second", step=3, pid=2)["code"] == "ahead"
    assert again.service.newer == tmp_path / "checkpoints" / "step_3"
    again.service.close()
    last = Bench(bench.settings, tmp_path, recover=True)
    assert (last.ledger.version, last.ledger.epoch) == (3, 2)
    assert last.learner("third", step=3, epoch=2, pid=3)["next_step"] == 3
    assert [row["step"] for row in lines(tmp_path / "batches.jsonl")] == [0, 1, 2]
    assert closes(last.ledger)


def test_a_damaged_checkpoint_is_passed_over_when_the_journal_is_lost(bench, tmp_path, capsys):
    run_step(bench, 0)
    save_checkpoint(bench, tmp_path, 1)
    run_step(bench, 1)
    (save_checkpoint(bench, tmp_path, 2) / "ledger.json").write_text("{")
    bench.kill()
    shutil.rmtree(tmp_path / "journal")
    assert Bench(bench.settings, tmp_path, recover=True).ledger.version == 1
    assert "step_2 is passed over: " in capsys.readouterr().out


def test_a_checkpoint_of_another_version_of_this_package_is_not_passed_over_when_the_journal_is_lost(bench, tmp_path):
    run_step(bench, 0)
    save_checkpoint(bench, tmp_path, 1)
    run_step(bench, 1)
    (save_checkpoint(bench, tmp_path, 2) / "ledger.json").write_text(json.dumps({"schema": 4}))
    bench.kill()
    shutil.rmtree(tmp_path / "journal")
    with pytest.raises(SchemaError, match="schema 4, this version reads"):
        Bench(bench.settings, tmp_path, recover=True)


def test_a_learner_with_steps_that_the_journal_does_not_know_begins_again(bench, tmp_path):
    run_step(bench, 0)
    events = next((tmp_path / "journal").glob("events-*.bin"))
    size = events.stat().st_size
    run_step(bench, 1)
    bench.kill()
    os.truncate(events, size)
    again = Bench(bench.settings, tmp_path, recover=True)
    assert again.ledger.version == 1
    assert again.join("learner", "l", group="g", step=2)["code"] == "ahead", "the step that it was dealt last"
    assert again.learner("second", step=1, pid=2)["type"] == "welcome"


def save_checkpoint(bench, out, step, name=None):
    folder = out / "checkpoints" / (name or f"step_{step}")
    journal.save(journal.freeze(bench.ledger), folder)
    for other in ("trainer.json", "optimizer.safetensors", "hf/config.json"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text("{}")
    return folder


def test_a_fresh_start_removes_the_journal_of_an_earlier_run(bench, tmp_path):
    run_step(bench, 0)
    bench.kill()
    fresh = Bench(bench.settings, tmp_path)
    assert (fresh.ledger.version, fresh.ledger.issued) == (0, 0)
    fresh.kill()
    assert Bench(bench.settings, tmp_path, recover=True).ledger.issued == 0


def test_a_run_that_has_ended_leaves_no_journal(bench, tmp_path):
    bench.say("l", "fatal", reason="x")
    bench.say("l", "bye")
    bench.say("a", "bye")
    bench.tick(1.0)
    assert bench.service.ending.phase == "ended"
    bench.service.close()
    assert not (tmp_path / "journal").exists()
    assert json.loads((tmp_path / "books.json").read_text())["status"] == "failed"
