"""Who pulls a version from whom: k interleaved trees of fan-out k over the hosts, so that each link carries it once.

    stripe s = chunks s, s + k, s + 2 k, ...     its tree: hosts s, s + k, ... first, then all others

        learner ─► position 0 ─┬─► 1 ─┬─► k + 1 ...            parent of position p: (p - 1) // k
                               ├─► 2  ├─► ...
                               └─► k  └─► 2 k

In one tree of fan-out k a host sends k versions, and the last host has them after k times the time of one. Here each
host is an inner node of one tree and a leaf of the others: it sends k children a k-th of the version each, which is one
version, and the learner sends one version as well (SplitStream, Castro et al., SOSP 2003). k = 1 is a chain. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEARNER = -1


@dataclass(frozen=True, slots=True)
class Parent:
    """Where a host pulls one stripe from."""

    address: str
    """Of its chunk server; empty: the learner's."""
    depth: int
    """Hosts between it and the learner; -1: it is the learner."""


def parents(num_hosts: int, fanout: int) -> list[list[tuple[int, int]]]:
    """For each host and stripe, the parent (:data:`LEARNER`, or a host) and its depth (-1: the learner).

    Args:
        num_hosts: hosts, numbered by when they come; the first are next to the learner.
        fanout: k, at least 1: children of an inner node, and stripes.
    """
    table: list[list[tuple[int, int]]] = [[] for _ in range(num_hosts)]
    for stripe in range(fanout):
        order = sorted(range(num_hosts), key=lambda host: (host % fanout != stripe, host))
        depths: list[int] = []
        for place, host in enumerate(order):
            above = (place - 1) // fanout
            parent, depth = (order[above], depths[above]) if place else (LEARNER, -1)
            depths.append(depth + 1)
            table[host].append((parent, depth))
    return table


def addressed(row: Sequence[tuple[int, int]], addresses: Sequence[str]) -> tuple[Parent, ...]:
    """A row of :func:`parents` with the hosts' addresses."""
    return tuple(Parent("" if host == LEARNER else addresses[host], depth) for host, depth in row)
