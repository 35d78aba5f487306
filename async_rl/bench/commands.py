"""``async-rl bench WHAT``: the options of each benchmark; what it does lies in the module that it names.

transport, buffer, weights, utilization ─► async_rl/bench/     learner ─► learner.bench     engine ─► actors.bench
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from async_rl.bench.figures import REPEATS

app = typer.Typer(
    help="Measure this machine: each figure stands beside a baseline of the same run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[Path | None, typer.Option(metavar="FILE.json", help="write all values there")]
Repeats = Annotated[int, typer.Option(min=1, help="repetitions of each figure and its baseline")]
DEFAULT_REPEATS = REPEATS


@app.command()
def utilization(
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg|html", help="draw all runs there")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="measured seconds of a run; it takes about 15 s more")] = 6.0,
    lengths: Annotated[
        str, typer.Option(metavar="constant|lognormal|FILE", help="of answers; a file of lengths, or a run folder")
    ] = "lognormal",
    ratios: Annotated[str, typer.Option(help="speed of all actors over the learner's, such as 0.5,1,2")] = "1",
    modes: Annotated[
        str, typer.Option(help="which of synchronous, one-step-off, drained, in-flight")
    ] = "synchronous,one-step-off,drained,in-flight",
    actors: Annotated[int, typer.Option(min=1, help="actor processes")] = 2,
    step_s: Annotated[float, typer.Option(min=0.01, help="seconds of a learner step")] = 0.5,
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
