"""transformers without what a model of one process never runs; that is a third of the start of every process with one.

    import_transformers() ─► transformers.modeling_utils      left out: torch._dynamo, DTensor, FSDP, accelerate

On the way to any model transformers imports torch's compiler and its distributed tensors, for decorators and for type
checks; both take longer than torch itself. Here the decorators are lazy ones while it is imported, and it is told that
it shards no model: no model here is sharded. Whoever compiles or distributes later imports the real thing. The same
goes for accelerate, which places models on devices; it is there where peft is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_DISTRIBUTED = "torch.distributed.tensor"
_INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"
_PLACING = "accelerate"
_CORE = ("transformers.modeling_utils", "transformers.models.auto.auto_factory")


def import_transformers() -> None:
    """Import the part of transformers that all its models have in common; does nothing where that has happened."""
    if _COMPILER in sys.modules or _CORE[0] in sys.modules:
        return
    try:
        with _stand_ins():
            for name in _CORE:
                importlib.import_module(name)
    except Exception:  # a version that asks for more: as it wants, then; what is wrong with it comes up again
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


@contextmanager
def no_distributed_tensors() -> Iterator[None]:
    """Within it, who looks whether a tensor is a distributed one finds that there are none; for saving a model."""
    if _DISTRIBUTED in sys.modules:
        yield
        return
    sys.modules[_DISTRIBUTED] = None  # type: ignore[assignment]  # the import system's word for what is not there
    try:
        yield
    finally:
        del sys.modules[_DISTRIBUTED]


@contextmanager
def _stand_ins() -> Iterator[None]:
    """What transformers finds in place of the compiler and of distributed tensors."""
    import torch.compiler
    import torch.distributed

    compiler, indexing = ModuleType(_COMPILER), ModuleType(_INDEXING)
    compiler.__path__ = []
    for hint in ("allow_in_graph", "assume_constant_result"):
        setattr(compiler, hint, _unmarked)
    indexing.TransformGetItemToIndex = _transform_getitem_to_index  # type: ignore[attr-defined]
    stand_ins: dict[str, Any] = {_COMPILER: compiler, _INDEXING: indexing}
    if _PLACING not in sys.modules:
        stand_ins[_PLACING] = None  # is not there, for all that transformers will ask
    saved = torch.compiler.disable, torch.distributed.is_available
    sys.modules |= stand_ins
    torch.compiler.disable, torch.distributed.is_available = _disable, _is_available
    try:
        yield
    finally:
        torch.compiler.disable, torch.distributed.is_available = saved
        for name in stand_ins:
            del sys.modules[name]


def _disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """``torch.compiler.disable``, but the compiler is imported when the function is first called."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(fn, recursive)


def _is_available() -> bool:
    """``torch.distributed.is_available``, which transformers asks once, to shard models."""
    return False


def _unmarked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A hint to the compiler, about kernels of quantised models only."""
    return fn


def _transform_getitem_to_index() -> Any:
    """Only called where masks are made by vmap."""
    return importlib.import_module(_INDEXING).TransformGetItemToIndex()
