"""A run on a real Ray cluster of two nodes on this machine: placed, scaled, an actor killed, a node lost, resumed.

What is policy alone (who makes room, who is given up, how many actors) is in test_fleet.py and test_hunger.py.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.system.conftest import (
    assert_sound,
    books_of,
    command,
    environment,
    overrides,
    processes_of,
    steps_of,
    summary_of,
    wait_until,
)

pytest.importorskip("ray", reason="Ray is not installed: pip install 'async-rl[ray]'")
pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

NODE = """
import sys
from ray.cluster_utils import Cluster
quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
cluster = Cluster(initialize_head=True, connect=False, head_node_args={
    "num_cpus": 3, "include_dashboard": False, "object_store_memory": 100 << 20, "_system_config": quick})
second = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
print(cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "lose":
        cluster.remove_node(second, allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        print("lost", flush=True)
cluster.shutdown()
"""
"""Two nodes with room for the learner and an actor, and for one actor. The second is lost when it is told so, and
another one joins."""


class Cluster:
    """Two Ray nodes in processes of their own."""

    def __init__(self, log):
        self.temporary = tempfile.mkdtemp(prefix="ray")  # paths of sockets must be short
        env = environment() | {
            "RAY_TMPDIR": self.temporary,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(Path(__file__).parents[2])])
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
        )
        self.address = self.process.stdout.readline().strip()

    def replace_the_second(self):
        self.process.stdin.write("lose\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "lost"

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    log = tmp_path_factory.mktemp("ray") / "cluster.log"
    with log.open("w") as sink:
        cluster = Cluster(sink)
        try:
            if not cluster.address:
                pytest.skip(f"Ray does not start here: {log.read_text().strip().splitlines()[-1:]}")
            yield cluster
        finally:
            cluster.close()


PACED = """
import time
from pathlib import Path


def score(prompts, completions, **columns):
    if not Path({fast!r}).exists():
        time.sleep(0.5)
    return [sum(c.isdigit() for c in text[:6]) / 6 for text in completions]
"""
"""A verifier that is slow until a file is there: the test sets the pace."""


@pytest.fixture
def settings(small, tmp_path):
    (tmp_path / "paced_verifier.py").write_text(PACED.replace("{fast!r}", repr(str(tmp_path / "fast"))))
    return small | {
        "steps": 100_000,
        "buffer.heartbeat_s": 0.8,
        "eval.every": 0,
        "eval.problems": 1,
        "task.verifier": "paced_verifier:score",
        "actors.engine": "mock",
        "actors.mock_speed": 100_000,
        "actors.slots": 4,
    }


def launch(cluster, tmp_path, *arguments):
    log = tmp_path / "launch.log"
    return subprocess.Popen(
        command("launch", "--ray", "--address", cluster.address, *arguments),
        stdout=log.open("a"),
        stderr=subprocess.STDOUT,
        env=environment(),
        cwd=tmp_path,
    ), log


def commands_of(out):
    """Process ids of `async-rl learner` and `async-rl actor`, by `learner` or the actor's number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if words[1:3] == ["-m", "async_rl"] and str(out / "job" / "config.toml") in words:
                name = words[words.index("--name") + 1].rpartition("actor")[2] if "--name" in words else words[3]
                found[name] = int(entry.name)
    return found


def lives(out, index):
    """How many lives of an actor the server has met."""
    log = out / "logs" / "server.log"
    met = re.findall(rf"\.actor{index} \(actor\) joined, pid (\d+)", log.read_text()) if log.is_file() else []
    return len(set(met))


def node_of(pid):
    """The Ray node on which a command runs: the process that has started its keeper."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_run_is_scaled_by_hunger_and_outlives_an_actor_and_a_node(cluster, tmp_path, settings):
    out = tmp_path / "run"
    given = [*overrides(settings), "--min-actors", "1", "--max-actors", "2", "--out", str(out)]
    process, log = launch(cluster, tmp_path, "arithmetic", *given)

    try:
        wait_until(lambda: lives(out, 0), "the first actor", 90)
        wait_until(lambda: "actors: 1 ─► 2" in log.read_text(), "scaling up", 60)
        wait_until(lambda: lives(out, 1), "the second actor", 60)
        pids = commands_of(out)
        home = {name: node_of(pid) for name, pid in pids.items()}
        assert sorted(home) == ["0", "1", "learner"]
        (beside,) = [name for name in "01" if home[name] == home["learner"]]
        os.kill(pids[beside], signal.SIGKILL)  # the other one is lost with its node
        cluster.replace_the_second()
        wait_until(lambda: lives(out, 0) == 2 and lives(out, 1) == 2, "other lives of both", 90)
        told = log.read_text()
        assert "was ended by SIGKILL" in told
        assert "its Ray worker or node is gone" in told
        (tmp_path / "fast").touch()
        wait_until(lambda: "actors: 2 ─► 1" in log.read_text(), "scaling down", 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
    finally:
        process.kill()
        process.wait(10)
    assert summary_of(out)["status"] == "stopped"
    wait_until(lambda: not processes_of(out), "the end of all processes", 30)
    steps = steps_of(out) + 5
    process, log = launch(cluster, tmp_path, "--resume", str(out), "--set", f"steps={steps}")
    assert process.wait(90) == 0, log.read_text()
    assert_sound(out, bound=2, steps=steps)
    assert books_of(out)["status"] == "completed"


def test_what_finds_no_room_is_told_and_all_places_of_the_run_before_are_free(cluster, tmp_path, settings):
    given = [*overrides(settings), "--out", str(tmp_path / "run")]
    process, log = launch(cluster, tmp_path, "arithmetic", *given, "--learner-cpus", "64", "--place-s", "1")
    assert process.wait(60) == 1
    assert re.search(r"no place for learner \(64 CPU\) within 1 s: 2 nodes have 4 of 4 CPU", log.read_text())


def test_a_command_that_is_killed_leaves_nothing_on_the_nodes(cluster, tmp_path, settings):
    out = tmp_path / "run"
    process, _ = launch(cluster, tmp_path, "arithmetic", *overrides(settings), "--out", str(out))
    try:
        wait_until(lambda: any(" learner " in line for line in processes_of(out)), "the learner", 60)
    finally:
        process.kill()
        process.wait(10)
    wait_until(lambda: not processes_of(out), "the end of all processes", 30)
