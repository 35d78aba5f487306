"""Slurm and Ray start the very commands that README and docs/operations.md tell to type under "Several hosts"."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from slurm_fakes import job_environment

from async_rl.launch.job import Job
from async_rl.launch.ray_tasks import RayTasks
from async_rl.launch.slurm import launch_scripts
from async_rl.launch.slurm_script import Component, SlurmOptions, slurm_script

ROOT = Path(__file__).parents[2]
CALLS = """\
#!/usr/bin/env bash
printf '%s\\n' "$(printf '%q ' "$@")" >>"$FAKE/calls"
[ "$3" = learner ] || exec sleep "${FAKE_NAP:-15}"
until [ "$(grep -c . "$FAKE/calls")" -ge "$FAKE_CALLS" ]; do sleep 0.05; done
"""
"""In place of Python: notes what is started, and ends with the run."""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Where the stand-in for Python is, and what it was called with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tmp_path / "bin"
    folder.mkdir()
    python = folder / "python"
    python.write_text(CALLS)
    python.chmod(0o755)

    def made():
        found = [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]
        (folder / "calls").unlink()
        return found

    return python, made


def typed(page):
    """The launch scripts' commands under "Several hosts"."""
    part = re.split(r"^#+ Several hosts$", (ROOT / page).read_text(), flags=re.MULTILINE)[1]
    part = re.split(r"^#+ ", part, flags=re.MULTILINE)[0].replace("\\\n", " ")
    return [shlex.split(line, comments=True)[1:] for line in re.findall(r"^    (\w+\$ +bash .*)$", part, re.MULTILINE)]


def meaning(words):
    """A command as what it says: its name, and its options by name, whatever the paths and addresses are.

    What the command line need not say is left out: keys are named by the configuration of a job, one engine is the
    default, and names are given so that the dead are told apart.
    """
    assert words[:2] == ["-m", "async_rl"]
    words = [re.sub(r"[\w.]+:\d+$", "ADDRESS", word) for word in words[2:]]
    words = [re.sub(r"^.*\.toml$", "CONFIG", word) for word in words]
    options = dict(zip(words[2::2], words[3::2], strict=False))
    if "--trusted-network" in words:  # it alone has no value
        words.remove("--trusted-network")
        options = {"--trusted-network": "", **dict(zip(words[2::2], words[3::2], strict=True))}
    for name in ("--keys", "--name"):
        options.pop(name, None)
    if options.get("--engines") == "1":
        del options["--engines"]
    return (*words[:2], *sorted((k, "DIR" if k == "--out" else v) for k, v in options.items()))


def by_hand(page, calls, tmp_path):
    """What the commands of a page start."""
    python, made = calls
    env = {**os.environ, "PYTHON": str(python), "FAKE": str(python.parent), "FAKE_CALLS": "0", "FAKE_NAP": "0"}
    found = []
    for words in typed(page):
        words[1] = str(ROOT / words[1])
        subprocess.run(words, env=env, cwd=tmp_path, timeout=30, check=True)
        found += map(meaning, made())
    return set(found)


def by_slurm(job, calls, learners):
    """What a job of so many learner nodes and two actor nodes starts."""
    python, made = calls
    options = SlurmOptions(learner=Component(nodes=learners), actor=Component(nodes=2))
    script = slurm_script(job, options, launch_scripts(), str(python))
    env = {**job_environment(python.parent, 4711), "FAKE_CALLS": str(learners + 2)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return set(map(meaning, made()))


def by_ray(job, learners):
    """What nodes run for as many learner hosts and an actor."""
    tasks = RayTasks(job, learners, "")
    first = tasks.learner(0, "").command
    words = [(*first[:-1], f"{first[-1]}10.0.0.1:5000")]
    words += [tasks.learner(index, "10.0.0.1:5000").command for index in range(1, learners)]
    words.append(tasks.worker("a", "actor", "10.0.0.1:5000").command)
    return {meaning(["-m", *command]) for command in words}


@pytest.mark.real
def test_nodes_run_the_commands_that_are_typed_by_hand(tmp_path, calls):
    job = Job.of("arithmetic", ["learner.ranks=2"], tmp_path / "run", None)
    job.make()
    job.write()
    one, two = by_ray(job, 1), by_ray(job, 2)
    assert len(one) == 2
    assert len(two) == 3
    assert by_slurm(job, calls, 1) == one
    assert by_slurm(job, calls, 2) == two
    assert by_hand("docs/operations.md", calls, tmp_path) == one | two
    readme = by_hand("README.md", calls, tmp_path)
    assert readme <= one | two
    assert one <= readme
