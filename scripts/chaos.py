"""Kill processes of a run at random and look whether anything is lost: the fault table, or a non-zero exit code.

    plan: a step, a role, a signal per fault ─► async-rl run PRESET ─┬─ step reached: SIGKILL, or SIGSTOP … SIGCONT
                                                                     └─ launcher killed: async-rl run --resume
    at the end: books, batches.jsonl, ages, the last evaluation beside an undisturbed run's, orphans, segments

    python scripts/chaos.py --preset arithmetic --kills 200 --seed 0 --out runs/chaos

Steps are the clock, so the faults are spread over the whole run however fast the machine is.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from chaos_verdict import verdict
from rich.console import Console
from rich.table import Table

from async_rl.config import ControlConfig, load_any
from async_rl.launch.janitor import RUN_VARIABLE
from async_rl.process import die_with_parent
from async_rl.runfolder import RunFolder, read_json

ROLES = {
    "server": ("async_rl.buffer.server",),
    "torchrun": ("torch.distributed.run",),
    "learner": ("learner.main", "learner.control.main"),
    "actor": ("actors.main", "actors.control.main"),
    "evaluator": ("actors.evaluation.main", "actors.control.evaluation"),
    "scorer": ("actors.scorers.main",),
    "verifier": ("actors.verifiers.worker",),
    "environment": ("actors.environments.worker",),
    "engine": ("VLLM::EngineCore", "multiprocessing.spawn"),
}
"""What a process is, by a word of its command line; the launcher is known by its process id."""
POOLED = ("verifier", "environment", "engine")
"""Children whose parents start them again when they need them, or end with them."""
PATIENCE_S = 240.0
"""A fault from which the run has not recovered in this time is a loss."""
_LOOK_S = 0.05


class LostError(Exception):
    """Something was lost, or did not come back."""


@dataclass
class Fault:
    """One injected fault and what came of it."""

    step: int
    """It is injected once this step is trained."""
    role: str
    signal: str
    """``KILL``, or ``STOP`` for longer than the heartbeat period."""
    recovered_s: float | None = None


@dataclass
class Run:
    """A run under fire."""

    out: Path
    settings: list[str]
    preset: str
    process: subprocess.Popen[bytes] | None = None
    faults: list[Fault] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    """Processes, segments or temporary files that outlived their launcher by more than 10 s."""
    lives: set[tuple[str, str]] = field(default_factory=set)
    """Token and temporary folder of each launcher's life, from the command line of its janitor."""

    def start(self, *, resume: bool) -> None:
        """Start the launcher, or start it again."""
        what = ["--resume", str(self.out)] if resume else [self.preset, "--out", str(self.out)]
        sets = [] if resume else [word for setting in self.settings for word in ("--set", setting)]
        log = (self.out.parent / f"{self.out.name}.log").open("ab")
        command = [sys.executable, "-m", "async_rl", "run", *what, *sets]
        me = os.getpid()  # should this script be killed, the run is not to go on
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=lambda: die_with_parent(me)
        )
        log.close()

    @property
    def step(self) -> int:
        """Steps trained so far, by the server's books."""
        return int(read_json(self.out / "books.json").get("step", 0))

    @property
    def ended(self) -> bool:
        """Whether the launcher has ended."""
        assert self.process is not None
        return self.process.poll() is not None


def main(
    preset: Annotated[str, typer.Option()] = "arithmetic",
    kills: Annotated[int, typer.Option(min=1, help="faults to inject")] = 200,
    seed: Annotated[int, typer.Option(help="of the faults")] = 0,
    out: Annotated[Path, typer.Option(help="folder, made if missing")] = Path("runs/chaos"),
    steps: Annotated[int, typer.Option(help="learner steps of the run; 0: some per fault, at least the preset's")] = 0,
    stops: Annotated[float, typer.Option(help="share of faults that freeze instead of kill")] = 0.15,
    roles: Annotated[str, typer.Option(help="comma-separated; empty: every role that the run has")] = "",
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the run")] = None,
    baseline: Annotated[bool, typer.Option(help="compare with an undisturbed run")] = True,
) -> None:
    """Inject faults, print the table, exit non-zero on any loss."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [f"steps={steps or enough_steps(preset, kills)}", "checkpoint.every=5", "buffer.heartbeat_s=3"]
    chosen += ["log.wandb=false", "log.tensorboard=false", *(settings or [])]
    run = Run((out / f"{preset}-{seed}").resolve(), chosen, preset)
    if run.out.exists():
        raise typer.BadParameter(f"{run.out} is there from an earlier time: choose another --out or --seed")
    draw = random.Random(seed)
    began = time.monotonic()
    run.start(resume=False)
    losses: list[str] = []
    try:
        bombard(run, draw, kills, stops, [r for r in roles.split(",") if r], console)
        wait(lambda: run.ended, "the end of the run", 4 * PATIENCE_S)
    except LostError as error:
        losses.append(str(error))
    finally:
        losses += end(run)
    undisturbed = undisturbed_evaluation(run, out) if baseline and not losses else None
    losses += verdict(run.out, undisturbed)
    console.print(table(run))
    summary = summarise(run, undisturbed or {}, losses, time.monotonic() - began)
    (out / f"chaos-{preset}-{seed}.json").write_text(json.dumps(summary, indent=1) + "\n")
    for name in ("wall_s", "books", "filtered", "failed", "refused", "largest_age", "bound", "evaluation"):
        console.print(f"{name}: {summary[name]}")
    for loss in losses:
        console.print(f"[red]lost[/red]: {loss}")
    console.print("nothing lost" if not losses else f"{len(losses)} losses")
    raise typer.Exit(1 if losses else 0)


def enough_steps(preset: str, kills: int) -> int:
    """Steps for all faults: those that are made until a fault is recovered from, and those that the preset makes."""
    config = load_any(preset)
    per_fault = 8 if isinstance(config, ControlConfig) else 2  # control steps are short beside a recovery
    return max(per_fault * kills, config.steps)


# ---------------------------------------------------------------------- faults


def bombard(run: Run, draw: random.Random, kills: int, stops: float, roles: list[str], console: Console) -> None:
    """Inject the faults one after the other, each once its step is trained and the one before is recovered from.

    Raises:
        LostError: the run ended early, or did not recover.
    """
    wait(lambda: run.step > 0 or run.ended, "the first step", PATIENCE_S)
    steps = int(read_json(run.out / "books.json").get("steps", 1))
    when = sorted(draw.randrange(1, max(2, steps - 8)) for _ in range(kills))
    for count, step in enumerate(when, 1):
        # a process that was just killed may not be there again: then the fault comes a little later
        wait(lambda step=step: run.ended or (run.step >= step and targets(run, roles)), f"step {step}", PATIENCE_S)  # type: ignore[misc]
        living = targets(run, roles)
        if run.ended or not living:
            too_few = f"the run ended at step {run.step}, before fault {count} of {kills}"
            raise LostError(f"{too_few}: give it more --steps" if has_completed(run) else too_few)
        role = draw.choice(sorted(living))
        fault = Fault(step, role, "STOP" if role in ("actor", "scorer") and draw.random() < stops else "KILL")
        run.faults.append(fault)
        inject(run, fault, draw.choice(living[role]))
        left = (len(when) - count) * statistics.mean(f.recovered_s or 0.0 for f in run.faults)
        console.print(
            f"{count}/{kills} step {run.step}: {fault.signal} {role}, back after {fault.recovered_s:.1f} s "
            f"(about {left:.0f} s of recoveries left)"
        )


def inject(run: Run, fault: Fault, pid: int) -> None:
    """Signal a process and wait until the run has recovered: its place is taken and a step was trained after that."""
    began = time.monotonic()
    before = set(by_role(run).get(fault.role, ()))
    if fault.signal == "STOP":
        send(pid, signal.SIGSTOP)
        frozen_s = 2 * load_any(str(run.out / "config.toml")).buffer.heartbeat_s
        wait(lambda: time.monotonic() - began > frozen_s, "the freeze", PATIENCE_S + frozen_s)
        send(pid, signal.SIGCONT)
    else:
        send(pid, signal.SIGKILL)
    if fault.role == "launcher":
        run.leftovers += gone_within(run, 10.0)
        run.start(resume=True)
    lowest: int | None = None

    def recovered() -> bool:
        nonlocal lowest
        if run.ended:  # the run may have had nothing left to do
            return _ended_well(run, fault)
        now = set(by_role(run).get(fault.role, ()))
        # the launcher replaces one process by one; a pool of children grows again when it is needed
        is_back = fault.signal == "STOP" or fault.role in POOLED or (len(now) >= len(before) and pid not in now)
        if not is_back:
            return False
        step = run.step  # goes back with a learner that begins at a checkpoint, and counts from there
        lowest = step if lowest is None else min(lowest, step)
        return step > lowest or nearly_done(run)

    wait(recovered, f"recovery from {fault.signal} of {fault.role}", PATIENCE_S)
    fault.recovered_s = time.monotonic() - began


def _ended_well(run: Run, fault: Fault) -> bool:
    if has_completed(run):
        return True
    log = run.out.parent / f"{run.out.name}.log"
    raise LostError(f"the run ended after {fault.signal} of {fault.role}; see {log}")


def has_completed(run: Run) -> bool:
    """Whether this life of the launcher has brought the run to its end."""
    assert run.process is not None
    return run.process.poll() == 0


def targets(run: Run, roles: list[str]) -> dict[str, list[int]]:
    """Process ids by role, of those roles that may be hit."""
    return {role: pids for role, pids in by_role(run).items() if not roles or role in roles}


def nearly_done(run: Run) -> bool:
    """Whether no step is left to train."""
    books = read_json(run.out / "books.json")
    return bool(books) and int(books["step"]) >= int(books["steps"])


def by_role(run: Run) -> dict[str, list[int]]:
    """Process ids of the run by role, the launcher's included."""
    assert run.process is not None
    found: dict[str, list[int]] = {"launcher": [run.process.pid]} if not run.ended else {}
    for pid, command in commands(descendants(run.process.pid)):
        if "async_rl.launch.janitor" in command:
            _, _, after = command.partition("async_rl.launch.janitor ")
            _, token, temporary = after.split(" ", 2)
            run.lives.add((token, temporary.strip()))
        role = next((r for r, words in ROLES.items() if any(word in command for word in words)), None)
        if role == "learner" and "torch.distributed.run" in command:
            role = "torchrun"
        if role is not None:
            found.setdefault(role, []).append(pid)
    return found


def descendants(root: int) -> set[int]:
    """Process ids below ``root``."""
    from async_rl.launch.children import descendants as below

    return set(below(root))


def commands(pids: set[int]) -> Iterator[tuple[int, str]]:
    """Process id and command line of those that are still there and are no zombies."""
    for pid in sorted(pids):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if line:
            yield pid, line


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may have ended meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def wait(condition: Callable[[], bool], what: str, limit_s: float) -> None:
    """Look again and again (the run's files and /proc have no event to wait for).

    Raises:
        LostError: it did not happen in time.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise LostError(f"{what} did not come within {limit_s:.0f} s")
        time.sleep(_LOOK_S)


# ---------------------------------------------------------------------- the verdict


def end(run: Run) -> list[str]:
    """End what still runs; processes and segments that are left are losses."""
    assert run.process is not None
    if not run.ended:
        run.process.send_signal(signal.SIGINT)
        try:
            run.process.wait(60)
        except subprocess.TimeoutExpired:
            run.process.kill()
    return run.leftovers + gone_within(run, 10.0)


def gone_within(run: Run, limit_s: float) -> list[str]:
    """What is left of the run without its launcher after that time."""
    assert run.process is not None
    run.process.wait(PATIENCE_S)
    run_id = str(read_json(run.out / "server.json").get("run_id", "none"))

    def left() -> list[str]:
        found = [f"process {pid}: {line[:120]}" for pid, line in commands(of_run(run))]
        found += [f"segment {path}" for path in Path("/dev/shm").glob(f"async_rl-{run_id}-*")]
        return found + [f"temporary files in {folder}" for _, folder in run.lives if Path(folder).exists()]

    try:
        wait(lambda: not left(), "the end of all processes", limit_s)
    except LostError:
        return left()
    return []


def of_run(run: Run) -> set[int]:
    """Processes that carry the token of one of the run's lives, or name its folder; its janitors, too."""
    tokens = [f"{RUN_VARIABLE}={token}".encode() for token, _ in run.lives]
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                told = (entry / "cmdline").read_bytes().split(b"\0")
                carried = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended, or is of another user
            folder = str(run.out).encode()
            is_named = any(word == folder or word.startswith(folder + b"/") for word in told)
            is_janitor = any(token.encode() in told for token, _ in run.lives)
            if is_named or is_janitor or any(token in carried for token in tokens):
                found.add(int(entry.name))
    return found


def undisturbed_evaluation(run: Run, out: Path) -> dict[str, float]:
    """Metrics of the last version of the same run without faults, which is made once; empty if it has none."""
    calm = Run(out.resolve() / f"{run.out.name}-undisturbed", run.settings, run.preset)
    if not calm.out.exists():
        calm.start(resume=False)
        try:
            wait(lambda: calm.ended, "the end of the undisturbed run", 20 * PATIENCE_S)
        except LostError:
            end(calm)
    is_same = run_settings(calm.out) == run_settings(run.out)
    evals, steps = RunFolder(calm.out).evals, read_json(calm.out / "books.json").get("steps")
    return evals[-1]["metrics"] if is_same and evals and evals[-1]["version"] == steps else {}


def run_settings(out: Path) -> dict[str, Any]:
    """The whole configuration of a run."""
    return load_any(str(out / "config.toml")).model_dump()


def last_evaluation(out: Path) -> dict[str, float]:
    """Metrics of the newest evaluated version."""
    evals = RunFolder(out).evals
    return evals[-1]["metrics"] if evals else {}


def table(run: Run) -> Table:
    """The fault table."""
    shown = Table(
        "fault", "times", "recovered", "median s", "longest s", title=f"{run.preset}: {len(run.faults)} faults"
    )
    kinds = sorted({(f.role, f.signal) for f in run.faults})
    for role, name in kinds:
        times = [f.recovered_s for f in run.faults if (f.role, f.signal) == (role, name)]
        back = [t for t in times if t is not None]
        middle = f"{statistics.median(back):.1f}" if back else "-"
        shown.add_row(f"SIG{name} {role}", str(len(times)), str(len(back)), middle, f"{max(back, default=0):.1f}")
    return shown


def summarise(run: Run, undisturbed: dict[str, float], losses: list[str], wall_s: float) -> dict[str, Any]:
    """All figures, for the JSON file."""
    books = read_json(run.out / "books.json")
    staleness = books.get("staleness", {})
    return {
        "preset": run.preset,
        "settings": run.settings,
        "wall_s": round(wall_s, 1),
        "faults": [asdict(f) for f in run.faults],
        "books": books.get("books"),
        "filtered": books.get("filtered"),
        "failed": books.get("failed"),
        "refused": books.get("refused"),
        "largest_age": staleness.get("max"),
        "bound": staleness.get("bound"),
        "evaluation": last_evaluation(run.out),
        "undisturbed": undisturbed,
        "losses": losses,
    }


if __name__ == "__main__":
    typer.run(main)
