"""A trained policy as files that run without this package: TorchScript and ONNX, the normaliser inside.

load_actor ─► Inference(obs, *state) -> action, *state ─┬─ trace, script ─► policy.pt    keeps its state, reset()
                                                        └─ torch.onnx    ─► policy.onnx  state in, state out
                                     each is loaded again and compared with the policy itself

Names are those of rsl_rl's exports: ``obs`` [B, D], the concatenated groups of ``observations.actor``; ``actions``
[B, A], the most likely action (mean, or index of the choice); ``h_in``, ``c_in``, ``h_out``, ``c_out`` [L, B, H].
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from async_rl.control.checkpoint import load_actor
from async_rl.control.networks import Actor, State
from async_rl.control.normalizer import Normalizer
from async_rl.errors import AsyncRLError, ConfigError

TORCHSCRIPT, ONNX = "policy.pt", "policy.onnx"
_OPSET = 18
_CHECK_STEPS, _CHECK_BATCH = 4, 3
_TOLERANCE = 1e-4


class ExportError(AsyncRLError):
    """What was written does not compute what the policy computes."""


class Inference(nn.Module):
    """The most likely action of a policy as a function of tensors only.

    Args:
        actor: the policy.
    """

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, obs: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Actions [B, A] and the state after the step, given observations [B, D] and the state before it."""
        features, after = self.actor.step(obs, state)
        return (self.actor.distribution(features).mode(), *after)


class _Packed(nn.Module):
    """:class:`Inference` with one tensor as state, GRU or LSTM: [P·L, B, H], its P parts one after the other."""

    def __init__(self, inference: Inference, num_parts: int) -> None:
        super().__init__()
        self.inference = inference
        self.num_parts = num_parts

    def forward(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions, *after = self.inference(obs, *state.chunk(self.num_parts))
        return actions, torch.cat(after)


class _Stateless(nn.Module):
    """What is scripted for a policy without recurrence."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.policy(obs)[0]

    @torch.jit.export
    def reset(self) -> None:
        """Nothing: there is no state."""


class _Stateful(nn.Module):
    """What is scripted for a recurrent policy: its state is a buffer, zero after ``reset``.

    An input with another number of rows begins with zeros, too.
    """

    def __init__(self, policy: nn.Module, state: torch.Tensor) -> None:
        super().__init__()
        self.policy = policy
        self.state = nn.Buffer(state)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        if self.state.shape[1] != obs.shape[0]:
            shape = [self.state.shape[0], obs.shape[0], self.state.shape[2]]
            self.state = torch.zeros(shape, dtype=self.state.dtype, device=self.state.device)
        actions, after = self.policy(obs, self.state)
        self.state = after
        return actions

    @torch.jit.export
    def reset(self) -> None:
        """Begin an episode."""
        self.state = torch.zeros_like(self.state)


def export_policy(path: Path, out: Path) -> tuple[Path, Path]:
    """Write ``policy.pt`` and ``policy.onnx`` of a run folder (its newest checkpoint) or a checkpoint folder.

    Args:
        path: of a control run.
        out: folder, made where it does not exist; the files in it are replaced.

    Returns:
        The two files.

    Raises:
        ConfigError: there is no policy, or a package that ONNX needs is not installed (``policy.pt`` is written then).
        ExportError: a file was written and does not give the policy's own actions.
    """
    config, _, actor = load_actor(path)
    if config.policy.network == "transformer":
        raise ConfigError(
            f"{path}: policy.network = 'transformer' reads images and instructions and cannot be exported; load it "
            "with async_rl.control.checkpoint.load_actor"
        )
    out.mkdir(parents=True, exist_ok=True)
    observations = _example_observations(actor)
    with torch.no_grad(), _without_deprecations():
        script = out / TORCHSCRIPT
        _write_torchscript(actor, observations[0], script)
        _check_torchscript(actor, observations, script)
        missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"{script} is written; {ONNX} needs {' and '.join(missing)}: pip install 'async-rl[control]'"
            )
        graph = out / ONNX
        _write_onnx(actor, observations[0], graph)
        if importlib.util.find_spec("onnxruntime") is not None:
            _check_onnx(actor, observations, graph)
    return script, graph


def _write_torchscript(actor: Actor, obs: torch.Tensor, file: Path) -> None:
    state = actor.initial_state(len(obs), obs.device)
    inference = Inference(actor)
    module: nn.Module
    if state:
        packed = _Packed(inference, len(state))
        policy = torch.jit.trace(packed, (obs, torch.cat(state)), check_trace=False)
        module = _Stateful(policy, torch.cat(actor.initial_state(1, obs.device)))
    else:
        module = _Stateless(torch.jit.trace(inference, (obs,), check_trace=False))
    torch.jit.script(module.eval()).save(str(file))


def _write_onnx(actor: Actor, obs: torch.Tensor, file: Path) -> None:
    state = actor.initial_state(len(obs), obs.device)
    states_in, states_out = _state_names(state)
    rows = torch.export.Dim("rows", min=1)
    torch.onnx.export(
        Inference(actor),
        (obs, *state),
        str(file),
        input_names=["obs", *states_in],
        output_names=["actions", *states_out],
        dynamic_shapes=({0: rows}, tuple({1: rows} for _ in state)) if state else ({0: rows},),
        opset_version=_OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _state_names(state: State) -> tuple[list[str], list[str]]:
    letters = ("h", "c")[: len(state)]
    return [f"{letter}_in" for letter in letters], [f"{letter}_out" for letter in letters]


def _check_torchscript(actor: Actor, observations: torch.Tensor, file: Path) -> None:
    module = torch.jit.load(str(file))
    for rows in (_CHECK_BATCH, 1):
        module.reset()
        _compare(actor, observations[:, :rows], [module(obs) for obs in observations[:, :rows]], file)


def _check_onnx(actor: Actor, observations: torch.Tensor, file: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for rows in (_CHECK_BATCH, 1):
        state = actor.initial_state(rows, observations.device)
        fed, actions = [part.numpy() for part in state], []
        for obs in observations[:, :rows]:
            feed = dict(zip(_state_names(state)[0], fed, strict=True))
            action, *fed = session.run(None, {"obs": obs.numpy(), **feed})
            actions.append(torch.from_numpy(action))
        _compare(actor, observations[:, :rows], actions, file)


def _compare(actor: Actor, observations: torch.Tensor, actions: list[torch.Tensor], file: Path) -> None:
    """Step the policy itself over observations [T, B, D] and compare.

    Raises:
        ExportError: an action differs by more than rounding.
    """
    state = actor.initial_state(observations.shape[1], observations.device)
    for step, (obs, action) in enumerate(zip(observations, actions, strict=True)):
        own, *after = Inference(actor)(obs, *state)
        state = tuple(after)
        if action.shape != own.shape or not torch.allclose(action, own, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise ExportError(
                f"{file} does not give the policy's actions: step {step} of {len(obs)} random observations gives "
                f"{action.tolist()}, the policy {own.tolist()}; do not use it"
            )


def _example_observations(actor: Actor) -> torch.Tensor:
    """Random observations [T, B, D] such as the policy has seen, if its normaliser knows."""
    normalizer = actor.normalizer
    size = actor.input_size
    noise = torch.randn(_CHECK_STEPS, _CHECK_BATCH, size, generator=torch.Generator().manual_seed(0))
    return noise * normalizer.var.sqrt() + normalizer.mean if isinstance(normalizer, Normalizer) else noise


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """TorchScript is deprecated and wanted; its tracer and the ONNX exporter also warn about their own inner code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
