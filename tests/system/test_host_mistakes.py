"""The usual mistakes with several hosts, as somebody types them: each ends with a sentence that says what to do."""

import os
import shutil
import subprocess
import sys

import pytest

from async_rl.config import load_any, to_toml
from async_rl.curve import make_keys
from async_rl.launch.devices import claimed
from tests.system.conftest import command, environment, overrides, server_of, wait_until
from tests.system.micro import save_micro_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

SERVER = """
import sys
from async_rl.buffer import door, server
from async_rl.process import run_guarded

door.PROTOCOL_VERSION = int(sys.argv.pop(1)) or door.PROTOCOL_VERSION
run_guarded(server.main)
"""


@pytest.fixture
def typed(tmp_path):
    """Types a command; exit code, and what stands on the screen."""

    def typed(*arguments, **variables):
        env = environment() | variables
        line = command(*arguments)
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=env, check=False)
        return done.returncode, done.stdout + done.stderr

    return typed


@pytest.fixture
def settings(small, tmp_path):
    return small | {"model.path": save_micro_model(tmp_path / "model"), "actors.engine": "mock"}


@pytest.fixture
def keys(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def serve(settings, keys, tmp_path):
    """Starts the buffer server of a run with keys; its address."""
    begun = []

    def serve(protocol=0):
        (tmp_path / "run").mkdir()
        config = tmp_path / "run" / "config.toml"
        config.write_text(to_toml(load_any("arithmetic", [*overrides(settings)[1::2], f"buffer.keys='{keys}'"])))
        line = [sys.executable, "-c", SERVER, str(protocol), str(config), "--out", str(tmp_path / "run")]
        begun.append(subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL))
        return wait_until(lambda: server_of(tmp_path / "run"), "the server's start", 30)["address"]

    yield serve
    for server in begun:
        server.kill()
        server.wait(10)


def test_another_version_of_the_package(typed, serve, settings, keys):
    code, said = typed(
        "actor", "arithmetic", *overrides(settings), "--connect", serve(protocol=99), "--keys", str(keys)
    )
    assert code == 1
    assert "the server speaks protocol 99 with schema" in said
    assert "install the same version of async-rl on both hosts" in said


def test_another_configuration_or_another_key(typed, serve, settings, keys, tmp_path):
    address = serve()
    other = overrides(settings | {"seed": 4})
    code, said = typed("actor", "arithmetic", *other, "--connect", address, "--keys", str(keys))
    assert code == 1
    assert "reference or seed differ between your configuration (contract" in said
    code, said = typed("actor", "arithmetic", *overrides(settings), "--connect", address)
    assert (code, "lets in only those whose keys it knows: name ours with --keys DIR" in said) == (2, True)
    make_keys(tmp_path / "mine")
    shutil.copy(keys / "server.pub", tmp_path / "mine" / "server.pub")
    group = ("--nnodes", "2", "--node-rank", "1", "--rendezvous", address.removeprefix("tcp://"))
    strange = ("--set", "learner.ranks=2", *group, "--keys", str(tmp_path / "mine"), "--out", str(tmp_path / "second"))
    code, said = typed("learner", "arithmetic", *overrides(settings), *strange)
    assert (code, "it does not know our client.key: put our client.pub into the clients/" in said) == (2, True)


def test_a_key_that_is_missing(typed, settings, tmp_path):
    (tmp_path / "empty").mkdir()
    to = ("actor", "arithmetic", *overrides(settings), "--connect", "tcp://127.0.0.1:1")
    code, said = typed(*to, "--keys", str(tmp_path / "empty"))
    assert code == 2
    assert f"no key file {tmp_path / 'empty' / 'client.key'}: async-rl keys" in said


def test_two_commands_or_two_engines_on_one_device(typed, tmp_path):
    device = f"test-{os.getpid()}"
    actor = ("actor", "arithmetic", "--connect", "tcp://127.0.0.1:1")
    two = ("--set", "learner.ranks=2", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:1")
    ranks = ("learner", "arithmetic", *two, "--out", str(tmp_path / "run"))
    with claimed([device], "actor"), claimed([device], "learner"):
        for role, arguments in (("actor", actor), ("learner", ranks)):
            code, said = typed(*arguments, CUDA_VISIBLE_DEVICES=device)
            assert code == 2
            assert f"device {device} is used by another async-rl {role} on this host (process {os.getpid()})" in said
    code, said = typed(*actor, "--engines", "2", CUDA_VISIBLE_DEVICES=device)
    assert (code, f"--engines 2: 2 processes here, but 1 devices ({device})" in said) == (2, True)


def test_a_rendezvous_that_is_taken_or_on_another_host_or_a_network_that_nobody_vouches_for(
    typed, settings, serve, tmp_path
):
    taken = serve().removeprefix("tcp://")
    first = ("learner", "arithmetic", *overrides(settings), "--set", "learner.ranks=2", "--nnodes", "2")
    out = ("--out", str(tmp_path / "new"))
    code, said = typed(*first, *out, "--rendezvous", taken)
    assert (code, f"--rendezvous = 'tcp://{taken}': Address already in use; choose another port" in said) == (2, True)
    code, said = typed(*first, *out, "--rendezvous", "192.0.2.1:5555", "--trusted-network", "--insecure")
    assert (code, "; name an address of this host, where the buffer server is started" in said) == (2, True)
    code, said = typed(*first, *out, "--rendezvous", "192.0.2.1:5555", "--node-rank", "1")
    assert (code, "--trusted-network" in said) == (2, True)
    code, said = typed(*first, *out, "--set", "learner.ranks=3", "--rendezvous", "127.0.0.1:5")
    assert (code, "learner.ranks = 3 is the number over all hosts" in said) == (2, True)
    code, said = typed(
        "learner", "--resume", str(tmp_path / "run"), *first[-2:], "--node-rank=1", "--rendezvous", taken
    )
    assert (code, "host1 holds no config.toml: name the preset or CONFIG.toml" in said) == (2, True)
