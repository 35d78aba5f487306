"""``async-rl bench WHAT``: the options of each benchmark; what it does lies in the module that it names.

transport, buffer, weights, utilization ─► async_rl/bench/     learner ─► learner.bench     engine ─► actors.bench
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from async_rl.bench.figures import REPEATS
from async_rl.errors import AsyncRLError, ConfigError

app = typer.Typer(
    help="Measure this machine: each figure stands beside a baseline of the same run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _writable(path: Path | None) -> Path | None:
    """A file that can be written: found out before anything is measured."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK)):
        raise ConfigError(f"{path}: no file can be written there; name one in a folder that exists")
    return path


Out = Annotated[Path | None, typer.Option(metavar="FILE.json", help="write all values there", callback=_writable)]
Repeats = Annotated[int, typer.Option(min=1, help="repetitions of each figure and its baseline")]
DEFAULT_REPEATS = REPEATS
_LONGEST_S = 12 * 3_600.0
_END_S = 40.0
_MOST_S, _MOST_STEP_S, _MOST_ACTORS, _MOST_MEGABYTES = 3_600, 600, 1_000, 100_000


@app.callback()
def _end_in_order(context: typer.Context) -> None:
    """Measure this machine: each figure stands beside a baseline of the same run."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: folders and segments are removed on the way out
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)
            context.call_on_close(functools.partial(signal.signal, number, signal.SIG_DFL))


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


@app.command()
def utilization(
    out: Out = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg|html", help="draw all runs there", callback=_writable)
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=_MOST_S, help="measured seconds of a run; it takes about 15 s more")
    ] = 6.0,
    lengths: Annotated[
        str, typer.Option(metavar="constant|lognormal|FILE", help="of answers; a file of lengths, or a run folder")
    ] = "lognormal",
    ratios: Annotated[str, typer.Option(help="speed of all actors over the learner's, such as 0.5,1,2")] = "1",
    modes: Annotated[
        str, typer.Option(help="which of synchronous, one-step-off, drained, in-flight")
    ] = "synchronous,one-step-off,drained,in-flight",
    actors: Annotated[int, typer.Option(min=1, max=_MOST_ACTORS, help="actor processes")] = 2,
    step_s: Annotated[float, typer.Option(min=0.01, max=_MOST_STEP_S, help="seconds of a learner step")] = 0.5,
) -> None:
    """How busy actors and learner keep each other: real processes, mock engines, a learner that waits."""
    from async_rl.bench.utilization import utilization as run

    run(
        out=out,
        plot=plot,
        seconds=seconds,
        lengths=lengths,
        ratios=ratios,
        modes=modes,
        actors=actors,
        step_s=step_s,
    )


@app.command()
def learner(
    out: Out = None,
    case: Annotated[str, typer.Option(metavar="arithmetic|smollm2", help="batch to train; empty: both")] = "",
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Hugging Face folder instead of the case's own model")
    ] = None,
    sequences: Annotated[int, typer.Option(min=0, help="of the batch; 0: 512 sums, 8 of smollm2's")] = 0,
    repeats: Repeats = DEFAULT_REPEATS,
) -> None:
    """Forward and backward of the token learner beside a padded one of the same batch: speed and peak memory."""
    options = {"case": case, "model": model, "sequences": sequences, "repeats": repeats, "out": out}
    _run_module("learner.bench.learner", options)


@app.command()
def engine(
    out: Out = None,
    case: Annotated[
        str, typer.Option(metavar="lengths|task", help="log-normal lengths, or sums in groups of 16; empty: both")
    ] = "",
    baseline: Annotated[
        str, typer.Option(metavar="vllm|loop", help="empty: vllm where it is installed, else a plain loop")
    ] = "",
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Hugging Face folder; empty: tiny")] = None,
    slots: Annotated[int, typer.Option(min=0, help="sequences decoded together; 0: 256, then 1,024")] = 0,
    sequences: Annotated[int, typer.Option(min=0, help="in all; 0: three times the slots")] = 0,
    repeats: Repeats = DEFAULT_REPEATS,
) -> None:
    """Tokens per second of the embedded engine, slots refilled, beside vLLM's CPU build or a plain loop; one thread."""
    options = {
        "case": case,
        "baseline": baseline,
        "model": model,
        "slots": slots,
        "sequences": sequences,
        "repeats": repeats,
        "out": out,
    }
    _run_module("actors.bench.engine", options)


def _run_module(module: str, options: Mapping[str, object]) -> None:
    """Run ``python -m module`` with those options that are given; its exit code becomes ours."""
    given = [word for name, value in options.items() if value for word in (f"--{name}", str(value))]
    child = subprocess.Popen([sys.executable, "-m", module, *given], start_new_session=True)  # Ctrl-C comes from us
    try:
        code = child.wait(_LONGEST_S)
    except BaseException:
        child.send_signal(signal.SIGINT)  # it removes what it made
        try:
            child.wait(_END_S)
        finally:
            child.kill()
            child.wait(_END_S)
        raise
    if code < 0:
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        raise AsyncRLError(f"{module} was ended by {signal.Signals(-code).name}{hint}")
    if code:
        raise typer.Exit(code)


@app.command()
def buffer(
    nbytes: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="of a trajectory, such as 1KiB")] = "1KiB",
    actors: Annotated[int, typer.Option(min=1, max=1000, help="connections of mock actors")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, max=_MOST_S, help="of each measurement")] = 3.0,
    repeats: Repeats = DEFAULT_REPEATS,
    out: Out = None,
) -> None:
    """Trajectories per second that the buffer server takes from mock actors, and the time to its acknowledgement."""
    from async_rl.bench.buffer import buffer as run
    from async_rl.units import parse_bytes

    run(nbytes=parse_bytes(nbytes), actors=actors, seconds=seconds, repeats=repeats, out=out)


@app.command()
def transport(
    nbytes: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="of a trajectory, such as 1MiB")] = "1MiB",
    count: Annotated[int, typer.Option(min=1, help="trajectories of each measurement")] = 128,
    repeats: Repeats = DEFAULT_REPEATS,
    out: Out = None,
) -> None:
    """GB/s from an actor to the buffer server and on to the learner, beside raw pyzmq with the same frames."""
    from async_rl.bench.transport import transport as run
    from async_rl.units import parse_bytes

    run(nbytes=parse_bytes(nbytes), count=count, repeats=repeats, out=out)


@app.command()
def weights(
    megabytes: Annotated[
        float | None,
        typer.Option(min=0.001, max=_MOST_MEGABYTES, help="of a version; default: 500, with --relay 20"),
    ] = None,
    receivers: Annotated[str, typer.Option(help="processes that receive over TCP, such as 1,4")] = "1,4",
    relay: Annotated[
        int, typer.Option(min=0, max=64, help="receivers pretend to be hosts that send on, each to so many; 0: off")
    ] = 0,
    delta: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="send the difference of the two newest checkpoints of this run instead"),
    ] = None,
    repeats: Repeats = DEFAULT_REPEATS,
    out: Out = None,
) -> None:
    """From publishing to verified bytes: shared memory beside a memcpy, TCP beside raw pyzmq with the same frames."""
    from async_rl.bench.weights import weights as run

    nbytes = None if megabytes is None else round(megabytes * 1e6)
    run(nbytes=nbytes, receivers=receivers, relay=relay, delta=delta, repeats=repeats, out=out)
