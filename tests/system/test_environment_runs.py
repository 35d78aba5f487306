"""A multi-turn run, whole: real environments in child processes, and what ends up in the buffer."""

from itertools import groupby

import pytest
import torch

from async_rl.buffer.journal import load
from async_rl.tasks.calculator import compute
from learner.warmup.main import EOS, build_model, build_tokenizer, save, tools_lessons
from learner.warmup.supervision import Lesson, supervise
from tests.system.conftest import assert_sound, fresh_differences, overrides, rows, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def beginner(tmp_path_factory):
    """A model that has just begun to write calls to the calculator."""
    folder = tmp_path_factory.mktemp("models") / "beginner"
    torch.manual_seed(0)
    tokenizer, model = build_tokenizer(), build_model()
    lesson = next(lesson for lesson in tools_lessons(tokenizer) if lesson.name == "calculator")
    easy = Lesson(
        name="calculator", train=lesson.train, heldout=lesson.heldout, enough=0.02, too_much=0.9, batch=lesson.batch
    )
    supervise(model, [easy], lambda line: None)
    save(model, tokenizer, folder)
    return folder


def segments(trajectory):
    """(whether it was sampled, text) of each run of equal mask."""
    place = 0
    for sampled, run_of in groupby(trajectory.loss_mask.tolist()):
        length = len(list(run_of))
        tokens = trajectory.tokens[place : place + length].tolist()
        assert (trajectory.versions[place : place + length] >= 0).all() == bool(sampled)
        yield bool(sampled), "".join(chr(t) for t in tokens if t == EOS or t >= 4)  # as it is decoded
        place += length


def test_calculator_trains_and_only_what_the_tool_said_is_masked(tmp_path, small, beginner):
    out = tmp_path / "run"
    del small["task.verifier"]
    small |= {"model.path": str(beginner), "sampling.max_new_tokens": 12, "checkpoint.every": 1, "checkpoint.keep": 9}
    small |= {"actors.kv_cache": "recompute"}  # nothing of an older version is behind a token then
    done = run("run", "calculator", *overrides(small), "--out", str(out), timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_sound(out, bound=2, steps=4)
    assert max(fresh_differences(out)) < 1e-4  # actor and learner agree on sequences of several turns
    (start, *_) = rows(out / "evals.jsonl")
    assert 1 < start["metrics"]["turns"] <= 3
    assert any("[" in c and "\n" in c for row in rows(out / "samples.jsonl") for c in row["completions"])

    groups = [g for step in range(1, 5) for g in load(out / "checkpoints" / f"step_{step}").groups]
    calls = 0
    for trajectory in (t for group in groups for t in group.trajectories):
        (is_sampled, prompt), *parts = segments(trajectory)
        assert (is_sampled, prompt[-1]) == (False, "=")
        assert [sampled for sampled, _ in parts] == [i % 2 == 0 for i in range(len(parts))]
        assert parts[-1][0]  # nothing is kept after the last answer
        for (_, call), (_, result) in zip(parts[::2], parts[1::2], strict=False):
            assert call[-1] == chr(EOS)
            assert result == compute(call[:-1].strip()[1:-1])
            calls += 1
    assert calls > 10
