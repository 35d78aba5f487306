"""Gives the device memory of a tensor back and takes it again, in place: every view of the tensor stays a view of it.

    tensor ──copy──► host        offload: its storage on the device shrinks to nothing
    tensor ◄──copy── host        restore: it grows again; tensors that share the storage see the values

Used while generation has the device (``actors.placement = "colocated"``).
"""

from __future__ import annotations

import torch


class Parkable:
    """One tensor that can be away.

    Args:
        tensor: contiguous, the whole of its storage.
        constant: its values never change, so that they are copied to the host once only.
    """

    def __init__(self, tensor: torch.Tensor, constant: bool = False) -> None:
        self._tensor = tensor
        self._nbytes = tensor.untyped_storage().nbytes()
        self._constant = constant
        self._host: torch.Tensor | None = None
        self._away = False

    def offload(self) -> None:
        """Move it to the host; does nothing when it is there."""
        if self._away:
            return
        if self._host is None:
            self._host = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, pin_memory=self._tensor.is_cuda)
            self._host.copy_(self._tensor)
        elif not self._constant:
            self._host.copy_(self._tensor)
        self._tensor.untyped_storage().resize_(0)
        self._away = True

    def restore(self) -> None:
        """Move it back; does nothing when it is on the device."""
        if self._away and self._host is not None:
            self._tensor.untyped_storage().resize_(self._nbytes)
            self._tensor.copy_(self._host)
            self._away = False

    def on_cpu(self) -> torch.Tensor:
        """Its values on the CPU, wherever it is; shares memory with what is there already."""
        return self._host if self._away and self._host is not None else self._tensor.cpu()
