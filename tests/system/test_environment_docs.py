"""The example of docs/environments.md, as it stands there: its files are written, checked and trained on."""

import re

import pytest

from learner.warmup.main import build_model, build_tokenizer, save
from tests.system.conftest import REPOSITORY, assert_sound, overrides, rows, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


@pytest.fixture
def example(tmp_path):
    """The folder of the example."""
    text = (REPOSITORY / "docs" / "environments.md").read_text()
    for name, kind in (("sums.py", "python"), ("sums.toml", "toml")):
        block = re.search(rf"`{name}`[^\n]*:\n\n```{kind}\n(.*?)```", text, re.DOTALL)
        (tmp_path / name).write_text(block[1])
    save(build_model(), build_tokenizer(), tmp_path / "model")
    return tmp_path


def test_the_example_of_the_documentation_runs(example):
    small = {
        "model.path": str(example / "model"),
        "steps": 2,
        "buffer.groups_per_step": 4,
        "eval.problems": 20,
        "log.wandb": False,
        "log.tensorboard": False,
    }
    done = run("run", str(example / "sums.toml"), *overrides(small), "--out", str(example / "run"), timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_sound(example / "run", bound=2, steps=2)
    assert all(row["metrics"]["unscored"] == 0 for row in rows(example / "run" / "evals.jsonl"))
