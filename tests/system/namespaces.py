"""Hosts as network namespaces of this machine: own addresses, own names, own shared memory, cables that can be cut.

learner0 ── 10.0.0.1 ─┐             ┌─ 10.0.0.3 ── actor0
                      ├── a switch ─┤
learner1 ── 10.0.0.2 ─┘             └─ 10.0.0.4 ── actor1
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from tests.system.conftest import REPOSITORY, environment

DELAY_S, LOSS = 0.05, 0.01
"""Of a weakened cable, in both directions."""
HOSTS = {"learner0": "10.0.0.1", "learner1": "10.0.0.2", "actor0": "10.0.0.3", "actor1": "10.0.0.4"}
_OWN = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && cd "$1" && eval "exec $2"'
"""What makes a host of a namespace; then the command becomes this process."""


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def tc(namespace: str, *arguments: str) -> None:
    ip("netns", "exec", namespace, "tc", *arguments)


def has_netem(namespace: str) -> bool:
    """Whether the kernel delays and loses on request."""
    try:
        tc(namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        tc(namespace, "qdisc", "delete", "dev", "lo", "root")
    except OSError:
        return False
    return True


class Network:
    """A switch with a namespace per host, each with the link ``eth0``.

    Args:
        name: short, unique on this machine.
        hosts: address of each.
        weak: whose cables :meth:`weaken` makes bad.
    """

    def __init__(self, name: str, hosts: Mapping[str, str], weak: Collection[str] = ()) -> None:
        self._name, self._weak = name, weak
        self._made: list[str] = []
        self._wires: list[subprocess.Popen] = []
        try:
            self._add("switch")
            self._ip("switch", "link", "add", "br0", "type", "bridge")
            self._ip("switch", "link", "set", "br0", "up")
            self._netem = has_netem(self._of("switch"))
            for host, address in hosts.items():
                self._add(host)
                self._lay(host)
                self._ip("switch", "link", "set", host, "master", "br0", "up")
                self._ip(host, "address", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    self._ip(host, "link", "set", device, "up")
        except BaseException:
            self.remove()
            raise

    def start(self, host: str, line: str, *, folder: Path, log: Path) -> subprocess.Popen:
        """A command line, as somebody types it there in ``folder``; the process becomes the command."""
        words = ["ip", "netns", "exec", self._of(host), "unshare", "--uts", "sh", "-c", _OWN, host, str(folder), line]
        with log.open("a") as sink:
            return subprocess.Popen(words, stdout=sink, stderr=subprocess.STDOUT, env=environment() | tools(folder))

    def cable(self, host: str, state: str) -> None:
        """Plug it in (``up``) or out (``down``), at the switch."""
        self._ip("switch", "link", "set", host, state)

    def weaken(self) -> None:
        """From now on some cables delay and lose."""
        for wire in self._wires:
            wire.send_signal(signal.SIGUSR1)
        for host in self._weak if self._netem else ():
            for end, device in ((host, "eth0"), ("switch", host)):
                netem = ("netem", "delay", f"{DELAY_S * 1000:g}ms", "loss", f"{LOSS:.0%}")
                tc(self._of(end), "qdisc", "add", "dev", device, "root", *netem)

    def sent_bytes(self, host: str) -> int:
        """What has left it, as its kernel counts."""
        counter = ip("netns", "exec", self._of(host), "cat", "/sys/class/net/eth0/statistics/tx_bytes")
        return int(counter)

    def processes(self) -> list[str]:
        """Process ids on all hosts."""
        hosts = [host for host in self._made if host != "switch"]  # which may have cables of ours
        return [pid for host in hosts for pid in ip("netns", "pids", self._of(host)).split()]

    def remove(self) -> None:
        for wire in self._wires:
            wire.kill()
            wire.communicate(timeout=10)
        for host in reversed(self._made):
            ip("netns", "delete", self._of(host))
        self._made.clear()

    def _lay(self, host: str) -> None:
        """A cable between host and switch; a weak one is a process of ours where the kernel has no netem."""
        if host not in self._weak or self._netem:
            self._ip("switch", "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", self._of(host))
            return
        line = [sys.executable, str(Path(__file__).with_name("wire.py"))]
        line += [self._of(host), "eth0", self._of("switch"), host, str(DELAY_S), str(LOSS)]
        wire = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._wires.append(wire)
        if wire.stdout.readline() != "ready\n":
            wire.wait(10)
            raise OSError(f"no tap device can be made: {wire.stderr.read().strip()[-300:]}")

    def _add(self, host: str) -> None:
        ip("netns", "add", self._of(host))
        self._made.append(host)

    def _ip(self, host: str, *arguments: str) -> None:
        ip("-n", self._of(host), *arguments)

    def _of(self, host: str) -> str:
        """Name of its namespace."""
        return f"{self._name}{host}"


def tools(folder: Path) -> dict[str, str]:
    """Environment of a host on which this package is installed: ``async-rl`` is on the path, as from ``.venv/bin``."""
    command = folder / ".bin" / "async-rl"
    if not command.exists():
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m async_rl "$@"\n')
        command.chmod(0o755)
        (folder / "scripts").symlink_to(REPOSITORY / "scripts")
    return {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable}


@pytest.fixture
def lay():
    """Makes networks, numbered; skips the test where that is not permitted."""
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on this machine (Debian: apt-get install iproute2 util-linux hostname)")
    made: list[Network] = []

    def lay(hosts: Mapping[str, str], weak: Collection[str] = ()) -> Network:
        try:
            made.append(Network(f"arl{os.getpid()}-{len(made)}-", hosts, weak))
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        return made[-1]

    yield lay
    for network in made:
        network.remove()
