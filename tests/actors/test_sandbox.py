"""Verifiers and environments that go too far, in real child processes: each limit becomes a failure that names it."""

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.environments.pool import EnvironmentPool
from actors.rewards.pool import _SOURCES
from actors.verifiers.child import Source
from actors.verifiers.pool import VerifierPool
from async_rl.config import parse_config
from async_rl.sandbox import DEFAULT_MEMORY, Sandbox, limit_hit

ROOT = Path(__file__).parents[2]
MEMORY = 256 << 20
SMALL = Sandbox(memory_bytes=MEMORY, cpu_s=1.0)

USER_MODULE = """
import os, resource, signal, socket, sys, time
from actors.environments.base import Turn

def obey(order):
    what, _, value = order.partition(" ")
    if what == "allocate":
        return len(bytearray(int(value)))
    if what == "torch":  # what torch.empty(huge) raises
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    if what == "spin":
        end = time.process_time() + float(value)
        while time.process_time() < end:
            pass
    if what == "file":
        path, size = value.split()
        with open(path, "wb") as file:
            file.truncate(int(size))
    if what == "connect":
        host, port = value.split()
        socket.create_connection((host, int(port)), 5).close()
    if what == "wrapped":  # as requests does
        try:
            socket.create_connection(("192.0.2.1", 9), 5)
        except OSError:
            raise ValueError("the service does not answer")
    if what == "loopback":
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
    if what == "daemon":
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.closerange(0, 64)
            with open(value + ".part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(value + ".part", value)
            while True:
                pass
        os.wait()
    if what == "exit":
        os._exit(int(value))
    if what == "signal":
        os.kill(os.getpid(), int(value))
        time.sleep(5)
    if what == "has":
        return float(value in os.environ)
    if what == "core":
        return float(resource.getrlimit(resource.RLIMIT_CORE) == (0, 0))
    if what == "import":
        __import__(value)
    return 1.0

def verify(completions, **_):
    return [obey(completions[0])]

class World:
    async def reset(self, columns, seed):
        return "?"
    async def act(self, text):
        return Turn("", float(obey(text)), True)
    async def close(self):
        pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "greedy.py").write_text(USER_MODULE)
    return folder


def verifier(folder, sandbox, timeout_s=30.0):
    return VerifierPool(Source(function="greedy:verify", sandbox=sandbox), timeout_s, 1, folder)


def ask(pool, order):
    """One call; its verdict."""
    pool.submit(0, ["p"], [order], {})
    (verdict,) = pool.wait(40.0)
    return verdict


@pytest.fixture(scope="module")
def small(folder):
    pool = verifier(folder, SMALL)
    yield pool
    pool.close()


def can_cut():
    command = [sys.executable, "-m", "async_rl.sandbox"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=ROOT)
    return done.stdout.strip() == ""


needs_cut = pytest.mark.skipif(not can_cut(), reason="the network cannot be cut off here")


def test_too_much_memory_is_a_failure_that_names_the_setting_and_the_next_call_works(small):
    verdict = ask(small, f"allocate {2 * MEMORY}")
    assert (verdict.outcome, verdict.rewards) == ("memory_limit", None)
    assert verdict.detail.endswith(f"(it needs more memory than task.memory_bytes = {MEMORY} allows)")
    assert ask(small, f"allocate {MEMORY // 8}").rewards == [MEMORY // 8]
    assert ask(small, "torch").outcome == "memory_limit"


def test_a_loop_ends_by_its_cpu_time_and_the_failure_says_so(folder):
    pool = verifier(folder, SMALL)
    try:
        verdict = ask(pool, "spin 1000")
        assert verdict.outcome == "cpu_limit"
        assert (
            verdict.detail
            == "the verifier used more than 1 s of CPU time in one call (from task.timeout_s) and was killed"
        )
        assert ask(pool, "spin 0").outcome == "ok"  # a new child
    finally:
        pool.close()


def test_cpu_time_is_counted_anew_for_each_call(folder):
    pool = verifier(folder, SMALL)
    try:
        assert [ask(pool, "spin 0.8").outcome for _ in range(3)] == ["ok"] * 3  # 2.4 s in all, of at first 2
    finally:
        pool.close()


def test_what_escapes_into_a_session_of_its_own_ends_by_its_cpu_time(folder, tmp_path):
    pool = verifier(folder, SMALL)
    try:
        assert ask(pool, f"daemon {tmp_path / 'pid'}").outcome == "ok"
    finally:
        pool.close()
    deadline, file = time.monotonic() + 40, tmp_path / "pid"
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(file.read_text())
    while _runs(pid):
        assert time.monotonic() < deadline, "it loops for ever"
        time.sleep(0.05)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_file_beyond_the_limit_is_a_failure_that_names_the_setting(small, tmp_path):
    verdict = ask(small, f"file {tmp_path / 'big'} {2 * MEMORY}")
    assert verdict.outcome == "file_limit"
    assert f"task.memory_bytes = {MEMORY}" in verdict.detail
    assert ask(small, f"file {tmp_path / 'less'} 1000").outcome == "ok"


@needs_cut
def test_no_connection_leaves_a_verifier_and_the_failure_names_the_setting(small):
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        for order in (f"connect {host} {port}", "connect 192.0.2.1 9", "connect no.such.example 9", "wrapped"):
            verdict = ask(small, order)
            assert verdict.outcome == "no_network", verdict
            assert verdict.detail.endswith("task.network = true allows it)")
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    assert ask(small, "loopback").outcome == "ok"


def test_with_task_network_it_connects(folder):
    pool = verifier(folder, Sandbox(network=True))
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            host, port = server.getsockname()
            assert ask(pool, f"connect {host} {port}").outcome == "ok"
        assert ask(pool, f"connect {host} {port}").outcome == "error"  # refused: a fault, and no limit
    finally:
        pool.close()


def test_no_core_file_is_written(small):
    assert ask(small, "core").rewards == [1.0]


@pytest.mark.parametrize(("order", "how"), [("exit 3", "exit code 3"), ("signal 6", "SIGABRT")])
def test_how_a_verifier_died_is_told(small, order, how):
    verdict = ask(small, order)
    assert (verdict.outcome, verdict.detail) == ("died", f"the verifier ended its process ({how})")


def test_secrets_stay_out_of_the_environment_unless_named(folder, monkeypatch):
    secret = ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID_SECRET", "DB_PASSWORD", "TOKEN"]
    plain = ["TOKENIZERS_PARALLELISM", "ASYNC_RL_RUN", "MONKEY", "KEYBOARD", "MY_TOKENS"]
    for name in [*secret, *plain, "OPENAI_API_KEY"]:
        monkeypatch.setenv(name, "x")
    pool = verifier(folder, Sandbox(keep_env=("OPENAI_API_KEY",)))
    try:
        found = {name: ask(pool, f"has {name}").rewards[0] for name in [*secret, *plain, "OPENAI_API_KEY"]}
    finally:
        pool.close()
    assert found == dict.fromkeys(secret, 0.0) | dict.fromkeys([*plain, "OPENAI_API_KEY"], 1.0)


def test_our_own_sources_are_not_limited_and_the_users_is():
    task = {"timeout_s": 3.0, "memory_bytes": 1 << 30, "network": True, "keep_env": ["A_KEY"]}
    config = parse_config({"task": task})
    assert _SOURCES["verifier"](config, "m:f").sandbox == Sandbox(
        memory_bytes=1 << 30, network=True, keep_env=("A_KEY",), cpu_s=3.0 * len(os.sched_getaffinity(0))
    )
    judged = parse_config(
        {
            "reward": {
                "judge": 1.0,
                "judge_url": "http://127.0.0.1:1/v1",
                "judge_model": "m",
                "judge_prompt": "{completion}",
            }
        }
    )
    assert _SOURCES["judge"](judged, "m:f").sandbox is None  # it needs the network and its key
    assert _SOURCES["model"](judged, "m:f").sandbox is None  # it needs the memory of a model


def test_hosts_may_differ_in_the_limits():
    free = {"memory_bytes": 1 << 30, "network": True, "keep_env": ["A_KEY"]}
    assert parse_config({}).contract_hash() == parse_config({"task": free}).contract_hash()
    assert parse_config({}).task.memory_bytes == DEFAULT_MEMORY


@pytest.mark.parametrize(
    ("order", "outcome", "says"),
    [
        (f"allocate {2 * MEMORY}", "memory_limit", "task.memory_bytes"),
        ("spin 1000", "cpu_limit", "the environment used more than 1 s of CPU time"),
        pytest.param("connect 192.0.2.1 9", "no_network", "task.network", marks=needs_cut),
        ("exit 3", "died", "the environment ended its process (exit code 3)"),
    ],
)
def test_an_environment_has_the_same_limits(folder, order, outcome, says):
    pool = EnvironmentPool("greedy:World", 30.0, 1, folder, SMALL)
    try:
        episode = pool.open({}, 0)
        assert pool.wait(30.0)[0].outcome == "ok"
        pool.act(episode, order)
        (reply,) = pool.wait(30.0)
    finally:
        pool.close()
    assert reply.outcome == outcome
    assert says in reply.detail


@pytest.mark.real
def test_torch_fits_into_the_default(folder):
    pool = verifier(folder, Sandbox(), 60.0)
    try:
        assert ask(pool, "import torch").outcome == "ok"
    finally:
        pool.close()


def test_an_error_that_no_limit_caused_is_none():
    loop = ValueError("a")
    loop.__context__ = KeyError("b")
    loop.__context__.__context__ = loop  # a circle ends, too
    assert limit_hit(loop) is None
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY, (
        "this test needs a process without limit"
    )
    assert limit_hit(MemoryError()) is None
