"""Configuration: TOML in, strict pydantic models out. An unknown key is an error that names the nearest known one.

    preset or file ──► merge --set overrides ──► Config ──► resolved config.toml in the run folder

Nothing here imports torch, so the command line can check a file at once.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from async_rl.errors import ConfigError

Beta = Annotated[float, Field(ge=0, lt=1)]

MAX_INT = 1 << 62
"""Whole numbers are below it: they go into TOML, messages and random generators, which hold 64 bits."""


class Section(BaseModel):
    """A strict, frozen block of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        """Refuse whole numbers that no message can carry."""
        if isinstance(value, int) and abs(value) >= MAX_INT:
            raise ValueError(f"a whole number must be below {MAX_INT}")
        return value


class ModelConfig(Section):
    """Which language model is trained."""

    path: str = "tiny"
    """A Hugging Face model folder; or ``tiny`` (built and briefly supervised on the spot) or ``smollm2`` (fetched)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of engine and learner; master weights and log-probabilities are float32 always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes CUDA where there is a device for each process, else the CPU."""


class TaskConfig(Section):
    """What is asked of the model and how answers are scored."""

    name: Literal["addition", "sorting", "countdown", "jsonl"] = "addition"
    """A built-in generator, or ``jsonl`` for problems from ``data``."""
    data: str = ""
    """A JSONL file with a ``prompt`` column (and ``answer``, ... as the verifier needs); sets ``name`` to ``jsonl``."""
    verifier: str = ""
    """``module:function`` with the signature ``f(prompts, completions, **columns) -> list[float]``; empty: exact match
    with ``answer`` for JSONL data, the built-in one for built-in tasks."""
    digits: int = Field(2, ge=1, le=6)
    """Digits of each operand (``addition``) or length of a list (``sorting``)."""
    chat: bool = False
    """Wrap prompts in the model's chat template."""
    instruction: str = ""
    """Text put before each prompt (one system-like sentence for chat models)."""
    holdout: int = Field(500, ge=1)
    """Problems that are never trained on, for evaluation; at most a fifth of the data."""
    timeout_s: float = Field(10.0, gt=0)
    """Time limit of one verifier call (one group); a call that passes it is killed and counted."""
    verifiers: int = Field(1, ge=1)
    """Verifier child processes per actor."""


class SamplingConfig(Section):
    """The sampling contract: both sides must agree on it, it is part of the handshake."""

    group_size: int = Field(8, ge=1, le=65_536)
    """Completions per prompt."""
    max_new_tokens: int = Field(16, ge=1)
    """Longest completion."""
    temperature: float = Field(1.0, gt=0)
    """Used by the engine and by the learner's log-probabilities."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Must be 1 for ratio losses: a truncated distribution has no ratio to the full one."""


class BufferConfig(Section):
    """The staleness-bounded buffer and its server."""

    bind: str = "tcp://127.0.0.1:*"
    """Address of the server; ``*`` takes a free port, which is printed."""
    insecure: bool = False
    """Allow an address that other hosts can reach, without keys."""
    groups_per_step: int = Field(64, ge=1)
    """Groups that one learner step trains on."""
    max_staleness: int = Field(2, ge=0)
    """η, in learner versions; 0 is synchronous training."""
    stragglers: Literal["wait", "reissue"] = "wait"
    """What happens to an open ticket that would pass η: the step waits for it, or a fresh attempt replaces it."""
    max_uses: int = Field(1, ge=1)
    """How often a group may be trained inside its bound."""
    replace_zero_variance: bool = False
    """Replace groups whose rewards are all equal by fresh ones (dynamic sampling)."""
    lease_s: float = Field(120.0, gt=0)
    """An actor must return a ticket within this time, or it is reissued."""
    heartbeat_s: float = Field(2.0, gt=0)
    """Every client says that it lives this often; three missed ones and it is dead."""
    watchdog_s: float = Field(120.0, gt=0)
    """After this time without an accepted group the oldest tickets are printed and reissued."""
    watchdog_rounds: int = Field(3, ge=1)
    """After this many rounds in a row the run ends with that table."""
    max_bytes: int = Field(4 << 30, ge=1 << 20)
    """Most bytes of trajectories that the server holds; beyond it no tickets are issued."""


class ActorsConfig(Section):
    """The rollout actors."""

    count: int = Field(1, ge=1)
    """Actor processes that ``run`` starts on this machine."""
    engine: Literal["torch", "vllm", "mock"] = "torch"
    """``torch`` is embedded, ``vllm`` is real vLLM, ``mock`` has no model."""
    slots: int = Field(512, ge=1)
    """Sequences that one engine decodes at the same time."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What happens to the KV of running requests when weights change."""
    mock_latency_s: float = Field(0.01, ge=0)
    """``mock``: median time of one completion (log-normal)."""
    mock_latency_sigma: float = Field(0.5, ge=0)
    """``mock``: sigma of the log-normal latency."""
    mock_tokens: int = Field(16, ge=1)
    """``mock``: mean completion length (geometric, at most ``max_new_tokens``)."""


class AlgorithmConfig(Section):
    """GRPO (Shao et al. 2024, arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Ratio is clipped at ``1 - clip_low``."""
    clip_high: float = Field(0.2, gt=0)
    """and at ``1 + clip_high``."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    aggregation: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the batch, or over sequences of their token means; counts are global."""
    kl_coef: float = Field(0.0, ge=0)
    """β of the k3 KL penalty to the frozen start model; 0 keeps no reference model."""
    minibatches: int = Field(1, ge=1)
    """Optimiser updates per step, each over a share of the groups."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch per step."""


class LearnerConfig(Section):
    """The learner group."""

    ranks: int = Field(1, ge=1)
    """Processes of the group on this machine."""
    lr: float = Field(3e-4, ge=0)
    """Learning rate of AdamW."""
    lr_schedule: Literal["constant", "kl_adaptive"] = "constant"
    """``kl_adaptive`` multiplies or divides by 1.5 when the measured KL is below half or above twice ``kl_target``."""
    kl_target: float = Field(0.01, gt=0)
    """Target of the adaptive schedule (KL between behaviour and current policy)."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up of the learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)  # TOML has lists only
    max_grad_norm: float = Field(1.0, gt=0)
    """One norm over the flat gradient of all modules."""
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Most tokens (padding included) of one forward and backward."""
    checksum_every: int = Field(20, ge=1)
    """Steps between comparisons of the ranks' flat parameters."""
    timeout_s: float = Field(300.0, gt=0)
    """Deadline of a collective."""
    step_deadline_s: float = Field(3600.0, gt=0)
    """A learner that neither finishes its step (or its start) nor asks for data in this time is hung: the run ends."""


class WeightsConfig(Section):
    """How versions of the weights reach the actors."""

    path: Literal["auto", "shm", "zmq"] = "auto"
    """``auto`` takes shared memory on the learner's host and ZeroMQ elsewhere."""
    commit_deadline_s: float = Field(60.0, gt=0)
    """An actor that has not committed an announced version in this time gets no tickets until it has (is fenced)."""
    chunk_bytes: int = Field(4 << 20, ge=1 << 10, multiple_of=4)
    """Bytes per chunk and checksum."""


class EvalConfig(Section):
    """Evaluation on held-out problems: greedy, pinned to one version, in its own process."""

    every: int = Field(20, ge=0)
    """Steps between evaluations; 0: only at start and end."""
    problems: int = Field(500, ge=1)
    """Held-out problems used."""


class CheckpointConfig(Section):
    """Checkpoints; one is always written at the end and on Ctrl-C."""

    every: int = Field(50, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk."""


class LogConfig(Section):
    """Where metrics go, beside ``metrics.jsonl``."""

    wandb: bool = True
    """Weights & Biases; offline unless a key is set."""
    wandb_project: str = "async_rl"
    tensorboard: bool = True


class Config(Section):
    """One run."""

    name: str = "run"
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1)
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    buffer: BufferConfig = BufferConfig()
    actors: ActorsConfig = ActorsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="before")
    @classmethod
    def _data_means_jsonl(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and isinstance(raw.get("task"), dict) and raw["task"].get("data"):
            raw = {**raw, "task": {**raw["task"], "name": "jsonl"}}
        return raw

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        if self.task.name == "jsonl" and not self.task.data:
            raise ValueError("task.name = 'jsonl' needs task.data = FILE.jsonl")
        if self.sampling.top_p < 1:
            raise ValueError(
                f"sampling.top_p = {self.sampling.top_p} with a ratio loss: the sampled distribution is truncated and "
                "has no ratio to the learner's; set sampling.top_p = 1"
            )
        if self.sampling.group_size < 2:
            raise ValueError(
                "sampling.group_size = 1: a group of one has no relative advantage (always 0); set it to 4 or more"
            )
        if self.algorithm.minibatches > self.buffer.groups_per_step:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches} > buffer.groups_per_step = "
                f"{self.buffer.groups_per_step}: a mini-batch needs at least one group"
            )
        if self.learner.ranks > self.buffer.groups_per_step // self.algorithm.minibatches:
            raise ValueError(
                f"learner.ranks = {self.learner.ranks} but a mini-batch has only "
                f"{self.buffer.groups_per_step // self.algorithm.minibatches} groups: raise buffer.groups_per_step"
            )
        if self.learner.lr_schedule == "constant" and "kl_target" in self.learner.model_fields_set:
            raise ValueError("learner.kl_target has no effect with learner.lr_schedule = 'constant'; remove it")
        return self

    def contract_hash(self) -> str:
        """Hash of what actor and learner must agree on: model, task, sampling, seed. Checked at the handshake."""
        agreed = {
            "seed": self.seed,
            "model": self.model.model_dump(exclude={"device"}),
            "task": self.task.model_dump(exclude={"verifiers", "timeout_s"}),
            "sampling": self.sampling.model_dump(),
        }
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


def preset_names() -> list[str]:
    """Names of the presets that ship."""
    return sorted(p.name.removesuffix(".toml") for p in _presets().iterdir() if p.name.endswith(".toml"))


def load_config(source: str, overrides: Sequence[str] = ()) -> Config:
    """Read a preset or a TOML file, apply ``key.path=value`` overrides, validate.

    Raises:
        ConfigError: no such file, bad TOML, unknown key (names the nearest), or a value that fails its check.
    """
    path = Path(source)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"no config file {source}")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}") from None
    elif source in preset_names():
        text = (_presets() / f"{source}.toml").read_text()
    else:
        near = difflib.get_close_matches(source, preset_names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"no preset {source!r}{hint} (presets: {', '.join(preset_names())}; a file must end in .toml)"
        )
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    for override in overrides:
        _apply(raw, override)
    return parse_config(raw)


def parse_config(raw: dict[str, Any]) -> Config:
    """Validate a plain dictionary.

    Raises:
        ConfigError: every problem on its own line, unknown keys with the nearest known one.
    """
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(e["loc"], e["type"], e["msg"], e.get("input")) for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def to_toml(config: Config) -> str:
    """The resolved configuration as TOML that :func:`load_config` reads back."""
    lines, tables = [], []
    for key, value in config.model_dump().items():
        if isinstance(value, dict):
            body = [f"{k} = {_toml_value(v)}" for k, v in value.items()]
            if key == "learner" and value["lr_schedule"] == "constant":
                body = [b for b in body if not b.startswith("kl_target")]
            tables.append("\n".join([f"[{key}]", *body]))
        else:
            lines.append(f"{key} = {_toml_value(value)}")
    return "\n".join(lines) + "\n\n" + "\n\n".join(tables) + "\n"


def _presets() -> Any:
    return resources.files("async_rl") / "presets"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return json.dumps(value, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # TOML wants this one escaped, JSON does not


def _apply(raw: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found or not key.strip():
        raise ConfigError(f"--set {override!r}: write it as section.key=value")
    try:
        value = tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    node, parts = raw, key.strip().split(".")
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {part!r} is a value, not a section")
    node[parts[-1]] = value


def _explain(loc: tuple[int | str, ...], kind: str, message: str, value: Any) -> str:
    where = ".".join(str(p) for p in loc) or "config"
    if kind != "extra_forbidden":
        shown = "" if isinstance(value, dict) or not loc else f" = {value!r}"
        return f"{where}{shown}: {message.removeprefix('Value error, ')}"
    section: Any = Config
    for part in loc[:-1]:
        section = section.model_fields[str(part)].annotation
    near = difflib.get_close_matches(str(loc[-1]), section.model_fields, 1)
    if near:
        prefix = where.rpartition(".")[0]
        hint = f"did you mean {'.'.join(filter(None, [prefix, near[0]]))!r}?"
    else:
        hint = f"known keys: {', '.join(section.model_fields)}"
    return f"unknown key {where!r}: {hint}"
