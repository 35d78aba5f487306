"""``async-rl bench utilization``: how busy actors and learner keep each other, mode by mode, beside the ideal.

modes × ratios ─► utilization_run.measure, one after the other ─► table, figures (JSON), plot

| mode         | η | weights                               | what it is                                    |
|--------------|---|---------------------------------------|-----------------------------------------------|
| synchronous  | 0 | nothing runs when they come           | generate a batch, train it                    |
| one_step_off | 1 | drained                               | train a batch while the next one is generated |
| drained      | 4 | when all running sequences have ended | asynchronous, each sequence of one version    |
| in_flight    | 4 | between two decode steps              | what this system does                         |

The ideal speed-up over taking turns is (T_gen + T_train) / max(T_gen, T_train), with T_gen the time that all slots,
full, need for the tokens of a batch. Taking turns wastes more than that where lengths differ: slots are idle until the
longest answer has ended, so that the measured speed-up can pass the ideal.

Beside each measurement stands what ``async-rl plan`` predicts from the same numbers.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.bench.figures import REPEATS, Figure, show
from async_rl.bench.utilization_run import MODES, Measured, Mode, Scenario, measure
from async_rl.errors import ConfigError
from async_rl.lengths import Lengths
from async_rl.plan.candidates import predict
from async_rl.plan.outcome import Outcome
from async_rl.plan.scenario import Speeds
from async_rl.plan.scenario import scenario as planned_scenario
from async_rl.runfolder import write_atomically

GROUPS_PER_ACTOR = 16
"""Groups of a batch for each actor: with a batch four times as large as all slots, the longest answer takes about as
long as the batch."""
_BALANCED, _FASTER, _SPEEDUP = 0.97, 0.98, 0.95
"""Least busy share of both sides where they are equally fast, of the slower side where they are not; least share of the
ideal speed-up where they are equally fast."""


def utilization(
    *,
    out: Path | None,
    plot: Path | None,
    seconds: float,
    lengths: str,
    ratios: str,
    modes: str,
    actors: int,
    step_s: float,
    repeats: int = REPEATS,
) -> list[Measured]:
    """Run all modes at all ratios, print what they reach, write the files that are asked for.

    Args:
        out: JSON file.
        plot: SVG file, or HTML that holds it.
        seconds: measured time of a run.
        lengths: see :meth:`async_rl.lengths.Lengths.parse`.
        ratios: speeds of all actors over the learner's, with commas.
        modes: of the table above, with commas.
        actors: processes.
        step_s: seconds of a learner step.
        repeats: parts of the measured time, each of which gives a value.

    Raises:
        ConfigError: an option cannot be read.
        AsyncRLError: a run failed.
    """
    wanted = [
        scenario_of(mode, ratio, lengths, seconds, actors, step_s)
        for ratio in parse_ratios(ratios)
        for mode in parse_modes(modes)
    ]
    Lengths.parse(lengths, median=1)  # a file that is not there is found now
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise ConfigError(f"--plot {plot}: write it as FILE.svg or FILE.html")
    measured = []
    with tempfile.TemporaryDirectory(prefix="async_rl-bench-") as folder:
        for number, scenario in enumerate(wanted):
            label = f"{scenario.mode}, ratio {scenario.ratio:g}"
            print(f"{number + 1}/{len(wanted)}: {label}", flush=True)
            measured.append(measure(scenario, Path(folder) / str(number), repeats))
    _print_table(measured)
    facts = {"lengths": lengths, "runs": [to_plain(m, baseline_of(m, measured)) for m in measured]}
    show("utilization", [figure for m in measured for figure in figures_of(m, measured)], out, **facts)
    if plot is not None:
        from async_rl.bench.utilization_plot import chart, page

        picture = chart([to_plain(m, baseline_of(m, measured)) for m in measured])
        write_atomically(plot, picture if plot.suffix == ".svg" else page(picture))
    return measured


def scenario_of(mode: Mode, ratio: float, lengths: str, seconds: float, actors: int, step_s: float) -> Scenario:
    """One run."""
    return Scenario(
        mode=mode,
        ratio=ratio,
        lengths=lengths,
        seconds=seconds,
        actors=actors,
        groups_per_step=GROUPS_PER_ACTOR * actors,
        step_s=step_s,
    )


def parse_modes(text: str) -> list[Mode]:
    """Modes by name.

    Raises:
        ConfigError: one is unknown.
    """
    names = [name.strip().replace("-", "_") for name in text.split(",")]
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise ConfigError(f"--modes {text}: there is no mode {unknown[0]!r}; known are {', '.join(MODES)}")
    return [mode for mode in MODES if mode in names]


def parse_ratios(text: str) -> list[float]:
    """Ratios, each above 0.

    Raises:
        ConfigError: one is no such number.
    """
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = [0.0]
    if not all(0 < ratio < 1e3 for ratio in ratios):
        raise ConfigError(f"--ratios {text}: expected positive numbers with commas between, such as 0.5,1,2")
    return ratios


@functools.cache
def predicted(scenario: Scenario) -> Outcome:
    """What ``async-rl plan`` says of it, from the same speeds and lengths."""
    config = scenario.config(Path())
    speeds = Speeds(slot_tokens_per_s=scenario.tokens_per_s(), step_s=scenario.step_s)
    wanted = planned_scenario(config, speeds=speeds, lengths=scenario.distribution, actors=scenario.actors, ranks=1)
    return predict(wanted).outcome


def baseline_of(run: Measured, measured: Sequence[Measured]) -> Measured | None:
    """The synchronous run of the same ratio, if there is one."""
    same = [m for m in measured if m.scenario.ratio == run.scenario.ratio]
    return next((m for m in same if m.scenario.mode == "synchronous"), None)


def figures_of(run: Measured, measured: Sequence[Measured]) -> list[Figure]:
    """Busy shares and speed-up of a run, with the bars that hold for in-flight updates and log-normal lengths."""
    mode, ratio = run.scenario.mode, run.scenario.ratio
    promised = mode == "in_flight" and run.scenario.lengths == "lognormal"
    bars = {"learner": learner_bar(ratio), "actors": learner_bar(1 / ratio)} if promised else {}
    found = [
        Figure(name=f"{side} busy, {mode}, ratio {ratio:g}", unit="", values=values, bar=bars.get(side))
        for side, values in (("learner", run.learner), ("actors", run.actors))
    ]
    synchronous = baseline_of(run, measured)
    if synchronous is not None and synchronous is not run:
        found.append(
            Figure(
                name=f"steps, {mode}, ratio {ratio:g}, ideal {run.ideal:.2f}",
                unit="1/s",
                values=run.steps_per_s,
                baseline="synchronous",
                baseline_values=(synchronous.rate,) * len(run.steps_per_s),
                bar=round(_SPEEDUP * run.ideal, 3) if promised and ratio == 1 else None,
            )
        )
    return found


def learner_bar(ratio: float) -> float | None:
    """Least busy share of a side that is ``1 / ratio`` times as fast as the other; None: it must wait for that one."""
    if ratio == 1:
        return _BALANCED
    return _FASTER if ratio >= 2 else None


def to_plain(run: Measured, synchronous: Measured | None) -> dict[str, Any]:
    """A run for the JSON file and the plot."""
    scenario = run.scenario
    plan = predicted(scenario)
    return {
        "mode": scenario.mode,
        "ratio": scenario.ratio,
        "staleness_bound": scenario.staleness,
        "actors": scenario.actors,
        "slots": scenario.slots,
        "tokens_per_s": scenario.tokens_per_s(),
        "groups_per_step": scenario.groups_per_step,
        "group_size": scenario.group_size,
        "step_s": scenario.step_s,
        "generation_s": run.generation_s,
        "tokens_per_step": run.tokens_per_step,
        "steps": run.steps,
        "seconds": run.seconds,
        "steps_per_s": run.rate,
        "speedup": run.rate / synchronous.rate if synchronous is not None else None,
        "ideal": run.ideal,
        "learner_busy": sum(run.learner) / len(run.learner),
        "actors_busy": sum(run.actors) / len(run.actors),
        "plan": {"learner_busy": round(plan.learner, 4), "actors_busy": round(plan.actors, 4)},
        "timers": dict(run.timers),
        "states": {role: dict(shares) for role, shares in run.states.items()},
    }


def _print_table(measured: Sequence[Measured]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("mode", "ratio", "speed-up", "ideal", "learner", "actors", "plan", "data", "timer")
    table = Table(
        *columns,
        title="how busy each side was",
        caption="learner: step time × steps; actors: slots in use; plan: both as `async-rl plan` predicts them; data: "
        "the learner waited for it; timer: actors, by their own, busy while any slot is",
    )
    for run in measured:
        row = to_plain(run, baseline_of(run, measured))
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f} ×"
        waits = row["states"]["learner"].get("waiting_data", 0.0)
        shares = (row["learner_busy"], row["actors_busy"], waits, row["timers"]["actor"])
        texts = [f"{100 * share:.1f} %" for share in shares]
        texts.insert(2, " / ".join(f"{100 * share:.1f}" for share in row["plan"].values()))
        table.add_row(row["mode"], f"{row['ratio']:g}", speedup, f"{row['ideal']:.2f} ×", *texts)
    Console().print(table)
