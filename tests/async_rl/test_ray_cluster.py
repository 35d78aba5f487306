"""One life in a place that Ray found: answers, silences and losses by hand; Ray itself is played by a stand-in."""

import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch import ray_cluster
from async_rl.launch.places import Lost, Started, Task
from async_rl.launch.ray_cluster import CALL_S, HEAD_S, START_S, RayCluster, connect

TASK = Task(name="a", command=("x",), log=Path("log"), work=Path("/"), needs=())
STARTED = Started(pid=1, host="n1", address="")


class Unavailable(Exception):
    """Stands for Ray's errors."""


class FakeRay:
    """Plays the modules of Ray: one place, one keeper, whose next answer the test gives."""

    def __init__(self, monkeypatch, head):
        self.is_free, self.answer, self.calls = True, None, []
        self.head = head
        keeper = SimpleNamespace(**{name: self._method(name) for name in ("start", "look", "stop")})
        kind = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *given: keeper))
        errors = {"RayError": Unavailable, "ActorUnavailableError": Unavailable}
        self._put(
            monkeypatch,
            "ray",
            wait=lambda refs, timeout: (refs, []) if self.answer is not None else ([], refs),
            get=self._get,
            nodes=lambda: [{"NodeID": "1", "NodeManagerAddress": "n1", "Alive": True}],
            remote=lambda what: kind,
            kill=lambda keeper: self.calls.append("kill"),
        )
        self._put(monkeypatch, "ray.exceptions", **errors)
        self._put(monkeypatch, "ray.util")
        self._put(
            monkeypatch,
            "ray.util.placement_group",
            placement_group=lambda bundles, **options: "group",
            placement_group_table=self._table,
            remove_placement_group=lambda group: self.calls.append("remove"),
        )
        self._put(
            monkeypatch, "ray.util.scheduling_strategies", PlacementGroupSchedulingStrategy=lambda *given, **named: None
        )
        self.now = 0.0
        monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: self.now)

    def _put(self, monkeypatch, name, **fields):
        module = ModuleType(name)
        vars(module).update(fields)
        monkeypatch.setitem(sys.modules, name, module)

    def _method(self, name):
        return SimpleNamespace(remote=lambda *given: self.calls.append(name))

    def _get(self, ref, timeout):
        answer, self.answer = self.answer, None
        if isinstance(answer, Exception):
            raise answer
        return None if answer == "nothing" else answer

    def _table(self, group):
        return {"state": "CREATED" if self.is_free else "PENDING", "bundles_to_node_id": {0: "1"}}


@pytest.fixture
def ray(monkeypatch):
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        yield FakeRay(monkeypatch, f"127.0.0.1:{head.getsockname()[1]}")


def life_of(ray, cluster=None):
    return (cluster or RayCluster(ray.head)).begin(TASK, {"CPU": 1.0})


def running(ray):
    life = life_of(ray)
    life.poll()
    ray.answer = STARTED
    assert life.poll() == STARTED
    return life


def test_a_life_waits_for_its_place_then_starts_and_is_looked_at(ray):
    ray.is_free = False
    life = life_of(ray)
    assert life.poll() is None
    assert ray.calls == []
    ray.is_free = True
    assert life.poll() is None
    assert ray.calls == ["start"]
    assert not life.is_placed
    ray.answer = STARTED
    assert life.poll() == STARTED
    assert life.is_placed
    ray.answer = "nothing"
    assert life.poll() is None
    assert ray.calls == ["start", "look", "look"]
    life.remove()
    assert ray.calls[-2:] == ["kill", "remove"]


def test_a_keeper_that_never_starts_its_command_is_lost(ray):
    life = life_of(ray)
    life.poll()
    ray.now = START_S - 1
    assert life.poll() is None
    ray.now = START_S
    assert life.poll() == Lost(
        told="its keeper has not answered for 90 s: the node, or a file system there, hangs", hopeless=False
    )


def test_a_keeper_that_hangs_later_is_lost_sooner(ray):
    life = running(ray)
    ray.now = CALL_S
    assert life.poll() is None
    ray.now = CALL_S + 2
    assert "has not answered for 31 s" in life.poll().told


def test_a_keeper_that_cannot_be_reached_is_asked_again_for_a_while(ray):
    life = running(ray)
    ray.answer = Unavailable("away")
    assert life.poll() is None
    ray.answer = "nothing"  # it is back
    assert life.poll() is None
    for ray.now in (100.0, 100.0 + CALL_S - 1):
        ray.answer = Unavailable("away")
        assert life.poll() is None
    ray.now, ray.answer = 100.0 + CALL_S, Unavailable("away\nfor long")
    assert life.poll() == Lost(told="its Ray worker or node is gone (away)", hopeless=False)


def test_a_node_without_our_package_or_files_is_hopeless(ray):
    life = life_of(ray)
    life.poll()
    ray.answer = Unavailable("The actor died\nModuleNotFoundError: No module named 'async_rl'")
    lost = life.poll()
    assert lost.hopeless
    assert "No module named 'async_rl'" in lost.told
    error = Unavailable("a long report of Ray's own")
    error.cause = ConfigError("run folder and working directory must lie on a file system that all nodes share")
    life = life_of(ray)
    life.poll()
    ray.answer = error
    assert life.poll() == Lost(told=str(error.cause), hopeless=True)


def test_a_head_that_is_gone_is_told_before_ray_ends_us(ray):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        cluster = RayCluster(f"127.0.0.1:{other.getsockname()[1]}")
        life = life_of(ray, cluster)
        ray.now = 10.0
        cluster.check()
    for ray.now in (20.0, 25.0, 20.0 + HEAD_S):
        cluster.check()
    assert life.poll() is None
    assert cluster.room().startswith("its head at 127.0.0.1:")
    ray.now = 20.0 + HEAD_S + 1
    with pytest.raises(AsyncRLError, match=r"is gone \(Connection refused\).*ray start --head.*--resume"):
        cluster.check()
    life.remove()
    assert ray.calls == [], "nothing can be asked of it any more"


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("ray://head:10001", ConfigError, "run the command on a node of the cluster"),
        ("head", ConfigError, "as HOST:PORT"),
        ("localhost:99999999", ConfigError, "as HOST:PORT"),
        ("127.0.0.1:9", AsyncRLError, "no Ray cluster at 127.0.0.1:9: Connection refused"),
    ],
)
@pytest.mark.parametrize("is_given", [True, False])
def test_an_address_without_a_cluster_says_so_at_once(monkeypatch, address, error, message, is_given):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(error, match=message):
        connect(address if is_given else "auto")
