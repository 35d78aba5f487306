"""What the settings of every run have in common: strict sections, buffer, weights, checkpoints, the base of a run.

Section ─► BufferConfig, WeightsConfig, ...        RunConfig ─┬─► Config           language models (sections.py)
                                                              └─► ControlConfig    environments (control.py)
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

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


class BufferConfig(Section):
    """The staleness-bounded buffer and its server."""

    bind: str = "tcp://127.0.0.1:*"
    """Address of the server; ``*`` takes a free port, which is printed."""
    insecure: bool = False
    """Allow an address that other hosts can reach, without keys."""
    keys: str = ""
    """Folder of CURVE keys (``async-rl keys DIR`` makes them): everything is encrypted and strangers are not let in."""
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
    heartbeat_s: float = Field(10.0, gt=0)
    """A client that has died or is frozen is noticed within this time: it beats three times in it."""
    watchdog_s: float = Field(120.0, gt=0)
    """After this time without an accepted group the oldest tickets are printed and reissued."""
    watchdog_rounds: int = Field(3, ge=1)
    """After this many rounds in a row the run ends with that table."""
    max_bytes: int = Field(4 << 30, ge=1 << 20)
    """Most bytes of trajectories that the server holds; beyond it no tickets are issued."""


class WeightsConfig(Section):
    """How versions of the weights reach the actors."""

    path: Literal["auto", "shm", "zmq", "broadcast"] = "auto"
    """``auto`` takes shared memory on the learner's host and ZeroMQ elsewhere; ``broadcast`` sends versions from the
    learner's device to all engines at once by NCCL, on the CPU by gloo: who misses one takes it as with ``auto``."""
    broadcast_s: float = Field(30.0, gt=0)
    """``broadcast``: the learner waits no longer for all engines to come and to receive a version."""
    trusted_network: bool = False
    """``broadcast``: nobody else reaches the network between learner and engines, which is not encrypted."""
    commit_deadline_s: float = Field(60.0, gt=0)
    """An actor that has not committed an announced version in this time gets no tickets until it has (is fenced)."""
    chunk_bytes: int = Field(4 << 20, ge=1 << 10, multiple_of=4)
    """Bytes per chunk and checksum."""
    relay: int = Field(0, ge=0, le=64)
    """Hosts send the weights on, each to so many others, and the learner sends each version about once; 0: it sends
    them to every host. A host then listens on a port of its own, which the others have to reach."""
    relay_port: int = Field(0, ge=0, le=65535)
    """That port, for firewalls; 0: any free one. Of the processes of a host the first to have it sends on for all."""
    delta: bool = False
    """Send only what changed since the version that a host holds, without loss; it costs CPU time at both ends and
    saves most of the bytes in bfloat16: for links below 3 Gbit/s."""

    @property
    def pulls(self) -> Literal["auto", "shm", "zmq"]:
        """How an actor gets a version that was not broadcast to it."""
        return "auto" if self.path == "broadcast" else self.path


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


class ActorsBase(Section):
    """Actors of any domain."""

    count: int = Field(1, ge=1)
    """Actor processes that ``run`` starts on this machine."""

    @property
    def colocated(self) -> bool:
        """Whether actors and learner take turns on the same device."""
        return False


class LearnerBase(Section):
    """The learner group of any domain."""

    ranks: int = Field(1, ge=1)
    """Processes of the group on this machine."""
    lr: float = Field(3e-4, ge=0)
    """Learning rate."""
    kl_target: float = Field(0.01, gt=0)
    """Target of the adaptive schedule ``kl_adaptive``."""
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)  # TOML has lists only
    max_grad_norm: float = Field(1.0, gt=0)
    """Longest gradient; longer ones are scaled down."""
    checksum_every: int = Field(20, ge=1)
    """Steps between comparisons of the ranks' flat parameters."""
    timeout_s: float = Field(300.0, gt=0)
    """Deadline of a collective."""
    step_deadline_s: float = Field(3600.0, gt=0)
    """A learner that neither finishes its step (or its start) nor asks for data in this time is hung: the run ends."""


class EvalBase(Section):
    """Evaluation in its own process, pinned to one version."""

    every: int = Field(20, ge=0)
    """Steps between evaluations; 0: only at start and end."""


class RunConfig(Section):
    """One run of any domain: what server, launcher, weights and the learner's loop read."""

    name: str = "run"
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1)
    buffer: BufferConfig = BufferConfig()
    actors: ActorsBase = ActorsBase()
    learner: LearnerBase = LearnerBase()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalBase = EvalBase()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def is_control(self) -> bool:
        """Whether environments are controlled; else a language model is trained."""
        return False

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]:
        """Where engines and learner compute."""
        return "auto"

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Type of the published weights."""
        return "float32"

    @property
    def group_size(self) -> int:
        """Trajectories of a group."""
        return 1

    @property
    def split_minibatches(self) -> int:
        """Mini-batches into which the server splits a batch, by group; 1 where the learner splits it itself."""
        return 1

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages that scorers add to a submitted group before it is ready."""
        return ()

    @property
    def sharded(self) -> bool:
        """Whether no rank of the learner holds the whole model."""
        return False

    @property
    def saves_together(self) -> bool:
        """Whether every rank has a part of what a checkpoint keeps."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether anything reads a reference model's log-probabilities."""
        return False

    def contract(self) -> dict[str, Any]:
        """What all sides must agree on, as plain values."""
        return {"seed": self.seed}

    def kept(self) -> dict[str, Any]:
        """Values that a resumed run must keep beside the contract, by key: a checkpoint has networks made by them."""
        return {}

    def contract_hash(self) -> str:
        """Hash of :meth:`contract`, for the handshake."""
        return hashlib.sha256(json.dumps(self.contract(), sort_keys=True).encode()).hexdigest()[:16]
