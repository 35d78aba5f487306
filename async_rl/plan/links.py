"""What each link and each process of a run carries in a step, from its size: bytes, seconds, and which is full first.

    parameters, hosts, ranks, step, link ─► Scale ─► loads ─► the fullest one, and what to do about it

W = parameters x bytes of one as published; d = share of W that is sent (below 1: differences); k = weights.relay. Pure.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from async_rl.errors import ConfigError

BYTES_PER_TOKEN = 13
"""Of a trajectory: token, version and log-probability with 4 each, mask with 1."""
_MASTER = 4
"""Bytes of a float32: master weights, gradients, each moment of AdamW."""
_VERSIONS = 3
"""Held in shared memory: the learner's slots; on an actor host the one in use, the next, and one after that."""
PLAIN_BYTES_S, KEYED_BYTES_S = 4.7e9, 1.5e9
"""What one process sends or receives over the network, without keys and with: measured, see docs/scaling.md."""
ENCODE_BYTES_S, APPLY_BYTES_S = 2.4e9, 1.2e9
"""Bytes of a version whose differences are made by four threads, and applied by one: measured there, too."""
_SUFFIX = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of a run.

    Raises:
        ConfigError: a number is out of range; names its option.
    """

    parameters: float
    published_bytes: int = 2
    """Of a parameter: 2 in bfloat16, 4 in float32."""
    hosts: int = 1
    """Actor hosts beside the learner's."""
    relay: int = 0
    """``weights.relay``."""
    sent: float = 1.0
    """d: share of a version's bytes that is sent; below 1 with ``weights.delta``."""
    chunk_bytes: int = 4 << 20
    ranks: int = 1
    sharded: bool = False
    """``learner.strategy = "fsdp"``."""
    shard_optimizer: bool = False
    """``learner.shard_optimizer``."""
    step_s: float
    """Seconds from one version to the next."""
    tokens_per_step: float
    """Tokens of trajectories, prompts included."""
    micro_batch_tokens: int = 16_384
    """Of one forward and backward of a rank."""
    link_bytes_s: float
    """What a host's link carries in each direction, and a rank's to the others."""
    keys: bool = False
    """``buffer.keys``: all is encrypted."""

    def __post_init__(self) -> None:
        ranges = {
            "--parameters": 1 <= self.parameters < math.inf,
            "--hosts": self.hosts >= 1,
            "--ranks": self.ranks >= 1,
            "--sent": 0 < self.sent <= 1,
            "--step-s": 0 < self.step_s < math.inf,
            "--link-gbit": 0 < self.link_bytes_s < math.inf,
            "--median": self.tokens_per_step > 0,
        }
        wrong = [name for name, is_right in ranges.items() if not is_right]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: it must be a number above 0 (--sent: at most 1)")

    @property
    def version_bytes(self) -> float:
        """W."""
        return self.parameters * self.published_bytes

    @property
    def depth(self) -> int:
        """Hosts between the learner and the last one in the trees, its own counted: 1 without relays."""
        if not self.relay:
            return 1
        if self.relay == 1:
            return self.hosts
        depth, reached = 1, 1
        while reached < self.hosts:  # 1 + k + k^2 + ...
            reached += self.relay**depth
            depth += 1
        return depth

    @property
    def live_s(self) -> float:
        """Seconds from publishing until the last host has a version, if nothing else uses the links.

        Once for all with relays, since all stripes move at the same time, and one chunk more for each host on the way;
        one after the other without. As slow as what is slowest: the link, the process that sends, or the differences.
        """
        times = 1 if self.relay else self.hosts
        sent = times * self.version_bytes * self.sent
        seconds = [sent / self.link_bytes_s, sent / self.process_bytes_s]
        if self.sent < 1:
            seconds += [self.version_bytes / ENCODE_BYTES_S, self.version_bytes / APPLY_BYTES_S]
        return max(seconds) + (self.depth - 1) * self.chunk_bytes / self.link_bytes_s

    @property
    def process_bytes_s(self) -> float:
        """What a process that sends or receives weights can take."""
        return KEYED_BYTES_S if self.keys else PLAIN_BYTES_S

    @property
    def passes(self) -> int:
        """Forward and backward passes of a rank in a step."""
        return math.ceil(self.tokens_per_step / self.ranks / self.micro_batch_tokens)

    @property
    def rank_bytes(self) -> float:
        """Memory of a rank for master weights, gradients, two moments: 16 bytes a parameter. Without activations."""
        whole = 1 / self.ranks if self.sharded else 1
        moments = 1 / self.ranks if self.sharded or self.shard_optimizer else 1
        return 2 * _MASTER * self.parameters * (whole + moments)

    @property
    def shared_bytes(self) -> float:
        """Shared memory for weights on any host."""
        return _VERSIONS * self.version_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """What one link carries, or one process."""

    where: str
    bytes_per_step: float
    bytes_per_s: float
    share: float
    """Of what it can carry."""
    remedy: str
    """What helps when it is full."""


def loads(scale: Scale) -> list[Load]:
    """All links, the learner's first, then the processes that weights go through."""
    sent, others = scale.version_bytes * scale.sent, (scale.ranks - 1) / scale.ranks
    if scale.sharded:  # parameters in bfloat16 for each forward, backward and publication; gradients in float32
        each = scale.passes * (2 * 2 + _MASTER) + 2
        between, step = others * scale.parameters * each, "all-gather, all-gather, reduce-scatter"
    else:
        gathered = int(scale.shard_optimizer)  # the parameters, once each rank has stepped its slice
        between = (2 + gathered) * others * scale.parameters * _MASTER
        step = "all-reduce, all-gather" if gathered else "all-reduce"
    relayed = sent * (scale.hosts - 1) / scale.hosts if scale.relay else 0.0
    out = sent * (1 if scale.relay else scale.hosts)
    link, process = scale.link_bytes_s, scale.process_bytes_s
    faster = "weights.delta = true, a longer step (more groups per step), or a faster link"
    longer = "a longer step (more groups per step)"
    cheaper = f"weights.delta = true, or {longer}" if scale.sent == 1 else longer
    if scale.keys:
        cheaper += ", or no keys in a network of your own (--insecure)"
    found = [
        ("learner host, out: weights", out, link, _of_learner(scale, faster)),
        ("actor host, in: weights", sent, link, faster),
        ("actor host, out: weights to other hosts", relayed, link, faster),
        (
            "learner host, in: trajectories",
            scale.tokens_per_step * BYTES_PER_TOKEN,
            link,
            "shorter answers, fewer of them in a step, or a faster link of the learner host",
        ),
        (
            f"rank, in and out: {step}",
            between,
            link,
            "links between the ranks that are faster than those between hosts (NVLink, InfiniBand), or a larger batch",
        ),
        ("chunk server, one core", out, process, _of_learner(scale, cheaper)),
        ("receiver of a host, one core", sent, process, cheaper),
    ]
    if scale.sent < 1:
        found += [
            (
                "chunk server, differences made",
                scale.version_bytes,
                ENCODE_BYTES_S,
                f"weights.delta = false, or {longer}",
            ),
            (
                "receiver, differences applied",
                scale.version_bytes,
                APPLY_BYTES_S,
                f"weights.delta = false, or {longer}",
            ),
        ]
    return [
        Load(where, carried, carried / scale.step_s, carried / scale.step_s / capacity, remedy)
        for where, carried, capacity, remedy in found
    ]


def fullest(scale: Scale) -> Load:
    """What is full first when everything gets larger or faster."""
    return max(loads(scale), key=lambda load: load.share)


def _of_learner(scale: Scale, faster: str) -> str:
    return faster if scale.relay or scale.hosts == 1 else "weights.relay = 4: the learner then sends a version once"


def parse_parameters(text: str) -> float:
    """``7B``, ``135M``, ``1T`` or a plain number.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([MBT]?)", text.strip().upper())
    if match is None:
        raise ConfigError(f"--parameters {text!r}: write it like 135M, 7B or 1T")
    return float(match[1]) * _SUFFIX[match[2]]
