"""What the settings mean together, printed before a run starts: batch, tickets, staleness, bytes per weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.config import AnyConfig, Config, ControlConfig
from async_rl.control.spaces import Spaces
from async_rl.launch import control_overview
from async_rl.safetensors_files import read_entries, read_folder
from async_rl.units import format_bytes

SMALL_GROUP = 4
"""Below this size the group's mean and deviation are too noisy to normalise by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Numbers derived from a configuration."""

    sequences_per_step: int
    """groups per step × group size."""
    sampled_tokens_per_step: int
    """Most sampled tokens of one step."""
    updates_per_step: int
    """Optimiser updates: mini-batches × epochs."""
    tickets_in_flight: int
    """Most tickets that are open, scoring or ready: (η + 1) · groups per step."""
    staleness_bound: int
    """η: no token that is trained on is older."""
    staleness_waiting: int
    """Expected age while the learner waits for data."""
    staleness_ahead: int
    """Expected age while the actors are ahead and the buffer is full."""
    weight_bytes: int | None
    """Bytes of one version; ``None`` when the model folder is not there yet."""


def overview(config: Config, model: Path | None) -> Overview:
    """Derive the numbers; ``model`` is the resolved model folder where known."""
    groups, size = config.buffer.groups_per_step, config.sampling.group_size
    eta = config.buffer.max_staleness
    parameters = num_published(config, model) if model else None
    return Overview(
        sequences_per_step=groups * size,
        sampled_tokens_per_step=groups * size * config.max_sampled,
        updates_per_step=config.algorithm.minibatches * config.algorithm.epochs,
        tickets_in_flight=(eta + 1) * groups,
        staleness_bound=eta,
        staleness_waiting=min(1, eta),
        staleness_ahead=eta,
        weight_bytes=None if parameters is None else parameters * (4 if config.model.dtype == "float32" else 2),
    )


def num_parameters(folder: Path) -> int | None:
    """Parameters in a model folder by the headers of its safetensors files; ``None`` when there are none.

    Raises:
        ConfigError: a file is damaged or cut short.
    """
    files = sorted(folder.glob("*.safetensors"))
    return sum(entry.numel for file in files for entry in read_entries(file).values()) if files else None


def num_published(config: Config, folder: Path) -> int | None:
    """Parameters of a version of the weights: those of the model, or of its adapter; ``None`` when it is not there yet.

    Raises:
        ConfigError: a file is damaged or cut short.
    """
    total = num_parameters(folder)
    if total is None or not config.lora.is_on:
        return total
    targets = tuple(f".{name}.weight" for name in config.lora.targets)
    return sum(config.lora.rank * sum(e.shape) for name, e in read_folder(folder).items() if name.endswith(targets))


def warnings(config: Config) -> list[str]:
    """Settings that are allowed but seldom meant."""
    found = []
    if config.sampling.group_size < SMALL_GROUP:
        found.append(
            f"sampling.group_size = {config.sampling.group_size}: advantages of so small a group are mostly noise; "
            f"{SMALL_GROUP} or more is usual"
        )
    if config.task.verifiers > 1 and config.actors.engine == "mock":
        found.append("task.verifiers > 1 with actors.engine = 'mock': rewards are cheap there")
    return found


def in_a_line(config: AnyConfig) -> str:
    """What a configuration trains, on what, for how long."""
    if isinstance(config, ControlConfig):
        return f"{config.policy.network} on {config.env.id}, {config.steps} steps, {config.algorithm.name}"
    task = config.task.environment or config.task.data or config.task.name
    return f"{config.model.path} on {task}, {config.steps} steps, engine {config.actors.engine}"


def print_overview(console: Console, config: AnyConfig, found: Path | Spaces | None, out: Path) -> None:
    """Print the table and the warnings.

    Args:
        console: where.
        config: the run.
        found: model folder, or what the environment offers; None: nothing yet.
        out: run folder.
    """
    if isinstance(config, ControlConfig):
        rows, notes = control_overview.rows(config, found) if isinstance(found, Spaces) else [], []
    else:
        model = found if isinstance(found, Path) else None
        rows, notes = _rows(config, overview(config, model), model), warnings(config)
    table = Table(title=f"{config.name}: {config.steps} steps", title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    table.add_row("files", str(out))
    console.print(table)
    for line in notes:
        console.print(Text.assemble(("warning:", "yellow"), " ", line))


def _rows(config: Config, view: Overview, model: Path | None) -> list[tuple[str, str]]:
    updates = "1 update" if view.updates_per_step == 1 else f"{view.updates_per_step} updates"
    waiting, ahead = view.staleness_waiting, view.staleness_ahead
    expected = f"{ahead}" if waiting == ahead else f"{waiting} while the learner waits, {ahead} while actors are ahead"
    sync = "known once the model is there" if view.weight_bytes is None else format_bytes(view.weight_bytes)
    return [
        ("model", f"{config.model.path}" + (f" ({model})" if model and str(model) != config.model.path else "")),
        *([("adapter", _adapter(config))] if config.lora.is_on else []),
        ("task", config.task.environment or config.task.data or config.task.name),
        (
            "effective batch",
            f"{config.buffer.groups_per_step} groups × {config.sampling.group_size} = "
            f"{view.sequences_per_step:,} sequences, at most {view.sampled_tokens_per_step:,} sampled tokens, "
            f"{updates} a step",
        ),
        ("tickets in flight", f"at most {view.tickets_in_flight:,}"),
        ("staleness", f"expected {expected}; largest possible {view.staleness_bound}"),
        ("weight sync", f"{sync} a version over {config.weights.path}"),
        ("actors", _actors(config)),
        ("rewards", _rewards(config)),
        *([("reference", _reference(config))] if config.needs_reference else []),
        *([("critic", _critic(config))] if config.algorithm.advantage == "gae" else []),
        ("learner", f"{_several(config.learner.ranks, 'rank')}, lr {config.learner.lr:g}, {config.algorithm.name}"),
    ]


def _adapter(config: Config) -> str:
    lora = config.lora
    return f"rank {lora.rank}, alpha {lora.alpha}, on {', '.join(lora.targets)}; the model itself stays as it is"


def _actors(config: Config) -> str:
    turns = ", taking turns with the learner on its device" if config.actors.placement == "colocated" else ""
    return f"{config.actors.count} × {config.actors.engine}, {config.actors.slots} slots each{turns}"


def _rewards(config: Config) -> str:
    reward = config.reward
    verifier = "environment" if config.task.environment else "verifier"
    parts = {
        verifier: reward.verifier,
        f"model {reward.model_path}": reward.model,
        f"judge {reward.judge_model}": reward.judge,
    }
    terms = " + ".join(name if weight == 1 else f"{weight:g} × {name}" for name, weight in parts.items() if weight)
    return f"{terms}, {'in the actors' if reward.placement == 'actor' else _several(reward.scorers, 'scorer')}"


def _reference(config: Config) -> str:
    reference = config.reference
    where = "in the learner" if reference.placement == "learner" else _several(reference.scorers, "scorer")
    use = (
        "teacher"
        if config.algorithm.advantage == "distill"
        else f"KL {config.algorithm.kl_coef:g} in the {config.algorithm.kl_in}"
    )
    return f"{reference.path or 'the start model'}, {use}, {where}"


def _critic(config: Config) -> str:
    return "a value head on the policy" if config.algorithm.critic == "head" else "a model of its own in the learner"


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
