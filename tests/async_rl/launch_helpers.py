"""Small stand-ins for the processes, the client and the display of a launcher."""

import json
import sys
import threading
from dataclasses import dataclass

from async_rl.launch.commands import Commands
from async_rl.launch.launcher import Launcher

# Runs until OUT/exit_NAME holds an exit code; the text of OUT/say_NAME is its last word.
STAND_IN = """
import json, os, sys, threading
from pathlib import Path
name, out = sys.argv[1], Path(sys.argv[2])
if name == "server":
    (out / "tmp").write_text(json.dumps({"address": "tcp://127.0.0.1:1", "pid": os.getpid(), "run_id": "r1"}))
    (out / "tmp").rename(out / "server.json")
print(name, "is up", flush=True)
note = out / f"exit_{name}"
while not (note.exists() and note.read_text()):
    threading.Event().wait(0.01)
say = out / f"say_{name}"
if say.exists():
    print(say.read_text(), flush=True)
code = int(note.read_text())
if name.startswith(("actor", "re")):
    note.unlink()
os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns(Commands):
    code: str = STAND_IN

    def server(self, *, recover=False):
        return self._stand_in("server")

    def learner(self, address):
        return self._stand_in("learner")

    def actor(self, address, name):
        return self._stand_in(name)

    def scorer(self, address, name, role):
        return self._stand_in(name)

    def evaluator(self, address):
        return self._stand_in("evaluator")

    def _stand_in(self, name):
        return [sys.executable, "-c", self.code, name, str(self.out)]


class Line:
    """Stands in for the client: says what the test queued, turns a stop into the orderly end of every process."""

    def __init__(self, out, on_turn):
        self.out, self.on_turn, self.sent, self.queue, self.turns = out, on_turn, [], [], 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def connect(self, timeout_s):
        return {}

    def send(self, kind, /, **fields):
        self.sent.append((kind, fields))
        if kind in ("stop", "fatal"):
            self.end_all(*((0, "stopped") if kind == "stop" else (1, "failed")))
            self.queue.append(({"type": "stop", "reason": fields["reason"], "error": kind == "fatal"}, []))

    def end_all(self, code, status="completed"):
        """Everybody leaves with this exit code; the books, written before anybody is sent home, have the status."""
        if not (self.out / "books.json").exists():
            (self.out / "books.json").write_text(json.dumps({"status": status}))
        for name in ("server", "learner", "actor0", "actor1", "reward0", "reference0", "evaluator"):
            if not (self.out / f"exit_{name}").exists():
                (self.out / f"exit_{name}").write_text(str(code))

    def receive(self, timeout_s):
        threading.Event().wait(min(timeout_s, 0.02))
        self.turns += 1
        self.on_turn(self)
        found, self.queue = self.queue, []
        return found


class Silent:
    def __init__(self):
        self.notes, self.steps = [], []

    def update(self, status):
        self.steps.append(status["step"])

    def note(self, text):
        self.notes.append(text)


@dataclass
class Ran:
    outcome: object
    line: Line
    display: Silent
    launcher: Launcher
    cleaned: list
    seconds: float
