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
