"""Inside vLLM's worker: receive a version from the learner's device block by block, load it and prove what is held.

    while paused   receive_version ─► meet ─go─► block ─► model.load_weights ─► next ─► ... ─► read back ─► checksum
                                        └─ no ─► the version before stays, and goes on

A block is loaded while the model's memory still holds the rest of the version before: nothing but one block is needed
beside it, and a transfer that breaks in the middle leaves a model that is proven by nothing; it stays paused until a
version was pulled. Everything else is as in :mod:`actors.engines.vllm_worker`, whose backend this one extends: versions
that were not received are mapped.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from actors.engines.incoming import Incoming
from actors.engines.readback import Places, load_block, place, prove_alone
from actors.engines.vllm_worker import SegmentWeights, UpdateInfo, WorkerExtension
from async_rl.errors import WeightsError
from async_rl.weights.channel import device_name
from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import Offer, blocks

BACKEND = "async_rl_broadcast"


class BroadcastWeights(SegmentWeights):
    """Weight-transfer backend that is a member of the learner's broadcast, and reads a segment where it is not."""

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._incoming = Incoming(device)
        self._met: Manifest | None = None
        self._known: tuple[Any, Places] = ((), {})
        self.intact = True
        """Whether the model is what it was before the last update that failed."""

    def meet(self, fields: dict[str, Any], offer: dict[str, Any], worker: int) -> None:
        """See that a version fits, and wait with the others for its first block; the model is as it was.

        Args:
            fields: the manifest as plain types.
            offer: the place of this engine, as plain types.
            worker: which one of its workers this is.

        Raises:
            WeightsError: it does not fit, or does not come.
        """
        manifest = Manifest.from_wire(fields)
        if self._known[0] != manifest.tensors:
            self._known = manifest.tensors, place(self.model, manifest, self._padded())
        self._incoming.meet(Offer.from_wire(offer), worker)
        self._met = manifest

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive, load and prove what was met for; else as the other backend."""
        manifest, self._met = self._met, None
        if manifest is None:
            super().receive_weights(update_info)
            return
        self.intact = False
        try:
            for begin, end in blocks(manifest.tensors, manifest.nbytes):
                block = torch.empty(end - begin, dtype=torch.uint8, device=self.device)
                self._incoming.take(block)
                load_block(self.model, manifest, block, begin)
            self.outcome = (prove_alone(self.model, manifest, self._known[1]), "")
        except WeightsError as error:
            self.outcome = ("", str(error))

    def shutdown(self) -> None:
        """Leave the communicator, unmap the segments."""
        self._incoming.close()
        super().shutdown()


class BroadcastExtension(WorkerExtension):
    """Methods that vLLM adds to its worker in place of :class:`WorkerExtension`."""

    weight_transfer_engine: BroadcastWeights
    device: torch.device
    rank: int

    def broadcast_device(self) -> str:
        """What the device of this worker is called among all hosts."""
        return device_name(self.device)

    def receive_version(self, fields: dict[str, Any], offer: dict[str, Any]) -> tuple[str, str, bool]:
        """Receive a version, by vLLM's own steps of an update in one call.

        Returns:
            Checksum of what is held, or what was wrong, the other one empty; and whether the model is as it was.
        """
        engine = self.weight_transfer_engine
        engine.intact = True
        try:
            engine.meet(fields, offer, self.rank)
        except WeightsError as error:
            return "", str(error), True
        self.start_weight_update()
        self.update_weights({})
        self.finish_weight_update()
        return (*engine.outcome, engine.intact)


WeightTransferEngineFactory.register_engine(BACKEND, BroadcastWeights)
