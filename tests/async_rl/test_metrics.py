import json

import pytest

from async_rl import metrics
from async_rl.config import parse_config
from async_rl.metrics import MetricsWriter


def quiet(**log):
    return parse_config({"log": {"wandb": False, "tensorboard": False} | log})


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_on_disk_before_the_writer_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path, quiet())
    writer.write(0, {"reward/mean": 0.5})
    assert [(r["step"], r["reward/mean"]) for r in rows(tmp_path)] == [(0, 0.5)]
    assert rows(tmp_path)[0]["time"] > 1.7e9
    writer.close()


def test_numbers_that_are_not_finite_become_null_so_that_the_file_stays_json(tmp_path):
    writer = MetricsWriter(tmp_path, quiet())
    writer.write(3, {"a": float("nan"), "b": float("inf"), "c": 1})
    writer.close()
    row = rows(tmp_path)[0]
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)


def test_what_could_not_be_measured_is_null_in_the_file_and_reaches_no_other_sink(tmp_path, monkeypatch):
    seen = []

    class Spy:
        def __init__(self, *_):
            pass

        def write(self, step, metrics):
            seen.append(dict(metrics))

        def close(self):
            pass

    monkeypatch.setattr("async_rl.metrics._TensorBoard", Spy)
    writer = MetricsWriter(tmp_path, parse_config({"log": {"wandb": False, "tensorboard": True}}))
    writer.write(0, {"logp_diff/age0": None, "x": 1.0})
    writer.close()
    assert (rows(tmp_path)[0]["logp_diff/age0"], rows(tmp_path)[0]["x"]) == (None, 1.0)
    assert seen == [{"x": 1.0}]


def test_a_resumed_run_drops_the_steps_that_it_trains_again_and_a_torn_line(tmp_path):
    first = MetricsWriter(tmp_path, quiet())
    for step in range(5):
        first.write(step, {"x": float(step)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')  # the crash
    second = MetricsWriter(tmp_path, quiet(), start_step=3)
    second.write(3, {"x": 30.0})
    second.close()
    assert [(r["step"], r["x"]) for r in rows(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert [r["session"] for r in rows(tmp_path)] == [0, 0, 0, 3]


def test_a_sink_that_fails_is_switched_off_with_one_warning_and_the_file_goes_on(tmp_path, monkeypatch, capsys):
    calls = []

    class Broken:
        def __init__(self, *_):
            pass

        def write(self, step, metrics):
            calls.append(step)
            raise OSError("disk full")

        def close(self):
            calls.append("close")

    monkeypatch.setattr(metrics, "_TensorBoard", Broken)
    writer = MetricsWriter(tmp_path, quiet(tensorboard=True))
    for step in range(3):
        writer.write(step, {"x": 1.0})
    writer.close()
    assert calls == [0]
    assert len(rows(tmp_path)) == 3
    assert capsys.readouterr().err.count("TensorBoard is off") == 1


def test_a_sink_that_blocks_does_not_block_the_run(tmp_path, monkeypatch, capsys):
    import threading

    release = threading.Event()

    class Stuck:
        def __init__(self, *_):
            release.wait(10)

        def write(self, step, metrics):
            raise AssertionError("never reached")

        def close(self):
            raise AssertionError("never reached")

    monkeypatch.setattr(metrics, "_Wandb", Stuck)
    monkeypatch.setattr(metrics, "_CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(metrics, "_QUEUE_LINES", 2)
    writer = MetricsWriter(tmp_path, quiet(wandb=True))
    for step in range(5):
        writer.write(step, {"x": 1.0})
    writer.close()
    assert len(rows(tmp_path)) == 5
    assert "5 lines dropped" in capsys.readouterr().err
    release.set()


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
def test_real_wandb_and_tensorboard_write_into_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    writer = MetricsWriter(tmp_path, parse_config({}))
    for step in range(3):
        writer.write(step, {"reward/mean": step / 2})
    writer.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
