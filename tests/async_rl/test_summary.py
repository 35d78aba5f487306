import json

import pytest
from run_folder import make_run

from async_rl.launch.interfaces import Outcome
from async_rl.report.trace import spans_by_process, trace_events, write_trace
from async_rl.report.usage import fractions, role_utilization, seconds_per_state, shares_over_time, without_pauses
from async_rl.runfolder import RunFolder, read_jsonl
from async_rl.summary import eval_values, summarize, throughput, write_summary
from async_rl.weights.pull import COUNTED

OUTCOME = Outcome(
    status="completed", reason="done", exit_code=0, wall_s=45.0, cpu_s={"server": 1.5, "learner": 30.0}, restarts={}
)


def test_the_summary_holds_what_the_contract_names(tmp_path):
    summary = write_summary(make_run(tmp_path), OUTCOME)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (summary["status"], summary["reason"], summary["steps"], summary["wall_s"]) == ("completed", "done", 3, 45.0)
    assert summary["eval"] == {
        "accuracy": 0.96,
        "reward": 0.97,
        "version": 3,
        "accuracy_start": 0.5,
        "reward_start": 0.55,
        "version_start": 0,
    }
    # steps 2 and 3: 400 + 200 tokens in 130 - 100 s; generated: 1500 / 1000 of that
    assert summary["throughput"] == {
        "trained_tokens_per_s": 20.0,
        "generated_tokens_per_s": 30.0,
        "env_steps_per_s": None,
    }
    # from the first training at 100 to the end of the last at 130: 20 of 30 s trained, 24 of 30 s generated
    assert summary["utilization"] == {"learner": pytest.approx(2 / 3), "actors": pytest.approx(0.8)}
    assert summary["states"] == {
        "learner": {"training": 0.6667, "waiting_data": 0.3333},
        "actors": {"generating": 0.8, "waiting_ticket": 0.2},
    }
    assert summary["bottleneck"].startswith("The learner waited 33% of its time for data and the actors 20%")
    assert summary["staleness"] == {"max": 2, "mean": 0.75, "bound": 2, "histogram": {"0": 500, "1": 250, "2": 250}}
    ledger = summary["ledger"]
    assert ledger["issued"] == sum(n for name, n in ledger.items() if name != "issued") == 10
    times = {"publish_s", "transfer_s", "commit_s", "pause_s", "pause_share"}
    assert set(summary["weights"]) == {"bytes", "versions", *times, *COUNTED}
    assert (summary["weights"]["relay_bytes"], summary["weights"]["delta_chunks"]) == (4_800_000, 2)
    assert summary["weights"]["pause_share"] == pytest.approx(0.02)  # 0.6 of the 30 s from 100 to 130
    assert set(summary["versions_of"]) == {"torch", "transformers", "vllm", "python", "async_rl"}
    assert summary["cpu_s"] == {"server": 1.5, "learner": 30.0}


def test_scorers_have_their_share_and_their_rate_where_there_are_any(tmp_path):
    make_run(tmp_path)
    assert "scorers" not in summarize(RunFolder(tmp_path), OUTCOME)["utilization"]
    assert summarize(RunFolder(tmp_path), OUTCOME)["stages"] == {}
    with (tmp_path / "timeline.jsonl").open("a") as lines:
        spans = [["starting", 90, 100], ["scoring", 100, 106], ["idle", 106, 130]]
        lines.write(json.dumps({"name": "reward0", "role": "scorer", "spans": spans}) + "\n")
    books = json.loads((tmp_path / "books.json").read_text())
    queue = {"annotated": 30, "seconds": 7.5, "failed": 1, "returned": 2, "waiting": 0, "leased": 0, "scorers": 1}
    books["stages"] = {"reward": queue, "reference": dict.fromkeys(queue, 0)}
    (tmp_path / "books.json").write_text(json.dumps(books))
    summary = summarize(RunFolder(tmp_path), OUTCOME)
    assert summary["utilization"]["scorers"] == pytest.approx(6 / 30)  # from 100 to 130
    assert summary["stages"]["reward"] == {"annotated": 30, "groups_per_s": 4.0, "failed": 1, "returned": 2}
    assert summary["stages"]["reference"]["groups_per_s"] is None


def test_a_run_that_never_got_anywhere_still_has_a_summary(tmp_path):
    failed = Outcome(status="failed", reason="no", exit_code=1, wall_s=1.0, cpu_s={}, restarts={})
    summary = write_summary(tmp_path, failed)
    assert (summary["status"], summary["steps"], summary["eval"], summary["ledger"]) == ("failed", 0, {}, {})
    assert summary["utilization"] == {"learner": None, "actors": None}
    assert summary["throughput"]["trained_tokens_per_s"] is None


def test_without_an_outcome_the_run_is_as_the_server_left_it(tmp_path):
    (make_run(tmp_path) / "books.json").unlink()
    assert summarize(RunFolder(tmp_path), None)["status"] == "running"


def test_one_evaluation_is_both_start_and_end_and_its_version_is_told():
    assert eval_values([{"version": 4, "metrics": {"accuracy": 0.7}}]) == {
        "accuracy": 0.7,
        "version": 4,
        "accuracy_start": 0.7,
        "version_start": 4,
    }


def test_one_step_has_no_rate():
    assert throughput([{"step": 0, "time": 1.0, "tokens/step": 5.0}], {}) == {
        "trained_tokens_per_s": None,
        "generated_tokens_per_s": None,
        "env_steps_per_s": None,
    }


def test_the_pause_between_two_sessions_is_no_time_of_work():
    rows = [
        {"step": step, "session": session, "time": time, "tokens/step": 10.0}
        for step, session, time in ((0, 0, 0.0), (1, 0, 2.0), (2, 2, 5000.0), (3, 2, 5003.0))
    ]
    # steps 1 and 3: 20 tokens in 2 + 3 seconds
    assert throughput(rows, {})["trained_tokens_per_s"] == 4.0


def test_spans_of_one_state_that_touch_are_joined_and_seconds_add_up():
    timeline = [
        {"name": "a", "role": "actor", "spans": [["generating", 0.0, 1.0], ["generating", 1.0, 3.0]]},
        {"name": "a", "role": "actor", "spans": [["generating", 3.0, 4.0], ["idle", 4.0, 5.0], ["idle", 6.0, 7.0]]},
    ]
    spans = spans_by_process(timeline)
    assert spans == {"a": [("generating", 0.0, 4.0), ("idle", 4.0, 5.0), ("idle", 6.0, 7.0)]}
    assert seconds_per_state(spans["a"]) == {"generating": 4.0, "idle": 2.0}
    assert fractions({"generating": 3.0, "idle": 1.0}) == {"generating": 0.75, "idle": 0.25}


def test_utilization_pools_the_processes_of_a_role_by_their_time():
    timeline = [
        {"name": "a", "role": "actor", "spans": [["generating", 0, 9], ["idle", 9, 10]]},
        {"name": "b", "role": "actor", "spans": [["waiting_ticket", 0, 30]]},
    ]
    assert role_utilization(timeline, "actor") == pytest.approx(9 / 40)
    assert role_utilization(timeline, "learner") is None


def test_utilization_counts_only_from_the_first_to_the_last_training():
    timeline = [
        {"name": "l", "role": "learner", "spans": [["waiting_data", 0, 10], ["training", 10, 20], ["idle", 20, 90]]},
        {"name": "a", "role": "actor", "spans": [["waiting_weights", 0, 8], ["generating", 8, 14], ["idle", 14, 90]]},
    ]
    assert role_utilization(timeline, "learner") == 1.0
    assert role_utilization(timeline, "actor") == pytest.approx(0.4)


def test_a_pause_in_which_nobody_lived_is_cut_out():
    spans = {"a": [("training", 0.0, 10.0), ("idle", 1000.0, 1010.0)], "b": [("generating", 2.0, 12.0)]}
    assert without_pauses(spans) == {
        "a": [("training", 0.0, 10.0), ("idle", 12.0, 22.0)],
        "b": [("generating", 2.0, 12.0)],
    }
    assert without_pauses({}) == {}


def test_shares_over_time_split_a_span_over_the_bins_that_it_covers():
    spans = {"a": [("training", 0.0, 5.0), ("idle", 5.0, 8.0)], "b": [("generating", 2.0, 4.0)]}
    shares, seconds = shares_over_time(spans, 2)  # bins [0, 4) and [4, 8)
    assert seconds == 8.0
    assert shares["a"] == [{"training": 1.0}, {"training": pytest.approx(0.25), "idle": pytest.approx(0.75)}]
    assert shares["b"] == [{"generating": 0.5}, {}]
    assert shares_over_time({}, 4) == ({}, 0.0)


def test_the_trace_has_a_named_track_per_process_in_microseconds_from_the_first_span(tmp_path):
    write_trace(make_run(tmp_path))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "actor0", 2: "learner0"}
    training = next(e for e in events if e["name"] == "training")
    assert (training["ph"], training["pid"], training["ts"], training["dur"]) == ("X", 2, 10e6, 15e6)
    assert trace_events([]) == []


def test_a_torn_line_is_left_out(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n[1]\n{"a": 2}\n{"a": ')
    assert read_jsonl(tmp_path / "x.jsonl") == [{"a": 1}, {"a": 2}]
    assert read_jsonl(tmp_path / "missing.jsonl") == []
