"""The frame around every actor, scorer and evaluator, with a client that writes down what happens."""

import contextlib
import signal
from collections import Counter

import pytest
from loop_fakes import manifest

from actors import process as process_module
from actors.process import Stop, command_line, joined
from async_rl.config import parse_config


class Loop:
    def __init__(self):
        self.counts = Counter(groups=3)

    def in_flight(self):
        return [[7, 0, 0.5]]

    def info(self):
        return {"version": 2}


@pytest.fixture
def events(monkeypatch):
    """What happened, in order; signals stay as they are."""
    happened = []

    class Client:
        def __init__(self, address, role, name, contract, stage, keys, base):
            self.hello = (address, role, name, stage)
            happened.append("open")

        def connect(self, timeout_s):
            happened.append(("connect", sorted(self.beat_info())))
            return {"manifest": manifest(4).to_wire()}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            happened.append("goodbye")

    monkeypatch.setattr(process_module, "Client", Client)
    monkeypatch.setattr(signal, "signal", lambda number, handler: happened.append((number, handler)))
    return happened


def part(events, name):
    return contextlib.closing(type("Part", (), {"close": lambda self: events.append(name)})())


def begin(**fields):
    return joined("actor", parse_config({}), "tcp://h:1", "actor0", **fields)


def test_it_joins_before_its_parts_are_built_and_closes_them_last_first(events):
    with begin(stage="") as process:
        assert process.client.hello == ("tcp://h:1", "actor", "actor0", "")
        assert process.manifest == manifest(4)
        for name in ("engine", "player"):
            process.parts.enter_context(part(events, name))
        assert events[:2] == [(signal.SIGINT, signal.SIG_IGN), "open"]
        assert events[2][0] == signal.SIGTERM  # before the client there is nothing to end in order
        assert events[3:] == [("connect", ["timer"])]  # heartbeats go out from here
    assert events[4:] == ["player", "engine", "goodbye"]


def test_sigterm_closes_everything_and_is_the_exit_code(events):
    with contextlib.ExitStack() as outer:
        ended = outer.enter_context(pytest.raises(SystemExit))
        process = outer.enter_context(begin())
        process.parts.enter_context(part(events, "engine"))
        events[2][1](signal.SIGTERM, None)
    assert ended.value.code == 143
    assert events[4:] == ["engine", "goodbye"]


def test_beats_tell_what_the_loop_holds_and_its_end_is_reported(events, capsys):
    with begin() as process:
        process.run(Loop(), lambda: Stop("all steps are trained", error=False))
        beat = process.client.beat_info()
    assert (beat["in_flight"], beat["info"]) == ([[7, 0, 0.5]], {"version": 2})
    assert capsys.readouterr().out == "actor0: stopped after 0.0 s (all steps are trained): {'groups': 3}\n"


def test_an_error_of_the_run_is_the_exit_code(events):
    with pytest.raises(SystemExit) as ended, begin() as process:
        process.run(Loop(), lambda: Stop.from_wire({"reason": "the learner died", "error": True}))
    assert ended.value.code == 1
    assert events[-1] == "goodbye"


def test_the_command_line_names_configuration_server_and_process():
    args = command_line("one", "evaluator").parse_args(["c.toml", "--connect", "tcp://h:1"])
    assert (args.config, args.connect, args.name) == ("c.toml", "tcp://h:1", "evaluator")
    args = command_line("one", "evaluator").parse_args(["c.toml", "--connect", "tcp://h:1", "--name", "x"])
    assert args.name == "x"
