"""What a receiver is told of a version that comes by broadcast, and in which blocks its bytes then come. Pure.

buffer server ──Offer(store, group, rank)──► receiver      flat bytes │ block 0 │ block 1 │ ...  whole tensors each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from async_rl.errors import WeightsError
from async_rl.weights.manifest import Tensor

BLOCK_BYTES = 256 << 20
"""A block is at most so long, unless one tensor is longer: what is held beside the model, on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A place in the broadcast of one version."""

    epoch: int
    version: int
    store: str
    """``HOST:PORT`` of the store in which sender and receivers meet."""
    group: str
    """Names the communicator; it is another one whenever its members are."""
    rank: int
    """Of the receiver's first worker; the sender is 0."""
    world: int
    """Sender and workers of all receivers."""
    deadline_s: float
    """The sender gives up after so long."""

    @property
    def order(self) -> tuple[int, int]:
        """As :attr:`async_rl.weights.manifest.Manifest.order`."""
        return self.epoch, self.version

    @property
    def key(self) -> str:
        """Under which sender and receivers of this version meet in the store."""
        return meeting(self.group, self.order)

    def to_wire(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self)

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Offer:
        """From :meth:`to_wire`, what else is in ``fields`` is passed over.

        Raises:
            WeightsError: something is missing or of the wrong type.
        """
        try:
            return cls(
                epoch=int(fields["epoch"]),
                version=int(fields["version"]),
                store=str(fields["store"]),
                group=str(fields["group"]),
                rank=int(fields["rank"]),
                world=int(fields["world"]),
                deadline_s=float(fields["deadline_s"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WeightsError(f"malformed offer: {error!r}") from None


def meeting(group: str, order: tuple[int, int]) -> str:
    """Key of a version's meeting in the store."""
    return f"{group}/{order[0]}.{order[1]}"


def blocks(tensors: Sequence[Tensor], nbytes: int, most: int = BLOCK_BYTES) -> list[tuple[int, int]]:
    """Begin and end of each block; together they are all bytes in order, and no tensor lies in two.

    Args:
        tensors: of the version.
        nbytes: of the version.
        most: bytes of a block of more than one tensor.
    """
    cuts, begin = [0], 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset > begin and tensor.offset + tensor.nbytes - begin > most:
            begin = tensor.offset
            cuts.append(begin)
    return list(zip(cuts, [*cuts[1:], nbytes], strict=True))
