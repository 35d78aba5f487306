"""All targets, and the share of the inputs that each gets."""

from __future__ import annotations

from fuzzing import file_targets, service_targets, wire_targets
from fuzzing.wire_targets import Target

TARGETS: tuple[Target, ...] = (*wire_targets.TARGETS, *service_targets.TARGETS, *file_targets.TARGETS)
_SHARES = {
    "service": 4.0,
    "ledger": 20.0,
    "config: text": 4.0,
    "config: overrides": 25.0,
    "data": 25.0,
    "checkpoint": 3.0,
    "journal": 4.0,
    "run folder": 1.5,
}
"""By the beginning of a name; the rest, which is quickest and furthest outside, has 150 each."""
SHARES = {t.name: next((n for name, n in _SHARES.items() if t.name.startswith(name)), 150.0) for t in TARGETS}
