"""Snapshots of the server, and what a resumed one trains and keeps."""

from __future__ import annotations

import json

import pytest
from server_helpers import Cast, NoWeights, config, eventually, exit_code, lines, run_steps, running

from async_rl.buffer.records import Limits
from async_rl.buffer.server import Server
from async_rl.errors import ConfigError
from async_rl.runfolder import RunFolder


def test_a_snapshot_outside_the_run_folder_is_refused(cast, tmp_path):
    learner = cast.learner()
    header, _ = learner.request("snapshot", "snapshot", path=str(tmp_path.parent / "elsewhere"))
    assert header["ok"] is False
    assert "not inside" in header["detail"]
    assert not (tmp_path.parent / "elsewhere").exists()


def test_a_resumed_server_trains_each_ordinal_exactly_once(tmp_path):
    settings = config(steps=4)
    checkpoint = tmp_path / "checkpoints" / "step_2"
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, actor = cast.learner(), cast.actor(credit=100)
        run_steps(learner, actor, 0, 2)
        assert learner.request("snapshot", "snapshot", path=str(checkpoint))[0]["ok"]
        run_steps(learner, actor, 2, 3)  # trained after the checkpoint: lost with the crash
    with running(settings, tmp_path, checkpoint) as server, Cast(server, settings) as cast:
        learner, actor = cast.learner(start=2), cast.actor(credit=100, live=2)
        run_steps(learner, actor, 2, 4)
        learner.send("done")
        actor.until("stop")
        learner.close()
        actor.close()
        assert exit_code(server) == 0
    rows = lines(tmp_path / "batches.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert sorted(o for row in rows for o in row["ordinals"]) == list(range(8))
    assert json.loads((tmp_path / "books.json").read_text())["books"]["trained"] == 8


def test_a_resumed_server_keeps_all_lines_but_those_that_it_writes_again(tmp_path):
    settings = config(steps=4)
    checkpoint = tmp_path / "checkpoints" / "step_1"
    text = "one line\u2028to JSON, two\x85or three to Unicode"
    with running(settings, tmp_path) as server, Cast(server, settings) as cast:
        learner, actor, evaluator = cast.learner(), cast.actor(credit=100), cast.join("evaluator", "evaluator")
        for version in range(3):  # of the last one the resumed run makes other weights
            if version:
                run_steps(learner, actor, version - 1, version)
            evaluator.send("eval", version=version, metrics={"accuracy": 0.5}, samples=[{"completion": text}])
            if version == 1:
                assert learner.request("snapshot", "snapshot", path=str(checkpoint))[0]["ok"]
        eventually(lambda: len(server.service.account.evals) == 3)
        beats = len((tmp_path / "timeline.jsonl").read_text().split("\n")) - 1
    known = json.loads((checkpoint / "ledger.json").read_text())
    redone = [known["next_ordinal"], *(ordinal for ordinal, *_ in known["open"])]
    kept = [{"ordinal": 0, "prompt": text}]
    rows = [*kept, *({"ordinal": ordinal, "prompt": "lost with the crash"} for ordinal in redone)]
    with open(tmp_path / "samples.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with open(tmp_path / "timeline.jsonl", "a", encoding="utf-8") as file:
        file.write('{"name": "a", "sp')  # cut short by the crash
    Server(settings, tmp_path, Limits(num_tasks=16), NoWeights(), checkpoint).close()
    folder = RunFolder(tmp_path)
    assert folder.samples == kept
    evals = [json.loads(line) for line in (tmp_path / "evals.jsonl").read_text().split("\n") if line]
    assert [(row["version"], row["samples"]) for row in evals] == [(v, [{"completion": text}]) for v in (0, 1)]
    content = (tmp_path / "timeline.jsonl").read_text()
    assert content == "" or content.endswith("}\n")
    assert len(folder.timeline) >= beats


def test_a_checkpoint_that_is_not_there_is_a_sentence(settings, tmp_path):
    with pytest.raises(ConfigError, match="cannot resume"):
        Server(settings, tmp_path, Limits(num_tasks=4), NoWeights(), tmp_path / "none")
