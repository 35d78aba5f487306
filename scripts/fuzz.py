"""Feeds hostile input to everything that reads input from outside, for as long as one likes.

    python scripts/fuzz.py --inputs 1000000 --out fuzz.json           [--target wire] [--seed 0] [--engine atheris]

Each target runs in a process of its own, with a limit on its memory and a deadline for each input. Printed for each:
inputs, refusals by reason, the longest time that an input took, growth of memory. The exit code is 1 if any input
crashed a target, hung it or made it grow; what it was is printed and written, to be fed again with ``--again HEX``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzzing.choices import Choices

INPUT_S = 10.0
"""An input that takes longer has hung its target."""
SPARE_BYTES = 2 << 30
"""A target may map so much more than it had at the start."""
GROWTH_BYTES = 96 << 20
"""Resident memory may grow by so much while a target runs: caches and the allocator's own."""
WARM_UP = 1000
"""Inputs before memory is measured."""
_SAY_S = 20.0
_SILENCE_S = 180.0


def main() -> int:
    """Run the targets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--target", default="", help="only targets whose name begins so, or so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("random", "atheris"), default="random", help="who makes the bytes")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--again", metavar="HEX", help="feed one target these bytes only, and show the traceback")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return work(arguments.child, arguments.inputs, arguments.seed, arguments.engine)
    targets = load_targets(instrumented=False)
    chosen = [target for target in targets.TARGETS if target.name.startswith(tuple(arguments.target.split(",")))]
    if arguments.again:
        with tempfile.TemporaryDirectory() as folder:
            print(chosen[0].make(Path(folder))(Choices(bytes.fromhex(arguments.again))))
        return 0
    total = sum(targets.SHARES[target.name] for target in chosen)
    began, results = time.monotonic(), []
    for target in chosen:
        inputs = max(1, round(arguments.inputs * targets.SHARES[target.name] / total))
        results.append(supervise(target.name, inputs, arguments.seed, arguments.engine))
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    inputs, faults = sum(r["inputs"] for r in results), [r for r in results if r["fault"]]
    print(
        f"{inputs:,} inputs in {time.monotonic() - began:.0f} s, {len(faults)} of {len(results)} targets with a fault"
    )
    return 1 if faults or inputs < arguments.inputs * 0.99 else 0


def load_targets(*, instrumented: bool) -> ModuleType:
    """The module of the targets; ``instrumented``: so that atheris sees which lines run."""
    if instrumented:
        import atheris

        with atheris.instrument_imports(include=["async_rl", "learner"]):
            from fuzzing import targets
    else:
        from fuzzing import targets
    return targets


def supervise(name: str, inputs: int, seed: int, engine: str) -> dict[str, Any]:
    """Run one target in a child and collect what it says; a child that dies or falls silent is a fault."""
    command = [sys.executable, __file__, "--child", name, "--inputs", str(inputs), "--seed", str(seed)]
    command += ["--engine", engine]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    result: dict[str, Any] = {"target": name, "inputs": 0, "fault": "", "reasons": {}}
    tail: list[str] = []
    signal.signal(signal.SIGALRM, lambda number, frame: child.kill())
    signal.setitimer(signal.ITIMER_REAL, _SILENCE_S)
    for line in child.stdout:
        signal.setitimer(signal.ITIMER_REAL, _SILENCE_S)
        if line.startswith("RESULT "):
            result = json.loads(line.removeprefix("RESULT "))
        elif line.startswith("PROGRESS "):
            print(line.removeprefix("PROGRESS "), end="", flush=True)
        else:
            tail = [*tail[-30:], line]
    signal.setitimer(signal.ITIMER_REAL, 0)
    code = child.wait(_SILENCE_S)
    if code and not result["fault"]:
        result["fault"] = f"the process ended with {code}:\n{''.join(tail)}"
    refusals = ", ".join(f"{reason} {n:,}" for reason, n in list(result["reasons"].items())[:12] if reason)
    print(
        f"{name:24s} {result['inputs']:>9,} inputs, {result['reasons'].get('', 0):,} accepted; longest "
        f"{result.get('longest_ms', 0):.1f} ms, memory +{result.get('grown_mb', 0):.1f} MB; refused: {refusals}",
        flush=True,
    )
    if result["fault"]:
        print(f"  FAULT: {result['fault']}", flush=True)
    return result


class Hung(BaseException):
    """An input took too long. No subclass of Exception: no handler in a target may take it for its own."""


class Feeder:
    """Feeds one target and keeps the account.

    Args:
        name: of the target.
        inputs: how many are wanted.
        engine: who makes the bytes.
    """

    def __init__(self, name: str, inputs: int, engine: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        targets = load_targets(instrumented=engine == "atheris").TARGETS
        self._run = next(t for t in targets if t.name == name).make(Path(self._folder.name))
        self.name, self.wanted, self.inputs = name, inputs, 0
        self.reasons: Counter[str] = Counter()
        self.fault = ""
        self._longest_s, self._base, self._most = 0.0, 0, 0
        self._began = self._said = time.monotonic()
        self._out = sys.stdout
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (targets print what they refuse)
        signal.signal(signal.SIGALRM, _hang)
        resource.setrlimit(resource.RLIMIT_AS, (_mapped() + SPARE_BYTES,) * 2)

    @property
    def done(self) -> bool:
        """Whether enough was fed, or a fault found."""
        return self.inputs >= self.wanted or bool(self.fault)

    def feed(self, data: bytes) -> None:
        """One run of the target."""
        signal.setitimer(signal.ITIMER_REAL, INPUT_S)
        began = time.thread_time()
        try:
            found = self._run(Choices(data))
        except (Exception, Hung):
            self.fault = f"--target {self.name!r} --again {data.hex()}\n{traceback.format_exc(limit=-8)}"
            found = []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._longest_s = max(self._longest_s, (time.thread_time() - began) / max(1, len(found)))
        self.reasons.update(found)
        before, self.inputs = self.inputs, self.inputs + len(found)
        if self.inputs // 256 != before // 256:
            self._look()

    def result(self) -> dict[str, Any]:
        """The account."""
        grown = max(0, self._most - self._base)
        if grown > GROWTH_BYTES and not self.fault:
            self.fault = f"resident memory grew by {grown >> 20} MiB"
        return {
            "target": self.name,
            "inputs": self.inputs,
            "seconds": round(time.monotonic() - self._began, 1),
            "longest_ms": round(self._longest_s * 1000, 2),
            "grown_mb": round(grown / 1e6, 1),
            "fault": self.fault,
            "reasons": dict(self.reasons.most_common()),
        }

    def end(self) -> int:
        """Say the result; the exit code."""
        result = self.result()
        self._out.write("RESULT " + json.dumps(result) + "\n")
        self._out.flush()
        self._folder.cleanup()
        return 1 if result["fault"] else 0

    def _look(self) -> None:
        resident = _resident()
        if self.inputs < WARM_UP or not self._base:
            self._base = resident
        self._most = max(self._most, resident)
        now = time.monotonic()
        if now - self._said > _SAY_S:
            self._said = now
            left_s = (now - self._began) / self.inputs * (self.wanted - self.inputs)
            self._out.write(f"PROGRESS   {self.name}: {self.inputs:,} of {self.wanted:,}, {left_s:.0f} s left\n")
            self._out.flush()


def work(name: str, inputs: int, seed: int, engine: str) -> int:
    """The child."""
    if engine == "atheris":
        import atheris

        feeder = Feeder(name, inputs, engine)

        def once(data: bytes) -> None:
            feeder.feed(data)
            if feeder.done:
                code = feeder.end()
                os._exit(code)  # libFuzzer has no other end

        atheris.Setup([sys.argv[0], f"-seed={seed + 1}", "-max_len=2048", "-rss_limit_mb=0", "-verbosity=0"], once)
        atheris.Fuzz()
    feeder = Feeder(name, inputs, engine)
    chance = random.Random(f"{seed} {name}")
    while not feeder.done:
        feeder.feed(chance.randbytes(chance.choice((8, 24, 64, 256, 1024))))
    return feeder.end()


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hung(f"longer than {INPUT_S:g} s")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
