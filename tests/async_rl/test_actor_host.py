"""``async-rl actor``: an address that does not answer is named at once, and the process is kept alive."""

import io
import os
import signal
import socket
import sys
import time

import pytest
import zmq
from rich.console import Console

from async_rl.config import parse_config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch import actor_host, policy, upkeep
from async_rl.launch.actor_host import make_crew
from async_rl.launch.children import descendants, wait_all
from async_rl.launch.interrupts import Interrupts
from async_rl.launch.progress import make_console
from async_rl.launch.reach import unreachable
from async_rl.launch.upkeep import Upkeep


@pytest.mark.parametrize("name", ["", "  ", "a/b", "../x", "a\nb", 201 * "x"])
def test_a_name_that_no_folder_can_have_is_refused_before_anything_is_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with Interrupts() as interrupts, pytest.raises(ConfigError, match="--name"):
        actor_host.run_actor("arithmetic", [], "tcp://127.0.0.1:1", name, "actor", interrupts)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def live(tmp_path, console, code):
    with Interrupts() as interrupts:
        crew = make_crew(tmp_path, dict(os.environ), {}, console)
        crew.add("far", "actor", [sys.executable, "-c", code, str(tmp_path / "lives")])
        code = Upkeep(crew, interrupts).run()
    assert descendants(os.getpid()) == []
    return code


# Begins another life until there are as many as the first argument of the test says.
LIVES = """
import os, pathlib, sys
lives = pathlib.Path(sys.argv[1])
count = len(lives.read_text()) + 1 if lives.exists() else 1
lives.write_text("x" * count)
"""


def test_a_server_is_known_by_its_greeting():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind("tcp://127.0.0.1:*")
        assert unreachable(server.getsockopt_string(zmq.LAST_ENDPOINT), 5.0) is None


def test_what_does_not_answer_is_told_in_time():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        assert unreachable(address, 5.0) == "Connection refused"
        other.listen()  # connects, and says nothing
        began = time.monotonic()
        assert unreachable(address, 0.3) == "no answer within 0.3 s"
        assert time.monotonic() - began < 3
    assert unreachable("tcp://no.such.host.invalid:1", 5.0)


def test_an_address_where_nothing_answers_is_told_at_once_and_goes_on_being_tried(console, monkeypatch):
    monkeypatch.setattr(actor_host, "PROBE_S", 1.0)
    config = parse_config({})
    actor_host.look_for_server("tcp://127.0.0.1:1", config, "far", console)
    actor_host.look_for_server("tcp://no.such.host.invalid:1", config, "far", console)
    closed, wrong = console.file.getvalue().splitlines()
    assert closed == "nothing to serve at tcp://127.0.0.1:1 yet: Connection refused; far goes on trying"
    assert wrong.startswith("nothing to serve at tcp://no.such.host.invalid:1 yet: ")


def test_another_service_is_no_server():
    import threading

    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet():
            line, _ = other.accept()
            with line:
                line.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        greeter = threading.Thread(target=greet)
        greeter.start()
        why = unreachable(f"tcp://127.0.0.1:{other.getsockname()[1]}", 5.0)
        greeter.join(5)
    assert why == "what listens there is no buffer server"


@pytest.mark.real
def test_it_begins_again_after_each_accident_and_ends_when_the_run_does(tmp_path, console, monkeypatch):
    monkeypatch.setattr(policy, "BACKOFF_S", 0.01)
    assert live(tmp_path, console, LIVES + "os.kill(os.getpid(), 9) if count < 4 else None") == 0
    assert len((tmp_path / "lives").read_text()) == 4
    assert console.file.getvalue().count("far was ended by SIGKILL") == 3


@pytest.mark.real
def test_it_is_given_up_when_no_life_lasts_and_only_then(tmp_path, console, monkeypatch):
    monkeypatch.setattr(policy, "BACKOFF_S", 0.01)
    with pytest.raises(AsyncRLError, match="far was ended by SIGKILL"):
        live(tmp_path, console, LIVES + "os.kill(os.getpid(), 9)")
    assert len((tmp_path / "lives").read_text()) == 4
    monkeypatch.setattr(upkeep, "WORKED_S", 0.0)  # now every life has worked
    (tmp_path / "lives").unlink()
    assert live(tmp_path, console, LIVES + "os.kill(os.getpid(), 9) if count < 7 else None") == 0


@pytest.mark.real
def test_ranks_of_a_further_learner_host_come_again_as_often_as_their_partners_end(tmp_path, console, monkeypatch):
    monkeypatch.setattr(policy, "BACKOFF_S", 0.01)
    code = LIVES + "sys.exit(75) if count < 7 else None"
    with Interrupts() as interrupts:
        crew = make_crew(tmp_path, dict(os.environ), {}, console)
        member = crew.add("learner", "learner", [sys.executable, "-c", code, str(tmp_path / "lives")])
        member.lives.is_guest = True
        assert Upkeep(crew, interrupts).run() == 0
    assert (tmp_path / "lives").read_text() == 7 * "x"


@pytest.mark.real
def test_one_that_says_why_it_cannot_go_on_is_not_started_again(tmp_path, console):
    with pytest.raises(AsyncRLError, match=r"far ended with exit code 1: nothing answered at tcp://h:1"):
        live(tmp_path, console, LIVES + "sys.exit('async-rl: nothing answered at tcp://h:1 within 60 s')")
    assert (tmp_path / "lives").read_text() == "x"


@pytest.mark.real
def test_an_interrupt_ends_it_at_once_even_between_two_lives(tmp_path, console, monkeypatch):
    monkeypatch.setattr(policy, "BACKOFF_S", 60.0)
    code = LIVES + "import threading; threading.Timer(0.5, lambda: os.kill(os.getppid(), 1)).start()\n"
    began = time.monotonic()
    assert live(tmp_path, console, code + "threading.Event().wait(60)") == 128 + signal.SIGHUP
    # the child is dead before its timer fires: a process that it leaves behind sends the signal
    leaves = "import subprocess; subprocess.Popen(['sh', '-c', f'sleep 0.7; kill -INT {os.getppid()}'])\n"
    (tmp_path / "lives").unlink()
    assert live(tmp_path, console, LIVES + leaves + "os.kill(os.getpid(), 9)") == 130
    assert time.monotonic() - began < 20


@pytest.mark.real
def test_of_several_processes_each_is_looked_after_and_the_last_one_ends_it(tmp_path, console, monkeypatch):
    monkeypatch.setattr(policy, "BACKOFF_S", 0.01)
    code = (
        "import os, pathlib, sys\n"
        "mark = pathlib.Path(sys.argv[1] + '-' + os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "first = not mark.exists()\n"
        "mark.touch()\n"
        "os.kill(os.getpid(), 9) if first and mark.name.endswith('-5') else None\n"
    )
    with Interrupts() as interrupts:
        crew = make_crew(tmp_path, dict(os.environ), {"a": "4", "b": "5"}, console)
        for name in ("a", "b"):
            crew.add(name, "actor", [sys.executable, "-c", code, str(tmp_path / "mark")])
        assert Upkeep(crew, interrupts).run() == 0
    assert crew.restarts == {"b": 1}
    assert {path.name for path in tmp_path.glob("mark-*")} == {"mark-4", "mark-5"}


@pytest.mark.real
def test_what_a_process_has_said_may_stand_in_brackets(tmp_path, console, capsys):
    said = "rank 1 has lost the others ([/builds/gloo/pair.cc:537] Read error [fd00::1]:20377)"
    crew = make_crew(tmp_path, dict(os.environ), {}, console)
    member = crew.add("far", "actor", [sys.executable, "-c", f"import sys; sys.exit({'async-rl: ' + said!r})"])
    wait_all([member.child], 20)
    crew.tend(member, lambda child: True)
    assert said in console.file.getvalue()
    make_console().print("at tcp://[fd00::1]:5555, [/not a tag]")
    assert capsys.readouterr().out == "at tcp://[fd00::1]:5555, [/not a tag]\n"
