"""Several learner hosts by command line: what contradicts itself, or would talk unencrypted unasked, is refused."""

from pathlib import Path

import pytest

from async_rl.config import parse_config
from async_rl.config.shared import shared_settings
from async_rl.errors import ConfigError
from async_rl.hosts import ONE_HOST, LearnerHosts
from async_rl.launch import session
from async_rl.launch.commands import Commands
from async_rl.launch.preflight import prepare_out


def test_one_host_needs_nothing_and_a_rendezvous_has_no_effect_there():
    assert LearnerHosts.of(1, 0, None, trusted=False) == ONE_HOST
    with pytest.raises(ConfigError, match=r"--rendezvous has no effect with one learner host"):
        LearnerHosts.of(1, 0, "h:1", trusted=True)


@pytest.mark.parametrize("rendezvous", ["10.0.0.1:5555", "tcp://10.0.0.1:5555"])
def test_the_rendezvous_is_the_address_of_the_server(rendezvous):
    hosts = LearnerHosts.of(3, 2, rendezvous, trusted=True)
    assert (hosts.address, hosts.is_first) == ("tcp://10.0.0.1:5555", False)
    assert LearnerHosts.of(2, 0, "[fd00::1]:77", trusted=True).address == "tcp://[fd00::1]:77"


@pytest.mark.parametrize(
    ("count", "index", "rendezvous", "says"),
    [
        (2, 2, "h:1", r"--node-rank 2 of --nnodes 2: hosts are numbered from 0 to 1"),
        (2, 0, None, r"--nnodes 2 needs --rendezvous HOST:PORT"),
        (2, 0, "h", r"not 'h'"),
        (2, 0, "h:0", r"not 'h:0'"),
        (2, 0, "*:5555", r"needs --rendezvous"),
        (2, 0, "h:70000", r"needs --rendezvous"),
    ],
)
def test_a_wrong_number_or_address_says_what_is_meant(count, index, rendezvous, says):
    with pytest.raises(ConfigError, match=says):
        LearnerHosts.of(count, index, rendezvous, trusted=True)


def test_ranks_on_several_hosts_talk_unencrypted_only_where_the_user_vouches_for_the_network():
    with pytest.raises(ConfigError, match=r"neither encrypt nor know each other; .* --trusted-network"):
        LearnerHosts.of(2, 0, "10.0.0.1:5555", trusted=False)
    for loopback in ("127.0.0.1:5555", "localhost:5555", "[::1]:5555"):
        assert LearnerHosts.of(2, 0, loopback, trusted=False).count == 2


def test_the_first_host_says_what_is_to_be_typed_on_the_others():
    hosts = LearnerHosts.of(2, 0, "10.0.0.1:5555", trusted=True)
    assert hosts.options(1) == "--nnodes 2 --node-rank 1 --rendezvous 10.0.0.1:5555 --trusted-network"
    here = LearnerHosts.of(2, 0, "[::1]:5555", trusted=False)
    assert here.options(1) == "--nnodes 2 --node-rank 1 --rendezvous [::1]:5555"


def test_the_server_listens_at_the_rendezvous_unless_another_address_is_given():
    hosts = LearnerHosts.of(2, 0, "127.0.0.1:5555", trusted=False)
    assert session._bind_to_rendezvous([], hosts) == ["buffer.bind=tcp://127.0.0.1:5555"]
    assert session._bind_to_rendezvous(["buffer.bind=tcp://0.0.0.0:5555"], hosts) == []
    assert session._bind_to_rendezvous([], ONE_HOST) == []
    assert session._bind_to_rendezvous([], LearnerHosts.of(2, 0, "[::1]:5", trusted=False)) == [
        "buffer.bind=tcp://[::1]:5"
    ]
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid:5 cannot be reached from here"):
        session._bind_to_rendezvous([], LearnerHosts.of(2, 0, "no.such.host.invalid:5", trusted=True))


def test_ranks_are_spread_evenly():
    hosts = LearnerHosts.of(2, 1, "127.0.0.1:5", trusted=False)
    assert hosts.ranks_here(6) == 3
    with pytest.raises(ConfigError, match=r"learner\.ranks = 3 is the number over all hosts: .* of --nnodes 2"):
        hosts.ranks_here(3)


def test_each_host_has_a_folder_of_its_own_even_in_a_run_folder_that_they_share(tmp_path):
    second = LearnerHosts.of(2, 1, "127.0.0.1:5", trusted=False).folder(tmp_path)
    assert (ONE_HOST.folder(tmp_path), second) == (tmp_path, tmp_path / "host1")
    second.mkdir()  # it came first
    assert prepare_out(tmp_path) == tmp_path
    (tmp_path / "hosts").mkdir()
    with pytest.raises(ConfigError, match="is not empty"):
        prepare_out(tmp_path)


def test_ranks_of_every_host_are_told_where_the_server_is_and_which_host_they_are_on():
    hosts = LearnerHosts.of(2, 1, "10.0.0.1:5555", trusted=True)
    commands = Commands(config=Path("r/host1/config.toml"), out=Path("r"), ranks=2, hosts=hosts)
    command = commands.learner("tcp://127.0.0.1:1")
    assert command[command.index("--log-dir") + 1] == "r/host1/logs/torchrun"
    assert command[command.index("--shutdown-timeout") + 1] == "300"
    assert command[command.index("learner.main") :] == [
        *["learner.main", "r/host1/config.toml", "--out", "r", "--connect", "tcp://10.0.0.1:5555"],
        *["--nnodes", "2", "--node-rank", "1"],
    ]


def test_what_ranks_must_share_leaves_out_what_belongs_to_a_host():
    here = parse_config({"buffer": {"bind": "tcp://10.0.0.1:5555", "keys": "/a"}, "log": {"wandb": False}})
    there = parse_config({"buffer": {"keys": "/b"}})
    assert shared_settings(here) == shared_settings(there)
    other = shared_settings(parse_config({"learner": {"lr": 1e-5}}))
    assert {k for k, v in shared_settings(here).items() if other[k] != v} == {"learner.lr"}
    assert other["learner.lr"] == "1e-05"
