"""Which sequences go through a model together: similar lengths, under a budget of padded tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def token_batches(lengths: Sequence[int], budget: int, most: int | None = None) -> Iterator[list[int]]:
    """Indices of sequences, longest first.

    Args:
        lengths: of the sequences, in tokens.
        budget: most tokens of a batch, padding included; a longer sequence gets a batch of its own.
        most: most sequences of a batch; ``None``: any number.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        full = len(batch) == most or (len(batch) + 1) * lengths[batch[0]] > budget if batch else False
        if full:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
