"""Hosts with addresses and links of their own, as network namespaces of this machine: links that break, lose and delay.

    learner host 0 ── 10.77.0.1 ─┐             ┌─ 10.77.0.3 ── actor host 0
                                 ├── a switch ─┤
    learner host 1 ── 10.77.0.2 ─┘             └─ 10.77.0.4 ── actor host 1

Everything between them is what would go over a network: ZeroMQ with CURVE keys, gloo between the two ranks, weights.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.conftest import (
    REPOSITORY,
    environment,
    overrides,
    processes_of,
    rows,
    run,
    server_of,
    steps_of,
    summary_of,
    wait_until,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

CUT_S = 20.0
DELAY_S, LOSS = 0.05, 0.01
"""On a bad link, in both directions."""
HOSTS = {"l0": "10.77.0.1", "l1": "10.77.0.2", "a0": "10.77.0.3", "a1": "10.77.0.4"}


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def tc(namespace: str, *arguments: str) -> None:
    ip("netns", "exec", namespace, "tc", *arguments)


class Network:
    """A switch with a namespace per host, each with the link ``eth0``."""

    def __init__(self, bad: tuple[str, ...] = ()) -> None:
        self._prefix = f"arl{os.getpid()}"
        self._made: list[str] = []
        self._wires: list[subprocess.Popen] = []
        try:
            self._add("sw")
            self._ip("sw", "link", "add", "br0", "type", "bridge")
            self._ip("sw", "link", "set", "br0", "up")
            for host, address in HOSTS.items():
                self._add(host)
                self._lay(host, bad=host in bad)
                self._ip("sw", "link", "set", host, "master", "br0", "up")
                self._ip(host, "address", "add", f"{address}/24", "dev", "eth0")
                for name in ("lo", "eth0"):
                    self._ip(host, "link", "set", name, "up")
                if host in bad and not self._wires:
                    self._netem(host)
        except BaseException:
            self.remove()
            raise

    def _lay(self, host: str, *, bad: bool) -> None:
        """A cable between host and switch; a bad one is a process of ours where the kernel has no netem."""
        if not bad or has_netem(self.of("sw")):
            self._ip("sw", "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", self.of(host))
            return
        line = [sys.executable, str(Path(__file__).with_name("wire.py"))]
        line += [self.of(host), "eth0", self.of("sw"), host, str(DELAY_S), str(LOSS)]
        wire = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._wires.append(wire)
        if wire.stdout.readline() != "ready\n":
            wire.wait(10)
            raise OSError(f"no tap device can be made: {wire.stderr.read().strip()[-300:]}")

    def _netem(self, host: str) -> None:
        for end in (host, "sw"):
            device = "eth0" if end == host else host
            netem = ("netem", "delay", f"{DELAY_S * 1000:g}ms", "loss", f"{LOSS:.0%}")
            tc(self.of(end), "qdisc", "add", "dev", device, "root", *netem)

    def _ip(self, host: str, *arguments: str) -> None:
        ip("-n", self.of(host), *arguments)

    def of(self, host: str) -> str:
        """Name of its namespace."""
        return f"{self._prefix}{host}"

    def _add(self, host: str) -> None:
        ip("netns", "add", self.of(host))
        self._made.append(host)

    def start(self, host: str, script: str, *arguments: str, cwd: Path, log: Path) -> subprocess.Popen:
        """A launch script on that host, which has a shared memory of its own; ``ip`` becomes it."""
        own = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        line = ["ip", "netns", "exec", self.of(host), "sh", "-c", own, "sh"]
        line += ["bash", str(REPOSITORY / "scripts" / script), *arguments]
        with log.open("w") as sink:
            return subprocess.Popen(
                line, cwd=cwd, stdout=sink, stderr=subprocess.STDOUT, env=environment() | {"PYTHON": sys.executable}
            )

    def link(self, host: str, state: str) -> None:
        """Plug its cable in or out, at the switch."""
        ip("-n", self.of("sw"), "link", "set", host, state)

    def remove(self) -> None:
        for wire in self._wires:
            wire.kill()
            wire.communicate(timeout=10)
        for host in reversed(self._made):
            ip("netns", "delete", self.of(host))
        self._made.clear()


def has_netem(namespace: str) -> bool:
    """Whether the kernel delays and loses on request."""
    try:
        tc(namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        tc(namespace, "qdisc", "delete", "dev", "lo", "root")
    except OSError:
        return False
    return True


@pytest.fixture
def lay():
    """Makes the network, with bad links to some hosts."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("no ip and tc on this machine (Debian: apt-get install iproute2)")
    made = []

    def lay(*bad: str) -> Network:
        try:
            made.append(Network(bad))
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        return made[0]

    yield lay
    for network in made:
        network.remove()


def test_a_run_over_four_hosts_outlives_bad_links_a_cut_one_and_the_end_of_a_host(tmp_path, small, lay):
    network = lay("l1", "a1")
    out, port = tmp_path / "l0" / "run", 5599
    for host in HOSTS:
        (tmp_path / host).mkdir()
    keys = tmp_path / "keys"
    assert run("keys", str(keys)).returncode == 0
    small |= {"steps": 100_000, "eval.every": 0, "learner.ranks": 2, "learner.checksum_every": 1}
    settings = (*overrides(small), "--keys", str(keys))
    logs = {host: tmp_path / f"{host}.log" for host in HOSTS}
    group = ("--nnodes", "2", "--rendezvous", f"{HOSTS['l0']}:{port}", "--trusted-network")
    hosts: dict[str, subprocess.Popen] = {}

    def begin(host: str, *arguments: str) -> None:
        hosts[host] = network.start(host, *arguments, *settings, cwd=tmp_path / host, log=logs[host])

    def go_on(steps: int, what: str, timeout_s: float) -> None:
        goal = steps_of(out) + steps
        try:
            wait_until(lambda: steps_of(out) >= goal or hosts["l0"].poll() is not None, what, timeout_s)
        finally:
            assert hosts["l0"].poll() is None, "\n".join(f"{h}: {log.read_text()[-3000:]}" for h, log in logs.items())

    try:
        begin("l0", "launch_learner.sh", "arithmetic", "--out", str(out), *group, "--node-rank", "0")
        begin(
            "l1", "launch_learner.sh", "arithmetic", "--out", str(tmp_path / "l1" / "run"), *group, "--node-rank", "1"
        )
        for host in ("a0", "a1"):
            begin(host, "launch_actor.sh", "arithmetic", "--connect", f"tcp://{HOSTS['l0']}:{port}", "--name", host)
        wait_until(lambda: server_of(out), "the server's start")
        go_on(3, "training over four hosts, two of them behind links that delay and lose", 150)

        for host in ("l1", "a0"):
            network.link(host, "down")
        time.sleep(CUT_S)  # the fault itself, not a wait for anything
        for host in ("l1", "a0"):
            network.link(host, "up")
        go_on(3, "training after the cut", 90)

        network.link("a1", "down")  # the host is gone: no goodbye, no reset
        go_on(10, "training without one actor host", 90)

        hosts["l0"].send_signal(signal.SIGINT)
        assert hosts["l0"].wait(60) == 130, logs["l0"].read_text()
        assert hosts["l1"].wait(30) == 0, logs["l1"].read_text()
        assert hosts["a0"].wait(30) == 0, logs["a0"].read_text()
    finally:
        for process in hosts.values():
            process.kill()
            process.wait(10)
    summary = summary_of(out)
    ledger = summary["ledger"]
    assert summary["status"] == "stopped"
    assert ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")
    assert all(ledger[name] == 0 for name in ("open", "scoring", "delivered"))
    assert summary["staleness"]["max"] <= 2
    ordinals = [ordinal for batch in rows(out / "batches.jsonl") for ordinal in batch["ordinals"]]
    assert len(ordinals) == len(set(ordinals)) == ledger["trained"] == 8 * summary["steps"]
    assert summary["restarts"] == {}, "a cut of 20 s is ridden out"
    wait_until(lambda: not processes_of(tmp_path), "the end of all processes", 20)
