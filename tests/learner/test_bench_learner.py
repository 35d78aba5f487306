"""The learner's benchmark, small: both sides have equal gradients, and the figures are written."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from async_rl.bench.commands import app
from async_rl.config import parse_config
from async_rl.errors import AsyncRLError
from learner.bench import learner as bench
from learner.bench import sides
from learner.bench.batches import Case, read_groups, write_groups
from learner.bench.learner import compare
from learner.bench.padded import pad
from learner.bench.sides import make_pass
from learner.warmup.main import build_tokenizer


@pytest.fixture
def case(tmp_path, make_model):
    """A case with a model in memory."""

    class InMemory(Case):
        def make_model(self):
            return make_model()

    return InMemory(name="arithmetic", config=parse_config({}), folder=tmp_path, rows=5, checked=None)


def test_padded_rows_align_prompts_to_the_right_and_completions_to_the_left(make_groups):
    groups = make_groups(3, size=2)
    batch = pad(groups)
    trajectories = [t for g in groups for t in g.trajectories]
    sampled = [int(t.loss_mask.sum()) for t in trajectories]
    kept = batch.trained_BC.shape[1]
    assert kept == max(sampled)
    for row, trajectory in enumerate(trajectories):
        real = batch.mask_BL[row].bool()
        assert batch.inputs_BL[row][real].tolist() == trajectory.tokens.tolist()
        assert batch.trained_BC[row].sum() == sampled[row]
        assert batch.trained_BC[row, : sampled[row]].all()


def test_merged_and_padded_gradients_are_equal(case, make_groups):
    groups = make_groups(7, size=4)
    gradients = []
    for side in ("ours", "padded"):
        run, read = make_pass(side, case, case.make_model())
        run(groups)
        gradients.append({name: gradient.clone() for name, gradient in read().items()})
    ours, padded = gradients
    assert max(float(g.abs().max()) for g in padded.values()) > 1e-2
    for name, gradient in padded.items():
        assert torch.allclose(ours[name], gradient, atol=1e-5), name
    compare(ours, padded)


def test_different_gradients_are_no_comparison():
    with pytest.raises(AsyncRLError, match=r"the gradients differ by 0\.5"):
        compare({"w": torch.tensor([1.0])}, {"w": torch.tensor([1.5])})
    with pytest.raises(AsyncRLError, match="the gradients differ by nan"):
        compare({"w": torch.ones(1), "x": torch.tensor([torch.nan])}, {"w": torch.ones(1), "x": torch.ones(1)})


def test_a_batch_for_another_process_comes_back_as_it_was(tmp_path, make_groups):
    groups = make_groups(2)
    write_groups(tmp_path / "batch", groups)
    again = read_groups(tmp_path / "batch")
    assert [g.arrays["tokens"].tolist() for g in again] == [g.arrays["tokens"].tolist() for g in groups]
    assert [g.rewards.tolist() for g in again] == [g.rewards.tolist() for g in groups]


@pytest.fixture
def folder(tmp_path, make_model):
    """A saved model and tokenizer."""
    tokenizer, model = build_tokenizer(), make_model()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_speed_and_memory_of_both_sides_are_written(tmp_path, folder, monkeypatch):
    out = tmp_path / "figures.json"
    # the processes of their own that measure memory take seconds to start: what they run has a test below
    monkeypatch.setattr(bench, "peak_memory", lambda side, case, groups: {"ours": 3.0, "padded": 6.0}[side])
    options = ["--case", "arithmetic", "--model", str(folder), "--sequences", "12", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", ["learner", *options, "--out", str(out)])
    bench.main()
    document = json.loads(out.read_text())
    facts = document["arithmetic"]
    assert facts["sequences"] == 12
    assert 12 <= facts["trained_tokens"] <= 12 * 16
    assert facts["tokens"] <= facts["padded_tokens"]
    speed, clock, memory = document["figures"]
    assert [speed["bar"], clock["bar"], memory["bar"]] == [5, None, 0.6]
    assert memory["at_most"]
    for figure in document["figures"]:
        assert len(figure["values"]) == len(figure["baseline_values"]) == 1
        assert figure["median"] > 0
    assert memory["ratio"] == 0.5


def test_a_side_prints_the_memory_of_its_pass(tmp_path, folder, make_groups, monkeypatch, capsys):
    write_groups(tmp_path / "batch", make_groups(2))
    arguments = ["padded", "arithmetic", str(tmp_path / "batch"), "--model", str(folder)]
    monkeypatch.setattr("sys.argv", ["sides", *arguments])
    sides.main()
    # the kernel counts in batches of pages, and what this process has freed before may be enough
    assert -(1 << 20) < int(capsys.readouterr().out) < 1 << 28


def test_the_peak_counts_memory_that_is_given_back_again():
    """In a process of its own, as it is used: what the tests before have left may be given back meanwhile."""
    code = "import torch; from learner.bench.sides import peak_bytes as p; print(p(lambda: torch.ones(1 << 24).sum()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) == pytest.approx(64 << 20, rel=0.2)


def test_the_command_passes_on_the_options_that_are_given(monkeypatch):
    calls = []

    class Child:
        def __init__(self, command, **_):
            calls.append(command[1:])

        def wait(self, timeout):
            return 3

    monkeypatch.setattr("subprocess.Popen", Child)
    done = CliRunner().invoke(app, ["learner", "--case", "smollm2", "--sequences", "4"])
    assert done.exit_code == 3
    assert calls == [["-m", "learner.bench.learner", "--case", "smollm2", "--sequences", "4", "--repeats", "5"]]
