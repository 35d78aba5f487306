"""The commands that a Ray cluster runs are those by hand, and a keeper runs them: no Ray is needed to see that."""

import os
import socket
import sys
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.launch.fleet_rules import FleetRules
from async_rl.launch.job import Job
from async_rl.launch.places import Ended, Task
from async_rl.launch.ray_keeper import Keeper
from async_rl.launch.ray_run import worker_prefix
from async_rl.launch.ray_tasks import RayTasks


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job.of("arithmetic", ["steps=3", "learner.ranks=4"], tmp_path / "run", None)
    job.make()
    job.write()
    return job


def test_the_learner_is_started_and_later_resumed_by_the_commands_by_hand(job):
    tasks = RayTasks(job, 1, "/mine")
    first = tasks.learner(0, "")
    config = str(job.out / "job" / "config.toml")
    listens = ("--set", "buffer.bind=tcp://")
    assert first.command == ("async_rl", "learner", config, "--out", str(job.out), *listens)
    assert (first.listens, first.port) == (True, 0)
    assert first.env["PYTHONPATH"] == f"{job.search}{os.pathsep}/mine"
    (job.out / "config.toml").touch()  # the learner's own, so it has begun
    again = tasks.learner(0, "node:5000")
    assert again.command == ("async_rl", "learner", config, "--resume", str(job.out), *listens)
    assert again.port == 5000
    assert tasks.learner(0, "[fd00::1]:5001").port == 5001


def test_learner_hosts_meet_at_the_first(job):
    tasks = RayTasks(job, 2, "")
    first, second = tasks.learner(0, ""), tasks.learner(1, "node:5000")
    group = ("--trusted-network", "--nnodes", "2", "--node-rank")
    assert first.command[5:] == (*group, "0", "--rendezvous", "")
    assert first.listens
    assert second.command[5:] == (*group, "1", "--rendezvous", "node:5000")
    assert not second.listens
    assert tasks.learner(0, "node:5000").command == first.command, "it may come back elsewhere"


def test_actors_and_scorers_are_told_whom_they_serve(job):
    tasks = RayTasks(job, 1, "")
    config = str(job.out / "job" / "config.toml")
    serves = (config, "--connect", "tcp://node:5000")
    assert tasks.worker("a", "actor", "node:5000").command == ("async_rl", "actor", *serves, "--name", "a")
    scorer = tasks.worker("b", "reward", "node:5000")
    assert scorer.command == ("async_rl", "actor", *serves, "--role", "reward", "--name", "b")
    assert scorer.log == job.out / "job" / "b.log"


def test_workers_of_two_runs_never_share_a_name():
    first, second = worker_prefix(Path("/a/run")), worker_prefix(Path("/b/run"))
    assert first != second
    assert first == worker_prefix(Path("/a/run"))
    assert first.startswith("run-")


def rules(job, **wishes):
    given = {"least": 2, "most": 5, "learners": 1, "learner": {"CPU": 5.0, "GPU": 0.0}, "place_s": 60.0}
    return FleetRules.of(job, **(given | {"worker": {"CPU": 1.0, "GPU": 0.0}} | wishes))


def test_what_is_not_asked_for_is_no_part_of_a_bundle(job):
    found = rules(job, learner={"CPU": 3.0, "GPU": 4.0})
    assert (found.learner, found.worker) == ({"CPU": 3.0, "GPU": 4.0}, {"CPU": 1.0})
    assert job.learner_cpus(2) == 3, "two of four ranks, and one for server and evaluation"


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"least": 3, "most": 2}, "--max-actors 2 is below --min-actors 3"),
        ({"learner": {"CPU": 1.0, "GPU": 1.0}, "learners": 2}, r"learner.ranks = 4 on 2 nodes with 1 GPUs each"),
        ({"worker": {"CPU": 1.0, "GPU": 2.0}}, "--actor-gpus 2: .* ask for more actors"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(job, wishes, message):
    with pytest.raises(ConfigError, match=message):
        rules(job, **wishes)


def test_a_run_on_gpus_asks_for_some(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job.of("arithmetic", ["model.device=cuda"], tmp_path / "run", None)
    with pytest.raises(ConfigError, match="--learner-gpus and --actor-gpus"):
        rules(job)


def test_learner_hosts_need_ranks_to_share_and_somebody_who_vouches(job):
    job.check_learners(2, trusted=True)
    with pytest.raises(ConfigError, match="cannot be split over 3"):
        job.check_learners(3, trusted=True)
    with pytest.raises(ConfigError, match="--trusted-network"):
        job.check_learners(2, trusted=False)


# ---------------------------------------------------------------- the keeper


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Makes keepers of a module that is found by its path alone."""
    monkeypatch.chdir(tmp_path)  # a keeper moves there, too

    def make(code, **fields):
        (tmp_path / "kept.py").write_text(code)
        given = {"command": ("kept",), "log": tmp_path / "log", "work": tmp_path, "needs": ()} | fields
        return Keeper(Task(name="kept", env={"PYTHONPATH": str(tmp_path)}, **given), "127.0.0.1")

    return make


def test_a_command_is_told_an_address_of_its_node(keep, tmp_path):
    keeper = keep("import sys; print(sys.argv[1:])", command=("kept", "--listen="), listens=True)
    started = keeper.start()
    host, port = started.address.split(":")
    assert host == "127.0.0.1"
    ended = keeper.look(20.0)
    assert isinstance(ended, Ended)
    assert ended.exit_code == 0
    assert (tmp_path / "log").read_text().strip() == f"['--listen=127.0.0.1:{port}']"


def test_it_gets_the_port_that_it_had_unless_somebody_has_taken_it(keep):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        wish = other.getsockname()[1]
        other.listen()
        taken = keep("", command=("kept", "--listen="), listens=True, port=wish).start()
        assert taken.address != f"127.0.0.1:{wish}"
    assert keep("", command=("kept", "--listen="), listens=True, port=wish).start().address == f"127.0.0.1:{wish}"


def test_the_end_of_a_command_comes_with_its_words(keep):
    keeper = keep("import sys\nprint('async-rl: no such model', file=sys.stderr)\nsys.exit(2)\n")
    keeper.start()
    ended = keeper.look(20.0)
    assert (ended.exit_code, ended.sentence) == (2, "no such model")
    assert ended.told.startswith("ended with exit code 2 on 127.0.0.1\nlast lines of")


def test_a_command_that_is_asked_to_end_ends_as_by_hand(keep):
    keeper = keep(
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('up', flush=True)\nsignal.pause()\n"
    )
    keeper.start()
    assert keeper.look(0.05) is None
    wait_for_text(keeper, "up")
    keeper.stop()
    assert keeper.look(20.0).exit_code == 143


def wait_for_text(keeper, text):
    for _ in range(200):
        if text in Path("log").read_text():
            return
        assert keeper.look(0.05) is None
    raise AssertionError(f"{text!r} was never written")


def test_a_node_without_the_shared_files_says_which(keep, tmp_path):
    with pytest.raises(ConfigError, match=r"absent is not there on node .* file system that all nodes share"):
        keep("", needs=(tmp_path / "absent",)).start()


def test_the_commands_run_in_the_nodes_own_python(keep, tmp_path):
    keeper = keep("import sys; print(sys.executable)")
    keeper.start()
    assert keeper.look(20.0).exit_code == 0
    assert (tmp_path / "log").read_text().strip() == sys.executable
