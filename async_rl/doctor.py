"""``async-rl doctor``: what this machine has, what is missing, and whether a configuration would run here.

    machine checks ─► configuration checks ─► probe (actors.probe ─► learner.probe, two processes) ─► table

The probe trains nothing. It compares the engine's log-probabilities, its version stamps and the weights that it holds
with the learner's and with an arbiter's, and says which side is wrong; ``--plant`` makes one fault to show that.

Every check returns findings; a finding that is wrong says what to do. The exit code is 1 if any is.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from async_rl.base_checksum import base_of
from async_rl.compiler import find_compiler
from async_rl.config import AnyConfig, Config, ControlConfig, load_any, to_toml
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch import control_checks, preflight, roles, task_checks, token_checks
from async_rl.launch.children import cause, tail
from async_rl.launch.commands import visible_gpus
from async_rl.launch.control_overview import describe_networks
from async_rl.launch.overview import num_parameters, num_published
from async_rl.probe import FAULTS
from async_rl.process import die_with_parent
from async_rl.summary import package_version
from async_rl.units import format_bytes

Level = Literal["ok", "note", "wrong"]

MIN_PYTHON = (3, 11)
MIN_FILES = 1024
MIN_SHM = 256 << 20
PROBE_TIMEOUT_S = 300.0
_REQUIRED = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy"),
    *("pyzmq", "msgpack", "xxhash", "zstandard", "pydantic"),
)
_OPTIONAL = {
    "vllm": "actors.engine = 'vllm' needs it: pip install 'async-rl[vllm]'; on a CPU bash scripts/install_vllm_cpu.sh",
    "peft": "lora.rank above 0 needs it, on the learner's host: pip install 'async-rl[lora]'",
    "gguf": "async-rl fetch smollm2 needs it: pip install 'async-rl[tasks]'",
    "datasets": "task.data = FOLDER needs it: pip install -c constraints.txt 'async-rl[tasks]'",
    "reasoning-gym": "task.name = 'reasoning_gym' needs it: pip install -c constraints.txt 'async-rl[tasks]'",
    "gymnasium": "env.id and task.environment = 'gymnasium:ID' need it: pip install -c constraints.txt "
    "'async-rl[control]'",
    "mujoco": "gymnasium's robots (HalfCheetah-v5, ...) need it: pip install -c constraints.txt 'async-rl[control]'",
    "wandb": "log.wandb needs it: pip install wandb",
    "tensorboard": "log.tensorboard needs it: pip install tensorboard",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    level: Level
    name: str
    detail: str
    remedy: str = ""
    """What to do; given for everything that is wrong."""


def run_doctor(source: str | None, overrides: Sequence[str], plant: str | None = None) -> int:
    """Print the diagnosis; 1 if something is wrong, else 0.

    Args:
        source: preset or TOML file to check, too.
        overrides: ``key=value`` settings.
        plant: name of a fault that the probe is to make, see :data:`async_rl.probe.FAULTS`.

    Raises:
        ConfigError: the configuration itself cannot be read, or the fault cannot be planted.
    """
    if plant is not None and (plant not in FAULTS or source is None):
        raise ConfigError(f"--plant {plant}: give a CONFIG and one of {', '.join(FAULTS)}")
    config = load_any(source, overrides) if source else None
    if plant is not None and config is not None and config.is_control:
        raise ConfigError(f"--plant {plant}: faults are planted in language models' engines; a control run has none")
    search = Path(source).resolve().parent if source and source.endswith(".toml") else Path.cwd()
    findings = list(machine())
    if config is not None:
        findings += configuration(config, preflight.child_environment(os.environ, search), plant)
    _print(findings)
    return int(any(f.level == "wrong" for f in findings))


def machine() -> Iterator[Finding]:
    """Python, packages, processors, memory, limits."""
    found = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        yield Finding("wrong", "python", found, f"install Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer")
    else:
        yield Finding("ok", "python", found)
    for name in _REQUIRED:
        version = package_version(name)
        missing = f"pip install -c constraints.txt {name}"
        yield Finding("ok", name, version) if version else Finding("wrong", name, "not installed", missing)
    for name, remedy in _OPTIONAL.items():
        version = package_version(name) or package_version(f"{name}-cpu")
        yield Finding("ok", name, version) if version else Finding("note", name, "not installed", remedy)
    yield Finding("ok", "processors", f"{len(os.sched_getaffinity(0))} usable")
    gpus = visible_gpus(os.environ)
    yield Finding("ok", "GPUs", ", ".join(gpus) if gpus else "none; everything runs on the CPU")
    yield Finding("ok", "memory", f"{format_bytes(available_memory())} available")
    yield shared_memory(shutil.disk_usage("/dev/shm").free)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield isolation(_why_no_isolation())


def available_memory() -> int:
    """Bytes that new processes can use, from /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def shared_memory(free: int) -> Finding:
    """Judge the free bytes of /dev/shm."""
    if free >= MIN_SHM:
        return Finding("ok", "/dev/shm", f"{format_bytes(free)} free")
    remedy = "three versions of the weights must fit: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    return Finding("wrong", "/dev/shm", f"{format_bytes(free)} free", remedy)


def open_files(limit: int) -> Finding:
    """Judge the limit of open files."""
    if limit == resource.RLIM_INFINITY or limit >= MIN_FILES:
        return Finding("ok", "open files", "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} allowed")
    return Finding("wrong", "open files", f"{limit:,} allowed", f"ulimit -n {MIN_FILES * 4}")


def isolation(why_not: str) -> Finding:
    """Say whether verifiers and environments can be cut off from the network.

    Args:
        why_not: what the system says against it; empty when it can be done.
    """
    if not why_not:
        return Finding("ok", "isolation", "verifiers and environments are cut off from the network")
    remedy = "allow user namespaces (kernel.unprivileged_userns_clone=1, in containers --security-opt seccomp=...)"
    return Finding("note", "isolation", f"verifiers and environments keep the network: {why_not}", remedy)


def _why_no_isolation() -> str:
    command = [sys.executable, "-m", "async_rl.sandbox"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()


def configuration(config: AnyConfig, env: Mapping[str, str], plant: str | None = None) -> Iterator[Finding]:
    """Everything that a run of this configuration needs."""
    yield _checked("address", lambda: _address(config))
    if isinstance(config, ControlConfig):
        with tempfile.TemporaryDirectory(prefix="async-rl-doctor-") as scratch:
            yield _checked("environment", lambda: _environment(config, env, Path(scratch)))
        return
    yield _checked("engine", lambda: _engine(config))
    if config.learner.compile:
        yield _checked("compiler", lambda: find_compiler(env))
    yield _checked("problems", lambda: "{} to train on, {} held out".format(*task_checks.check_data(config, env)))
    yield _checked("verifier", lambda: _verifier(config, env))
    yield _checked("rewards", lambda: _rewards(config, env))
    with tempfile.TemporaryDirectory(prefix="async-rl-doctor-") as scratch:
        folder: list[Path] = []
        yield _checked("model", lambda: _model(config, env, Path(scratch), folder))
        if folder:
            model, log = folder[0], Path(scratch) / "warmup.log"
            yield _checked("limits", lambda: _limits(config, env, model))
            if config.lora.is_on:
                yield _checked("adapter", lambda: _adapter(config, model))
            yield _checked("environment", lambda: task_checks.check_environment(config, env))
            yield _checked("reference", lambda: _reference(config, env, model, log))
            yield from probe(config, env, Path(scratch), plant)


def probe(config: Config, env: Mapping[str, str], scratch: Path, plant: str | None = None) -> list[Finding]:
    """Sample with the engine under several versions of the weights, and judge what it says; see ``actors.probe``."""
    name = "log-probabilities"
    if config.actors.engine == "mock":
        return [Finding("note", name, "the mock engine has none to compare")]
    toml, arrays, log = scratch / "config.toml", scratch / "probe.npz", scratch / "probe.log"
    toml.write_text(to_toml(config))
    planted = ["--plant", plant] if plant else []
    try:
        _run([sys.executable, "-m", "actors.probe.main", str(toml), "--out", str(arrays), *planted], env, log)
        line = _run([sys.executable, "-m", "learner.probe.main", str(toml), str(arrays), *planted], env, log)
    except AsyncRLError as error:
        return [Finding("wrong", name, str(error), "see the message; async-rl run would stop at the same point")]
    found = [Finding(**fields) for fields in json.loads(line)]
    return [Finding("note", "planted", FAULTS[plant]), *found] if plant else found


def _checked(name: str, check: Callable[[], str]) -> Finding:
    """A check that raises our errors, as a finding."""
    try:
        return Finding("ok", name, check())
    except AsyncRLError as error:
        what, _, remedy = str(error).partition("; ")
        return Finding("wrong", name, what, remedy)


def _environment(config: ControlConfig, env: Mapping[str, str], scratch: Path) -> str:
    """Make it, step it once, count the networks' numbers; files and shared memory are looked at, too."""
    spaces = control_checks.check_run(config, env, scratch, lambda: False, with_actors=True)
    networks = describe_networks(config, spaces)
    groups = ", ".join(f"{name} {list(group.shape)} {group.dtype}" for name, group in spaces.observations.items())
    size = "" if networks.policy is None else f"; policy {networks.policy:,} parameters, critic {networks.critic:,}"
    return f"{config.env.id}: {groups}; {spaces.action.size} {spaces.action.kind} actions{size}"


def _address(config: AnyConfig) -> str:
    preflight.check_address(config.buffer)
    return config.buffer.bind + (f", keys in {config.buffer.keys}" if config.buffer.keys else "")


def _engine(config: Config) -> str:
    preflight.check_engine(config)
    return config.actors.engine


def _verifier(config: Config, env: Mapping[str, str]) -> str:
    preflight.check_verifier(config.task, env)
    return config.task.verifier or "built in"


def _rewards(config: Config, env: Mapping[str, str]) -> str:
    roles.check_reward(config, env)
    weights = {name: getattr(config.reward, name) for name in ("verifier", "model", "judge")}
    return ", ".join(f"{name} × {weight:g}" for name, weight in weights.items() if weight)


def _limits(config: Config, env: Mapping[str, str], model: Path) -> str:
    preflight.check_limits(config, model)
    task_checks.check_chat_template(config, env, model)
    preflight.check_shared_memory((num_published(config, model) or 0) * 4)
    return "context, chat template and shared memory suffice"


def _adapter(config: Config, model: Path) -> str:
    token_checks.check_adapter(config)
    return f"{num_published(config, model)} of {num_parameters(model)} parameters; base {base_of(config)}"


def _reference(config: Config, env: Mapping[str, str], model: Path, log: Path) -> str:
    if not config.needs_reference:
        return "none"
    return str(roles.ensure_reference(config, model, env, log, lambda _: None, lambda: False))


def _model(config: Config, env: Mapping[str, str], scratch: Path, found: list[Path]) -> str:
    from async_rl.models import load_tokenizer, stop_token_ids

    folder = preflight.ensure_model(config, env, scratch / "warmup.log", lambda _: None)
    tokenizer, stops = load_tokenizer(folder), stop_token_ids(folder)
    if outside := [i for i in stops if not 0 <= i < len(tokenizer)]:
        raise ConfigError(f"{folder}: stop tokens {outside} are not in the tokenizer; correct generation_config.json")
    found.append(folder)
    return f"{folder}, {num_parameters(folder) or 0:,} parameters, stops at {list(stops)}"


def _run(command: Sequence[str], env: Mapping[str, str], log: Path) -> str:
    """Run a command to its end; the last line of its output. The kernel ends it with the doctor."""
    parent = os.getpid()
    with log.open("wb") as sink:
        try:
            done = subprocess.run(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                timeout=PROBE_TIMEOUT_S,
                preexec_fn=lambda: die_with_parent(parent),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise AsyncRLError(f"{command[2]} did not end within {PROBE_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise AsyncRLError(f"{command[2]}: {cause(log) or ' '.join(tail(log, 1)) or f'exit code {done.returncode}'}")
    lines = done.stdout.decode().splitlines()
    return lines[-1] if lines else ""


def _print(findings: Sequence[Finding]) -> None:
    table = Table(show_header=False, box=None)
    colours: Mapping[Level, str] = {"ok": "green", "note": "yellow", "wrong": "red"}
    for finding in findings:
        text = f"{finding.detail}\n→ {finding.remedy}" if finding.remedy else finding.detail
        table.add_row(Text(finding.level, style=colours[finding.level]), finding.name, Text(text))
    Console(highlight=False).print(table)
