"""One flat vector for everything that is trained: parameters and gradients are views, so a reduction is one collective.

    module parameters ──views──► working   (the compute dtype; the same memory as ``data`` when that is float32)
                                 data      float32 master: optimiser, checkpoint, checksum
    module .grad      ──views──► grad_and_tail = [ grad │ tail ]      float32; the tail carries the step's scalars

Each tensor starts on a multiple of 128 bytes (64 in bfloat16), as kernels like it; the gaps are zero and stay zero.

State that no gradient moves (running statistics, frozen networks) can lie there, too, behind the parameters of its
module: so it is broadcast, compared, checkpointed and published with them, and no rank can drift apart unseen. The
optimiser leaves it alone (:meth:`FlatParameters.trained_span`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import nn

from learner.parking import Parkable
from learner.slots import Slot, lay_out_by_role, size_of, slots_of, state, trainable, view_of

__all__ = ["FlatParameters", "Slot", "view_of"]

T = TypeVar("T")


class FlatParameters:
    """Moves every trainable parameter of some modules into one flat float32 vector, and every gradient into another.

    Args:
        modules: modules by role; with one module the tensors keep their own (Hugging Face) names, with several each
            name is prefixed by the role. Tied parameters appear once.
        device: where the vectors live; buffers of the modules must be there already.
        num_scalars: length of the tail.
        dtype: compute type; bfloat16 keeps ``data`` as float32 master and a working copy that the modules use.
        with_state: take in the modules' buffers and frozen parameters as well; all must be float32.

    Raises:
        ValueError: nothing is trainable, or some state is not float32.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        num_scalars: int,
        dtype: torch.dtype = torch.float32,
        with_state: bool = False,
    ) -> None:
        named = list(trainable(modules))
        if not named:
            raise ValueError(f"no trainable parameter in {sorted(modules)}")
        states = list(state(modules)) if with_state else []
        mixed = [name for name, tensor in states if tensor.dtype != torch.float32]
        if mixed:
            raise ValueError(f"{', '.join(mixed)}: buffers and frozen parameters must be float32 to lie in the vector")
        if states and dtype != torch.float32:
            raise ValueError("state lies in the float32 vector only; bfloat16 modules would read a rounded copy of it")
        tensors, self.layout = lay_out_by_role(modules, named, states)
        self.roles = tuple(modules)
        self.size = size_of(self.layout)
        self.data = torch.zeros(self.size, dtype=torch.float32, device=device)
        self.working = self.data if dtype == torch.float32 else torch.zeros(self.size, dtype=dtype, device=device)
        self.grad_and_tail = torch.zeros(self.size + num_scalars, dtype=torch.float32, device=device)
        self.grad = self.grad_and_tail[: self.size]
        self.tail = self.grad_and_tail[self.size :]
        self._tensors = tensors
        self._trained = {id(parameter) for _, parameter in named}
        for slot, tensor in zip(self.layout, tensors, strict=True):
            view_of(self.data, slot).copy_(tensor.detach())
            tensor.data = view_of(self.working, slot)
            if id(tensor) in self._trained:
                tensor.grad = None
                tensor.grad_dtype = torch.float32  # bfloat16 gradients are added up in float32
                tensor.grad = view_of(self.grad, slot)
        self._master = Parkable(self.data)
        self.refresh()

    def slots(self, role: str) -> tuple[Slot, ...]:
        """Where the tensors of one module lie, under the names that they have in it."""
        return slots_of(self.layout, self.roles, role)

    def span(self, role: str) -> slice:
        """The part of the vectors that one module has, gaps included; parts of all modules make up the whole."""
        following = [self.slots(r)[0].offset for r in self.roles[self.roles.index(role) + 1 :]]
        return slice(self.slots(role)[0].offset, following[0] if following else self.size)

    def trained_span(self, role: str) -> slice:
        """The same without its state: what an optimiser may change."""
        span = self.span(role)
        offsets = {s.offset for s in self.layout if span.start <= s.offset < span.stop}
        state = [s.offset for s, t in zip(self.layout, self._tensors, strict=True) if id(t) not in self._trained]
        return slice(span.start, min((o for o in state if o in offsets), default=span.stop))

    def refresh(self) -> None:
        """Bring the working copy up to date with the master, after anything wrote to ``data``."""
        if self.working is not self.data:
            self.working.copy_(self.data)

    def zero_grad(self) -> None:
        """Clear gradient and tail in place; the views stay."""
        self.grad_and_tail.zero_()

    def check_views(self) -> None:
        """Make sure that every parameter and gradient still lies in the flat vectors.

        Raises:
            RuntimeError: names the tensor whose ``.data`` or ``.grad`` was replaced.
        """
        for slot, parameter in zip(self.layout, self._tensors, strict=True):
            if parameter.data_ptr() != view_of(self.working, slot).data_ptr():
                raise RuntimeError(f"{slot.name}: its .data was replaced, so it is no view of the flat vector any more")
            if id(parameter) not in self._trained:
                continue
            if parameter.grad is None or parameter.grad.data_ptr() != view_of(self.grad, slot).data_ptr():
                raise RuntimeError(
                    f"{slot.name}: its .grad was replaced, so its gradient would not be reduced; use zero_grad() of "
                    "the flat parameters, not of the module or an optimiser"
                )

    def check_graph(self, loss: torch.Tensor) -> None:
        """Make sure that ``loss`` has gradients for nothing but what lies in the flat vector; walks its whole graph.

        Raises:
            RuntimeError: a module outside is part of it: no rank would hear of its gradient, and no optimiser.
        """
        seen: set[Any] = set()
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in self._trained:
                raise RuntimeError(
                    f"the loss has a gradient for a tensor {list(leaf.shape)} outside the flat vector: its module "
                    "would not be synchronised over the ranks; give it to FlatParameters with the others"
                )
            waiting.extend(following for following, _ in node.next_functions)

    # ------------------------------------------------------------------ as learner.parameters.Parameters

    in_step = False
    """Ranks meet in the reduction only."""

    @property
    def reduced(self) -> torch.Tensor:
        """What an update's one all_reduce sums: gradient and tail."""
        return self.grad_and_tail

    @property
    def replicated(self) -> tuple[torch.Tensor, ...]:
        """What every rank holds a copy of."""
        return (self.data,)

    def run(self, work: Callable[[], T]) -> T:
        """Forward passes; all parameters are at hand at any time."""
        return work()

    def backward(self, work: Callable[[], tuple[torch.Tensor, T]]) -> T:
        """Add the gradient of the loss that ``work`` returns beside something else, which is returned."""
        loss, rest = work()
        loss.backward()
        return rest

    def finish_gradient(self) -> None:
        """After the last :meth:`backward` of an update: nothing of its gradient may lie elsewhere."""
        self.check_views()

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What is published: the whole vector, which begins at element 0."""
        yield 0, self.data

    def assist(self) -> None:
        """What other ranks do while rank 0 reads :meth:`pieces`: nothing."""

    # ------------------------------------------------------------------ on the CPU, and away from the device

    def checksum(self) -> int:
        """xxh3-64 over the bytes of ``data``."""
        return int(xxhash.xxh3_64_intdigest(self._bytes()))

    def checksums(self) -> list[int]:
        """xxh3-64 of each tensor of ``data``, in the order of ``layout``; tells which ones differ."""
        raw = self._bytes()
        return [xxhash.xxh3_64_intdigest(raw[4 * s.offset : 4 * (s.offset + s.numel)]) for s in self.layout]

    def tensors(self, role: str) -> dict[str, torch.Tensor]:
        """Copies of a module's float32 master tensors on the CPU by name, each with memory of its own."""
        data = self._master.on_cpu()
        return {slot.name: view_of(data, slot).clone() for slot in self.slots(role)}

    def offload(self) -> None:
        """Give the vectors' device memory back; what reads them on the CPU still works. Gradients are not kept."""
        self._master.offload()
        for vector in self._scratch:
            vector.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take it again; parameters and gradients are views as before, with the same values and zero gradients."""
        self._master.restore()
        for vector in self._scratch:
            vector.untyped_storage().resize_(vector.numel() * vector.element_size())
        self.zero_grad()
        self.refresh()

    @property
    def _scratch(self) -> list[torch.Tensor]:
        return [self.grad_and_tail] + ([self.working] if self.working is not self.data else [])

    def _bytes(self) -> memoryview:
        return memoryview(self._master.on_cpu().numpy().view(np.uint8))
