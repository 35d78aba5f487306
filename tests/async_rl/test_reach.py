"""An address is tried before anything is started: keys that do not fit are an error that says what to copy."""

import shutil

import pytest
import zmq

from async_rl.curve import ClientKeys, Gate, ServerKeys, make_keys, secure_server
from async_rl.errors import ConfigError
from async_rl.launch.reach import check_entry, unreachable


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def closed(folder):
    """Address of a server with keys."""
    keys = ServerKeys.of(str(folder))
    with zmq.Context() as context:
        gate = Gate(context, keys)
        with context.socket(zmq.ROUTER) as server:
            server.set(zmq.LINGER, 0)
            secure_server(server, keys)
            server.bind("tcp://127.0.0.1:*")
            yield server.getsockopt_string(zmq.LAST_ENDPOINT)
        gate.close()


def check(address, folder):
    name = str(folder) if folder else ""
    check_entry(address, ClientKeys.of(name), name, 5.0)


def test_keys_that_fit_let_in(closed, folder):
    assert unreachable(closed, 5.0) is None
    check(closed, folder)


def test_without_keys_a_server_that_has_some_is_named(closed):
    with pytest.raises(ConfigError, match=r"lets in only those whose keys it knows: name ours with --keys DIR"):
        check(closed, None)


def test_keys_for_a_server_without_any_are_an_error_on_this_side(folder):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind("tcp://127.0.0.1:*")
        address = server.getsockopt_string(zmq.LAST_ENDPOINT)
        check(address, None)
        with pytest.raises(ConfigError, match=r"has no keys, but we expect one that has"):
            check(address, folder)


def test_a_client_that_the_server_does_not_know_is_told_which_file_to_copy(closed, folder, tmp_path):
    make_keys(tmp_path / "strange")
    shutil.copy(folder / "server.pub", tmp_path / "strange" / "server.pub")
    with pytest.raises(ConfigError, match=r"it does not know our client\.key: put our client\.pub into"):
        check(closed, tmp_path / "strange")


def test_a_server_with_another_key_than_ours_is_told_of_too(closed, folder, tmp_path):
    make_keys(tmp_path / "strange")
    for name in ("client.key", "client.pub"):
        shutil.copy(folder / name, tmp_path / "strange" / name)
    with pytest.raises(ConfigError, match=r"its key is not that of our server\.pub"):
        check(closed, tmp_path / "strange")
