"""The policy of a run with an adapter: low-rank layers of peft in a model that stays as it is.

base folder ─► model (model.dtype, frozen) ─► add_adapter: y = W x + α/r B A x in each target layer ─► policy
                  │                                 └─ A and B alone are trained: they are the flat vector
                  └─► the same model with the adapter off is the reference (:class:`AdapterOff`)

peft is imported on use: runs without an adapter do not pay for it, and do not need it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from async_rl.adapter import published_name
from async_rl.config import LoraConfig
from async_rl.errors import ConfigError
from learner.batching import MicroBatch
from learner.flat import Slot
from learner.parking import Parkable
from learner.reference import trained_logprobs


def import_peft() -> Any:
    """Import peft, with the part of torch that it expects to be there already.

    Raises:
        ConfigError: it is not installed.
    """
    importlib.import_module("torch.distributed.tensor")  # peft asks whether a weight is a distributed tensor
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"lora.rank above 0 needs peft: `pip install 'async-rl[lora]'` ({error})") from None


def peft_config(lora: LoraConfig, base: Path | None = None) -> Any:
    """The settings in peft's own form.

    Args:
        lora: the settings.
        base: folder of the model that the adapter belongs to, where it is saved.
    """
    return import_peft().LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base) if base is not None else None,
        inference_mode=base is not None,
    )


def add_adapter(model: Any, lora: LoraConfig, seed: int) -> None:
    """Put an adapter into the target layers, in place, and freeze everything else.

    A is drawn, B is 0, so that the model computes what it did before.

    Args:
        model: a causal language model without an adapter.
        lora: the settings.
        seed: of A.

    Raises:
        ConfigError: peft is not installed, or a target is no linear layer of the model.
    """
    check_targets(model, lora.targets)
    peft = import_peft()
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # A is drawn on the CPU, wherever the model is
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(peft_config(lora), model)
    model.eval()


def check_targets(model: Any, targets: Sequence[str]) -> None:
    """Make sure that each target names linear layers inside the model.

    Raises:
        ConfigError: names the target, and the layers that there are.
    """
    head = model.get_output_embeddings()
    layers = {name: module for name, module in model.named_modules() if name}
    linear = {name.rpartition(".")[2] for name, m in layers.items() if isinstance(m, nn.Linear) and m is not head}
    for target in targets:
        found = [module for name, module in layers.items() if f".{name}".endswith(f".{target}")]
        if not found or not all(isinstance(module, nn.Linear) and module is not head for module in found):
            raise ConfigError(
                f"lora.targets: {target!r} names no linear layer of {type(model).__name__} that can have an adapter; "
                f"there are {', '.join(sorted(linear)) or 'none'}"
            )


class AdapterOff:
    """The model below the adapter as reference: the policy's own layers, the adapter switched off while they run.

    Args:
        policy: with an adapter.
        temperature: of the sampling contract.
    """

    trees = True
    """Rows of trees can be forwarded wherever the policy can."""

    def __init__(self, policy: Any, temperature: float) -> None:
        self._policy = policy
        self._temperature = temperature

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the trained tokens, float32 ``[M]``."""
        with adapter_off(self._policy):
            return trained_logprobs(self._policy, batch, self._temperature)

    def compile(self) -> None:
        """Nothing: its layers are the policy's."""

    def offload(self) -> None:
        """Nothing: its memory is that of :class:`FrozenBase`."""

    def restore(self) -> None:
        """Nothing, either."""


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within it the model computes without its adapter; what was forwarded before keeps its gradient."""
    kind = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    layers = [module for module in model.modules() if isinstance(module, kind)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class FrozenBase:
    """The device memory of what is not trained, which the flat vector does not hold (colocated)."""

    def __init__(self, model: nn.Module) -> None:
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._parkables = [Parkable(parameter.data, constant=True) for parameter in frozen]

    def offload(self) -> None:
        """Give it back."""
        for parkable in self._parkables:
            parkable.offload()

    def restore(self) -> None:
        """Take it again."""
        for parkable in self._parkables:
            parkable.restore()


def published(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Slots of the policy under the names under which they are published."""
    return tuple(slot._replace(name=published_name(slot.name)) for slot in slots)
