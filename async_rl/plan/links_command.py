"""``async-rl plan CONFIG --parameters 70B``: what the links of a run of that size carry, as a table and in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from async_rl.config import Config, load_any
from async_rl.errors import ConfigError
from async_rl.plan.links import Load, Scale, fullest, loads, parse_parameters
from async_rl.runfolder import write_atomically
from async_rl.units import format_bytes

_GBIT = 1e9 / 8


def run_links(
    source: str,
    overrides: Sequence[str],
    *,
    parameters: str,
    hosts: int,
    ranks: int | None,
    step_s: float | None,
    mean_tokens: int | None,
    sent: float,
    link_gbit: float,
    out: Path | None,
) -> Scale:
    """Print the table, and write ``out``.

    Args:
        source: preset or file.
        overrides: settings.
        parameters: such as ``70B``.
        hosts: actor hosts.
        ranks: of the learner; None: as configured.
        step_s: seconds of a step.
        mean_tokens: of a trajectory, prompt included; None: the longest answer.
        sent: share of a version that is sent.
        link_gbit: of every host.
        out: JSON file.

    Raises:
        ConfigError: something is missing or out of range; says what.
    """
    config = load_any(source, overrides)
    if not isinstance(config, Config):
        raise ConfigError("--parameters: policies of control runs are too small for their links to matter")
    if step_s is None:
        raise ConfigError("how long does a step of the learner take? Give --step-s")
    _check(config, sent)
    scale = Scale(
        parameters=parse_parameters(parameters),
        published_bytes=2 if config.dtype == "bfloat16" else 4,
        hosts=hosts,
        relay=config.weights.relay,
        sent=sent,
        chunk_bytes=config.weights.chunk_bytes,
        ranks=ranks or config.learner.ranks,
        sharded=config.sharded,
        shard_optimizer=config.learner.shard_optimizer,
        step_s=step_s,
        tokens_per_step=config.buffer.groups_per_step
        * config.group_size
        * (config.max_sampled if mean_tokens is None else mean_tokens),
        micro_batch_tokens=config.learner.micro_batch_tokens,
        link_bytes_s=link_gbit * _GBIT,
        keys=bool(config.buffer.keys),
    )
    _show(scale)
    if out is not None:
        write_atomically(out, json.dumps(document(scale), indent=1) + "\n")
    return scale


def _check(config: Config, sent: float) -> None:
    """Refuse what the formulas are not of, rather than print numbers of another run.

    Raises:
        ConfigError: says why, and what to give.
    """
    if config.lora.is_on:
        raise ConfigError(
            f"--parameters with lora.rank = {config.lora.rank}: versions and gradients are those of the adapter, the "
            "formulas those of a whole model; give the adapter's own parameters and lora.rank = 0 for what the links "
            "carry (a rank's memory has the base beside that)"
        )
    if config.weights.path != "auto" and config.weights.path != "zmq":
        raise ConfigError(
            f"--parameters with weights.path = {config.weights.path!r}: the formulas are of versions that are pulled "
            "over the network; set weights.path = 'auto' (what the others carry: docs/scaling.md)"
        )
    if config.weights.delta and sent == 1:
        raise ConfigError("weights.delta: which share of a version is sent? Give --sent, such as 0.13")


def document(scale: Scale) -> dict[str, Any]:
    """For JSON."""
    return {
        "scale": asdict(scale),
        "version_bytes": scale.version_bytes,
        "live_s": scale.live_s,
        "rank_bytes": scale.rank_bytes,
        "shared_bytes": scale.shared_bytes,
        "loads": [asdict(load) for load in loads(scale)],
        "words": words(scale),
    }


def words(scale: Scale) -> list[str]:
    """The answer in sentences."""
    full = fullest(scale)
    return [
        f"A version: {format_bytes(scale.version_bytes)}; all hosts have it {_short(scale.live_s)} s after publishing.",
        f"Fullest: {full.where}, {_short(100 * full.share)} % of what it can carry. "
        + (f"That is too much: {full.remedy}." if full.share > 1 else f"When it is full: {full.remedy}."),
        f"Memory: {format_bytes(scale.rank_bytes)} a rank without activations, {format_bytes(scale.shared_bytes)} of "
        "/dev/shm on every host.",
    ]


def cells(load: Load) -> tuple[str, str, str, str]:
    """A row of the table."""
    return (
        load.where,
        format_bytes(load.bytes_per_step),
        f"{format_bytes(load.bytes_per_s)}/s",
        f"{_short(100 * load.share)} %",
    )


def _show(scale: Scale) -> None:
    table = Table("link or process", "a step", "a second", "of what it can carry")
    for load in loads(scale):
        table.add_row(*cells(load))
    console = Console()
    console.print(table)
    for sentence in words(scale):
        console.print(sentence, highlight=False)


def _short(number: float) -> str:
    """Three digits that matter."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def page_table() -> str:
    """The table of docs/scaling.md: three sizes, 100 Gbit/s a host, keys."""
    rows = [
        "| | 7B | 70B | 1T |",
        "|---|---|---|---|",
    ]
    scales = [_EXAMPLE(parameters=p, hosts=h, ranks=r, step_s=s) for p, h, r, s in _SIZES]
    direct = [replace(scale, relay=0) for scale in scales]
    changed = [replace(scale, sent=_SENT) for scale in scales]
    described: list[tuple[str, list[str]]] = [
        ("actor hosts, ranks, step", [f"{s.hosts}, {s.ranks}, {s.step_s:g} s" for s in scales]),
        ("a version W in bfloat16", [format_bytes(s.version_bytes) for s in scales]),
        ("learner host out, `relay = 0`", [_cell(s, 0) for s in direct]),
        ("learner host out, `relay = 4`", [_cell(s, 0) for s in scales]),
        ("the same with `delta`, d = 0.1", [_cell(s, 0) for s in changed]),
        ("actor host in", [_cell(s, 1) for s in scales]),
        ("actor host out", [_cell(s, 2) for s in scales]),
        ("trajectories into the learner host", [_cell(s, 3) for s in scales]),
        ("rank to ranks, `fsdp`", [_cell(s, 4) for s in scales]),
        ("chunk server with keys, `relay = 0`", [_cell(s, 5) for s in direct]),
        ("receiver of a host with keys, `relay = 4`", [_cell(s, 6) for s in scales]),
        ("receiver, differences applied", [_cell(s, 8) for s in changed]),
        ("live on all hosts, `relay = 0`", [f"{_short(s.live_s)} s" for s in direct]),
        ("live on all hosts, `relay = 4`", [f"{_short(s.live_s)} s" for s in scales]),
        ("the same with `delta`, d = 0.1", [f"{_short(s.live_s)} s" for s in changed]),
        ("memory of a rank, `fsdp`", [format_bytes(s.rank_bytes) for s in scales]),
        ("/dev/shm of a host", [format_bytes(s.shared_bytes) for s in scales]),
        ("fullest, `relay = 0`", [fullest(s).where.partition(":")[0] for s in direct]),
        ("fullest, `relay = 4`", [fullest(s).where.partition(":")[0] for s in scales]),
        ("fullest, `relay = 4` and `delta`", [fullest(s).where.partition(":")[0] for s in changed]),
    ]
    rows += [f"| {name} | {' | '.join(values)} |" for name, values in described]
    return "\n".join(rows)


def _cell(scale: Scale, index: int) -> str:
    load = loads(scale)[index]
    return f"{format_bytes(load.bytes_per_s)}/s ({_short(100 * load.share)} %)"


_SIZES = ((7e9, 8, 8, 30.0), (70e9, 32, 64, 120.0), (1e12, 128, 512, 600.0))
"""Parameters, actor hosts, ranks, seconds of a step."""
_SENT = 0.1
_EXAMPLE = partial(Scale, relay=4, sharded=True, tokens_per_step=64 * 16 * 4096.0, link_bytes_s=100 * _GBIT, keys=True)
