"""The commands of README.md's "Several hosts" as they stand there, each typed on a host of its own; then cables fail.

learner0, learner1, actor0, actor1: network namespaces, see namespaces.py; between them ZeroMQ with CURVE keys, gloo
between the two ranks, weights that are sent on from actor host to actor host

train ─► a cut of 20 s (meanwhile the commands for one learner host) ─► delay and loss ─► a host is gone ─► Ctrl-C
"""

import re
import shutil
import signal
import subprocess
import time

import pytest

from async_rl.config import load_any, to_toml
from tests.system.conftest import (
    REPOSITORY,
    assert_sound,
    books_of,
    overrides,
    rows,
    small_settings,
    steps_of,
    summary_of,
    wait_until,
)
from tests.system.micro import save_micro_model
from tests.system.namespaces import DELAY_S, HOSTS, lay  # noqa: F401 - a fixture

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

CUT_S = 20.0
CARRIED = ("client.key", "client.pub", "server.pub")
"""What README.md says is to be copied."""


def commands_of(page) -> dict[str, list[str]]:
    """The command lines under "Several hosts" by the host in front of them; a line may go on in the next one."""
    _, mark, rest = (REPOSITORY / page).read_text().partition("# Several hosts\n")
    assert mark, f"{page} has no section Several hosts"
    section = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    typed = re.findall(r"^    (\w+)\$ +(.+)$", re.sub(r"\\\n *", "", section), re.MULTILINE)
    return {host: [line for name, line in typed if name == host] for host, _ in typed}


class Site:
    """Some hosts with the configuration ``my.toml`` and the keys, where commands are typed."""

    def __init__(self, network, place, settings):
        self.network, self.place = network, place
        self.running: dict[str, subprocess.Popen] = {}
        self._config = to_toml(load_any("arithmetic", overrides(settings)[1::2]))

    def settle(self, host, keys=None):
        """The folder in which that host works."""
        folder = self.place / host
        folder.mkdir(parents=True)
        (folder / "my.toml").write_text(self._config)
        for name in CARRIED if keys else ():
            (folder / "keys").mkdir(exist_ok=True)
            shutil.copy(keys / name, folder / "keys" / name)
        return folder

    def begin(self, host, line):
        log = self.place / f"{host}.log"
        self.running[host] = self.network.start(host, line, folder=self.place / host, log=log)
        return self.running[host]

    def said(self, host):
        return (self.place / f"{host}.log").read_text()

    def ends(self, host, code, timeout_s):
        assert self.running[host].wait(timeout_s) == code, self.said(host)

    def kill(self):
        for process in self.running.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def settings(tmp_path):
    """Of a run that never ends by itself."""
    few = {"buffer.groups_per_step": 4, "sampling.group_size": 2, "eval.every": 0, "actors.engine": "mock"}
    relayed = {"weights.relay": 1, "weights.chunk_bytes": 16384}
    return small_settings(save_micro_model(tmp_path / "model")) | few | relayed | {"steps": 100_000}


def test_the_commands_of_the_readme_make_a_run_that_outlives_a_cut_bad_links_and_the_end_of_a_host(
    tmp_path,
    settings,
    lay,  # noqa: F811
):
    typed = commands_of("README.md")
    assert typed == commands_of("docs/operations.md")
    assert typed.keys() == {*HOSTS, "learner", "actor"}
    network = lay(HOSTS, weak=("learner1", "actor1"))
    site = Site(network, tmp_path / "four", settings | {"learner.ranks": 2, "learner.checksum_every": 1})
    out = site.settle("learner0") / "runs" / "mine"
    make_keys, begin_first = typed["learner0"]
    assert site.begin("learner0", make_keys).wait(30) == 0
    keys = tmp_path / "four" / "learner0" / "keys"
    alone = Site(
        lay({"learner": HOSTS["learner0"], "actor": HOSTS["actor0"]}), tmp_path / "two", settings | {"steps": 4}
    )
    shutil.copytree(keys, alone.settle("learner") / "keys")
    alone.settle("actor", keys)

    def go_on(steps, what, timeout_s):
        goal = steps_of(out) + steps
        try:
            wait_until(lambda: steps_of(out) >= goal or site.running["learner0"].poll() is not None, what, timeout_s)
        finally:
            assert site.running["learner0"].poll() is None, "\n".join(map(site.said, HOSTS))

    try:
        site.begin("learner0", begin_first)
        for host in ("learner1", "actor0", "actor1"):
            site.settle(host, keys)
            site.begin(host, *typed[host])
        go_on(4, "training over four hosts", 120)
        relayed = wait_until(lambda: books_of(out)["weights"]["relay_bytes"], "that an actor host sends weights on")
        assert sum(map(network.sent_bytes, ("actor0", "actor1"))) > relayed

        for host in ("learner1", "actor1"):
            network.cable(host, "down")
        for host in ("learner", "actor"):
            alone.begin(host, *typed[host])
        time.sleep(CUT_S)  # the fault itself, not a wait for anything
        for host in ("learner1", "actor1"):
            network.cable(host, "up")
        go_on(3, "training after the cut", 90)
        alone.ends("learner", 0, 90)
        alone.ends("actor", 0, 30)

        network.weaken()
        weak = time.monotonic()
        go_on(5, "training over links that delay and lose", 120)
        assert time.monotonic() - weak > 5 * 2 * DELAY_S, "an all_reduce takes a round trip at least"

        network.cable("actor1", "down")  # the host is gone: no goodbye, no reset
        go_on(8, "training without one actor host", 90)

        site.running["learner0"].send_signal(signal.SIGINT)
        site.ends("learner0", 130, 60)
        site.ends("learner1", 0, 30)
        site.ends("actor0", 0, 30)
    finally:
        site.kill()
        alone.kill()
    assert_sound(tmp_path / "two" / "learner" / "runs" / "mine", bound=2, steps=4)
    assert_the_books_are_closed(out)
    wait_until(lambda: not network.processes(), "the end of all processes", 20)


def assert_the_books_are_closed(out):
    """Of a run that was stopped in order and in which no process had to be started again."""
    summary = summary_of(out)
    ledger = summary["ledger"]
    assert summary["status"] == "stopped"
    assert ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")
    assert all(ledger[name] == 0 for name in ("open", "scoring", "delivered"))
    assert summary["staleness"]["max"] <= 2
    ordinals = [ordinal for batch in rows(out / "batches.jsonl") for ordinal in batch["ordinals"]]
    assert len(ordinals) == len(set(ordinals)) == ledger["trained"] == 4 * summary["steps"]
    assert summary["restarts"] == {}, "a cut of 20 s is ridden out"
