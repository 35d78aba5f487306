"""Who takes part in the broadcast of a version: decided here, where it is known which actors live and are in step.

    actor ──devices──► candidate         learner ──trained(manifest, sends: store, device)──► offer()
                                            ├─ offer(store, group, rank, world) ─► each member, before ``version``
                                            └─ trained(broadcast: group, world) ─► the learner, which then sends
    learner ──broadcast(missing, error)──► who missed it is left out until it has caught up by itself

A communicator has fixed members: it stays as long as they do, and nothing went wrong. What is offered to nobody, and
what fails, is pulled as without broadcasts.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from async_rl.buffer.fields import shown, take
from async_rl.buffer.post import Post
from async_rl.buffer.roster import Roster, Session
from async_rl.config import WeightsConfig
from async_rl.errors import WireError
from async_rl.weights.manifest import Manifest
from async_rl.weights.offer import Offer
from async_rl.wire import Header

_MOST_DEVICES = 1024
_MOST_CHARACTERS = 300
_SHOWN = 8


class Broadcasts:
    """The members, from version to version.

    Args:
        config: whether versions are broadcast, and how long the sender waits.
        roster: the clients.
        post: where messages go.
        counts: versions that were ``sent`` and that ``failed``, and how many places were ``offered`` in all.
    """

    def __init__(self, config: WeightsConfig, roster: Roster, post: Post, counts: Counter[str]) -> None:
        self._config, self._roster, self._post, self._counts = config, roster, post, counts
        self._group = ""
        """Name of the communicator; empty: a new one is due."""
        self._members: list[Session] = []
        self._store = ""
        self._sent: tuple[int, int] = (-1, -1)
        """Epoch and version that were offered last."""
        self._late: dict[bytes, tuple[int, int]] = {}
        """By identity what was missed last."""
        self._unfit: dict[bytes, str] = {}
        """By identity why an actor that would take part cannot."""

    def register(self, actor: Session, header: Header) -> None:
        """An actor can take part, with these devices, one for each of its workers.

        Raises:
            WireError: ``bad_field``.
        """
        actor.devices = _devices(take(header, "devices", list))

    def offer(self, header: Header, manifest: Manifest) -> dict[str, Any]:
        """Choose the members of a version and tell each of its place.

        Args:
            header: of ``trained``.
            manifest: what was published.

        Returns:
            ``broadcast``: group and world, for the answer to the learner; nothing where nothing is broadcast.

        Raises:
            WireError: ``bad_field``.
        """
        sends = take(header, "sends", dict, {})
        if self._config.path != "broadcast" or not sends:
            return {}
        store, device = sends.get("store"), sends.get("device")
        if not isinstance(store, str) or not isinstance(device, str) or len(store) + len(device) > _MOST_CHARACTERS:
            raise WireError("bad_field", "trained.sends must name store and device")
        members = self._choose(manifest.order, device)
        same = [actor.identity for actor in members] == [actor.identity for actor in self._members]
        if not (self._group and same and store == self._store):
            self._members, self._group, self._store = members, secrets.token_hex(8), store
        ranks, world = _ranks(members)
        for actor, rank in zip(members, ranks, strict=True):
            place = Offer(
                epoch=manifest.epoch,
                version=manifest.version,
                store=store,
                group=self._group,
                rank=rank,
                world=world,
                deadline_s=self._config.broadcast_s,
            )
            self._post.send(actor, "offer", **place.to_wire())
        self._sent = manifest.order
        self._counts["offered"] += len(members)
        return {"broadcast": {"group": self._group, "world": world}}

    def hear(self, header: Header) -> None:
        """How it went; after anything but success the communicator is of no use.

        Raises:
            WireError: ``bad_field``.
        """
        order = take(header, "epoch", int), take(header, "version", int)
        missing, error = take(header, "missing", list), take(header, "error", str)
        if order != self._sent:  # offered by a server that has died since
            return
        if not error:
            self._counts["sent"] += 1
            return
        self._counts["failed"] += 1
        self._group = ""
        absent = [a for a, rank in zip(self._members, _ranks(self._members)[0], strict=True) if rank in missing]
        for actor in absent:
            self._late[actor.identity] = order
        names = f" ({', '.join(actor.name for actor in absent[:_SHOWN])})" if absent else ""
        print(f"version {order[1]} was not broadcast, it is pulled: {shown(error)}{names}", flush=True)

    def notices(self) -> list[str]:
        """Who pulls although versions are broadcast, and why."""
        named = {actor.identity: actor.name for actor in self._roster.of("actor")}
        late = [
            f"{named[identity]} missed the broadcast of version {order[1]}, and takes part again once it holds it"
            for identity, order in self._late.items()
            if identity in named
        ]
        return late + [f"{named[identity]} {why}" for identity, why in self._unfit.items() if identity in named]

    def _choose(self, order: tuple[int, int], device: str) -> list[Session]:
        """The members, in the order of their arrival.

        Args:
            order: epoch and version.
            device: of the sender.
        """
        taken, self._unfit = {device}, {}
        members: list[Session] = []
        self._late = {
            actor.identity: self._late[actor.identity]
            for actor in self._roster.of("actor")
            if actor.identity in self._late and not _has_caught_up(actor, self._late[actor.identity], order)
        }
        for actor in self._roster.of("actor"):
            if not actor.devices or actor.live < 0 or actor.fenced or actor.identity in self._late:
                continue  # it does not take part, holds nothing yet, or is not in step: it pulls
            why = _unfit(actor, device, taken)
            if why:
                self._unfit[actor.identity] = why
                continue
            members.append(actor)
            taken.update(actor.devices)
        return members


def _ranks(members: Sequence[Session]) -> tuple[list[int], int]:
    """The rank of the first worker of each, behind the sender's, and the size of the group."""
    sizes = [1, *(len(actor.devices) for actor in members)]
    ends = list(accumulate(sizes))
    return ends[:-1], ends[-1]


def _has_caught_up(actor: Session, missed: tuple[int, int], order: tuple[int, int]) -> bool:
    """Whether it holds what it missed; after the run has gone back that version may never come again."""
    return actor.live >= missed[1] or missed[0] != order[0]


def _unfit(actor: Session, device: str, taken: set[str]) -> str:
    """Why its workers can be no members of the communicator; empty: they can."""
    kinds = {name.partition(":")[0] for name in (device, *actor.devices)}
    if len(kinds) > 1:
        return f"computes on another kind of device ({actor.devices[0][:40]}) than the learner: it pulls its weights"
    if not taken.isdisjoint(actor.devices) or len(set(actor.devices)) < len(actor.devices):
        return "shares its device with the learner or another actor, which NCCL does not allow: it pulls its weights"
    return ""


def _devices(raw: list[Any]) -> tuple[str, ...]:
    if len(raw) > _MOST_DEVICES or not all(isinstance(name, str) and 0 < len(name) <= _MOST_CHARACTERS for name in raw):
        raise WireError("bad_field", "receives.devices must be a list of names")
    return tuple(raw)
