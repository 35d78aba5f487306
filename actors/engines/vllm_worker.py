"""Inside vLLM's worker process: load a published version from its shared-memory segment and prove what is held.

    between two steps   prepare_weights(manifest, path) ─► map ─► find the place of each tensor
    while paused        swap_weights() ─► model.load_weights ─► read back ─► checksum of what is held ─► front end

vLLM imports this module by name (``worker_extension_cls``) before the model is built. Three things follow from that:

* the process dies with its parent from here on;
* the weight-transfer backend ``async_rl`` is registered before vLLM looks for it;
* on the CPU, linear layers keep their weights as they are. With oneDNN's packed copies the parameter is empty, so that
  nothing can be loaded in place or read back, and a tied output head goes on with its old packed copy.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.layers.utils as vllm_layers
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from actors.engines.readback import Places, load, place, prove
from actors.engines.segments import Segments
from actors.engines.vllm_adapter import AdapterVersion
from async_rl.config import LoraConfig
from async_rl.errors import WeightsError
from async_rl.process import die_with_parent
from async_rl.weights.manifest import Manifest

BACKEND = "async_rl"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: what is loaded was prepared before."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that fits the model."""

    manifest: Manifest
    data: memoryview
    places: Places


class SegmentWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Weight-transfer backend that reads a segment on this host."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._segments = Segments()
        self._prepared: Prepared | None = None
        self.adapter: AdapterVersion | None = None
        """What was prepared last, in a run with an adapter."""
        self.outcome: tuple[str, str] = ("", "no version was loaded")
        """Checksum of what is held after the last update, or what was wrong with it; the other one is empty."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Refuse what could not be proven later.

        Raises:
            RuntimeError: quantised weights, or layers that compute with a copy of their weights.
        """
        if self.vllm_config.quant_config is not None or self.model_config.use_mla:
            raise RuntimeError("quantised weights and multi-head latent attention cannot be updated in place")
        for name, module in self.model.named_modules():
            if getattr(module, "cpu_linear", linear) is not linear:
                raise RuntimeError(f"{name} computes with a packed copy of its weight, which an update would not reach")

    def prepare(self, fields: dict[str, Any], path: str, adapter: dict[str, Any] | None) -> None:
        """Map a version and find the place of each tensor; the model goes on as it is.

        This is short: the engine does not decode meanwhile. The bytes were verified in the actor's process before, and
        are proven once they are loaded.

        Args:
            fields: the manifest as plain types.
            path: of the segment that holds it.
            adapter: fields of :class:`async_rl.config.LoraConfig`, where the version is that of an adapter.

        Raises:
            WeightsError: there is no such segment, or a tensor, which is named, does not fit.
        """
        manifest, before, self._prepared, self.adapter = Manifest.from_wire(fields), self._prepared, None, None
        data = self._segments.map(path, manifest.nbytes)
        if adapter is not None:
            self.adapter = AdapterVersion(self.model.lora_manager, manifest, data, LoraConfig(**adapter))
            return
        known = before is not None and before.manifest.tensors == manifest.tensors
        places = before.places if before and known else place(self.model, manifest, self._padded())
        self._prepared = Prepared(manifest, data, places)

    def start_weight_update(self) -> None:
        """Forget the last outcome."""
        self.outcome = ("", "no version was loaded")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load what was prepared and prove it; see :attr:`outcome`."""
        prepared = self._prepared
        if prepared is None:
            raise RuntimeError("weights are loaded that were not prepared")
        try:
            load(self.model, prepared.manifest, prepared.data)
            self.outcome = (prove(self.model, prepared.manifest, prepared.data, prepared.places), "")
        except WeightsError as error:
            self.outcome = ("", str(error))

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Unmap the segments."""
        self._segments.close()

    def _padded(self) -> frozenset[str]:
        """Parameters that vLLM pads to more rows than the vocabulary has."""
        modules = self.model.named_modules(remove_duplicate=False)
        return frozenset(f"{name}.weight" for name, m in modules if isinstance(m, VocabParallelEmbedding))


class WorkerExtension:
    """Methods that vLLM adds to its worker."""

    weight_transfer_engine: SegmentWeights
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def prepare_weights(self, fields: dict[str, Any], path: str, adapter: dict[str, Any] | None) -> str:
        """Prepare a version; what is wrong with it, or nothing. See :meth:`SegmentWeights.prepare`."""
        try:
            self.weight_transfer_engine.prepare(fields, path, adapter)
        except WeightsError as error:
            return str(error)
        return ""

    def swap_weights(self) -> tuple[str, str]:
        """Load what was prepared, by vLLM's own steps of an update in one call; see :attr:`SegmentWeights.outcome`."""
        adapter, self.weight_transfer_engine.adapter = self.weight_transfer_engine.adapter, None
        if adapter is not None:
            return adapter.load()
        self.start_weight_update()
        self.update_weights({})
        self.finish_weight_update()
        return self.weight_transfer_engine.outcome


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` on the CPU with the weight as it is.

    Float32 goes to oneDNN with the plain weight. One thread of an AMD EPYC, against ``F.linear`` (MKL): about half the
    time from 64 rows on; at 8 rows from two thirds of it to half as much again. Against oneDNN's packed weights: 0.9 to
    1.25 times the time from 64 rows on, about twice at 8 rows, which is the price of weights that can be read back.
    """
    if x.dtype is torch.float32 and torch.backends.mkldnn.is_available():
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return result
    return torch.nn.functional.linear(x, weight, bias)


def _keep_weights_unpacked() -> None:
    """Let linear layers on the CPU compute with their own weight instead of a packed copy."""
    pack = vllm_layers.dispatch_cpu_unquantized_gemm

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim != 2 or layer.weight.is_meta:
            pack(layer, remove_weight)
        else:
            layer.cpu_linear = linear

    vllm_layers.dispatch_cpu_unquantized_gemm = dispatch


def _enter_worker() -> None:
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent else None)
    WeightTransferEngineFactory.register_engine(BACKEND, SegmentWeights)
    if current_platform.is_cpu():
        _keep_weights_unpacked()


_enter_worker()
