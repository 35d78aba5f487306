"""Fixtures of the server's and the launcher's tests; a file with settings of its own overrides ``settings``."""

import os
import time

import pytest
from launch_helpers import STAND_IN, Line, Ran, Silent, StandIns
from server_helpers import Cast, config, running

from async_rl.launch import launcher as launcher_module
from async_rl.launch import policy
from async_rl.launch.children import descendants
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.launcher import Launcher


@pytest.fixture
def settings():
    return config()


@pytest.fixture
def server(settings, tmp_path):
    with running(settings, tmp_path) as server:
        yield server


@pytest.fixture
def cast(server, settings):
    with Cast(server, settings) as cast:
        yield cast


@pytest.fixture
def launch(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "BACKOFF_S", 0.01)
    monkeypatch.setattr(launcher_module, "_TURN_S", 0.05)

    def run(on_turn, *, actors=1, scorers=None, code=STAND_IN, interrupts=None):
        line, display, cleaned = Line(tmp_path, on_turn), Silent(), []
        launcher = Launcher(
            commands=StandIns(config=tmp_path / "config.toml", out=tmp_path, ranks=1, code=code),
            env=os.environ,
            gpus={},
            actors=actors,
            scorers=scorers or {},
            display=display,
            interrupts=interrupts or Interrupts(),
            monitor=lambda address: line,
            cleanup=cleaned.append,
        )
        began = time.monotonic()
        outcome = launcher.run()
        assert descendants(os.getpid()) == [], "a process of the run is left"
        return Ran(outcome, line, display, launcher, cleaned, time.monotonic() - began)

    return run
