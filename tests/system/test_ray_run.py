"""A run on a real Ray cluster of two nodes on this machine: placed, an actor killed, more and fewer actors."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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
import sys, time
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, connect=False, head_node_args={
    "num_cpus": 3, "include_dashboard": False, "object_store_memory": 100 << 20, "temp_dir": sys.argv[1]})
second = cluster.add_node(num_cpus=3, object_store_memory=100 << 20)
print(cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "lose":
        cluster.remove_node(second, allow_graceful=False)
        print("lost", flush=True)
cluster.shutdown()
"""
"""Two nodes; the second is lost when it is told so, everything ends with its standard input."""


class Cluster:
    """Two Ray nodes in processes of their own."""

    def __init__(self, log):
        self.temporary = tempfile.mkdtemp(prefix="ray-")  # paths of sockets must be short
        env = environment() | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(Path(__file__).parents[2])])
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE, self.temporary],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
        )
        self.address = self.process.stdout.readline().strip()

    def lose_the_second(self):
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
        assert cluster.address, log.read_text()
        yield cluster
        cluster.close()


PACED = """
import time
from pathlib import Path


def score(prompts, completions, **columns):
    if not Path({fast!r}).exists():
        time.sleep(1.0)
    return [sum(c.isdigit() for c in text[:6]) / 6 for text in completions]
"""
"""A verifier that is slow until a file is there: the test sets the pace."""


@pytest.fixture
def settings(small, tmp_path):
    (tmp_path / "paced_verifier.py").write_text(PACED.replace("{fast!r}", repr(str(tmp_path / "fast"))))
    return small | {
        "steps": 300,
        "buffer.heartbeat_s": 1.2,
        "eval.every": 0,
        "task.verifier": "paced_verifier:score",
        "actors.engine": "mock",
        "actors.mock_speed": 100_000,
        "actors.slots": 4,
    }


def launch(cluster, tmp_path, settings, *options):
    out, log = tmp_path / "run", tmp_path / "launch.log"
    given = [*overrides(settings), *options, "--out", str(out)]
    process = subprocess.Popen(
        command("launch", "arithmetic", "--ray", "--address", cluster.address, *given),
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env=environment(),
        cwd=tmp_path,
    )
    return process, out, log


def pids_of(out, name):
    """Processes that run `async-rl actor` for a name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if (
                words[1:4] == ["-m", "async_rl", "actor"]
                and name in words
                and str(out / "job" / "config.toml") in words
            ):
                found.append(int(entry.name))
    return found


def joined(out, name):
    """How many lives of an actor the server has met."""
    log = out / "logs" / "server.log"
    met = re.findall(rf"{re.escape(name)} \(actor\) joined, pid (\d+)", log.read_text()) if log.is_file() else []
    return len(set(met))


def test_a_run_is_placed_scaled_by_hunger_and_survives_the_death_of_an_actor(cluster, tmp_path, settings):
    process, out, log = launch(cluster, tmp_path, settings, "--min-actors", "1", "--max-actors", "2")
    try:
        wait_until(lambda: "actors: 1 ─► 2" in log.read_text(), "scaling up", 90)
        wait_until(lambda: joined(out, "run.actor1") == 1, "the second actor", 60)
        (pid,) = pids_of(out, "run.actor0")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: joined(out, "run.actor0") == 2, "another life", 60)
        (tmp_path / "fast").touch()
        wait_until(lambda: "actors: 2 ─► 1" in log.read_text(), "scaling down", 90)
        assert process.wait(90) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(10)
    assert "run.actor0: was ended by SIGKILL" in log.read_text()
    assert_sound(out, bound=2, steps=300)
    assert free_cpus(cluster) == 6


def test_what_finds_no_room_is_told_in_time(cluster, tmp_path, settings):
    process, out, log = launch(cluster, tmp_path, settings, "--learner-cpus", "64", "--place-s", "1")
    assert process.wait(60) == 1
    assert "no place for learner (64 CPU) within 1 s: 2 nodes have 6 of 6 CPU" in log.read_text()
    wait_until(lambda: not processes_of(out), "the end of all processes")


def test_without_a_cluster_the_command_says_so(tmp_path, settings):
    done = subprocess.run(
        command("launch", "arithmetic", "--ray", "--address", "127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert done.returncode == 1
    assert "no Ray cluster at 127.0.0.1:9: Connection refused" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_lost_node_is_outlived_and_the_run_stopped_and_resumed(cluster, tmp_path, settings):
    """The second node does not come back: what follows has one."""
    (tmp_path / "fast").touch()
    settings["steps"] = 3000
    process, out, log = launch(cluster, tmp_path, settings, "--min-actors", "3")
    try:
        names = [f"run.actor{i}" for i in range(3)]
        wait_until(lambda: all(joined(out, name) for name in names), "three actors", 90)
        cluster.lose_the_second()
        wait_until(lambda: "its Ray worker or node is gone" in log.read_text(), "the loss", 60)
        before = steps_of(out)
        wait_until(lambda: steps_of(out) > before + 5, "further steps", 120)
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130, log.read_text()
    finally:
        process.kill()
        process.wait(10)
    assert summary_of(out)["status"] == "stopped"
    wait_until(lambda: not processes_of(out), "the end of all processes")
    given = ["--address", cluster.address, "--resume", str(out), "--set", f"steps={books_of(out)['step'] + 5}"]
    done = subprocess.run(
        command("launch", "--ray", *given),
        stdout=log.open("a"),
        timeout=90,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, log.read_text()
    assert summary_of(out)["status"] == "completed"


def test_a_command_that_is_killed_leaves_nothing_on_the_nodes(cluster, tmp_path, settings):
    (tmp_path / "fast").touch()
    process, out, _ = launch(cluster, tmp_path, settings)
    try:
        wait_until(lambda: steps_of(out) > 1, "some steps")
        assert processes_of(out)
    finally:
        process.kill()
        process.wait(10)
    wait_until(lambda: not processes_of(out), "the end of all processes", 30)


def free_cpus(cluster):
    """CPUs that no placement group holds, once Ray has counted them."""
    code = (
        "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR');"
        "print(ray.available_resources().get('CPU', 0))"
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done = subprocess.run(
            [sys.executable, "-c", code, cluster.address], capture_output=True, text=True, timeout=60, check=True
        )
        if float(done.stdout.split()[-1]) == 6:
            break
    return float(done.stdout.split()[-1])
