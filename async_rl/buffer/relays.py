"""Who pulls the weights from whom: decided here, where it is known which hosts there are and how far they are.

    relay {address, key} ─► hosts in order ─► weights/tree.py ─► parents [[address, depth] per stripe], leads ─► actors

One process sends on for its host, and leads: the first that said so. It is the one that is to pull, so that chunks are
sent on as they come. Hosts that are late with a version come last, where nobody waits for them. Those of the learner's
host map its memory and are left out. Hosts relay to each other if they have the same key.
Where nothing of this is possible, and whenever a parent fails, the learner is asked.
"""

from __future__ import annotations

from collections import defaultdict

from async_rl.buffer.fields import take
from async_rl.buffer.post import Post
from async_rl.buffer.roster import Roster, Session
from async_rl.buffer.versions import Versions
from async_rl.config import WeightsConfig
from async_rl.errors import WireError
from async_rl.weights.tree import addressed, parents
from async_rl.wire import Header

_MOST_CHARACTERS = 300

Rows = list[list[str | int]]
"""[address, depth] for each stripe; an empty address is the learner's."""
_ALONE: tuple[Rows, str] = ([], "")


class Relays:
    """The hosts that send weights on.

    Args:
        config: whether, and to how many others.
        roster: the clients.
        post: where messages go.
        versions: of the weights.
    """

    def __init__(self, config: WeightsConfig, roster: Roster, post: Post, versions: Versions) -> None:
        self._config, self._roster, self._post, self._versions = config, roster, post, versions
        self._told: dict[bytes, tuple[Rows, bool]] = {}
        """By identity: what it was told last; nothing is the same as no parents."""

    def register(self, actor: Session, header: Header) -> None:
        """A process serves what it has.

        Raises:
            WireError: ``bad_field``.
        """
        address, key = take(header, "address", str), take(header, "key", str, "")
        if not address.startswith("tcp://") or len(address) + len(key) > _MOST_CHARACTERS:
            raise WireError("bad_field", f"address {address[:60]!r} of a relay")
        actor.relay, actor.relay_key = address, key
        self.update()

    def update(self) -> None:
        """Tell those whose parents have changed."""
        if not self._config.relay:
            return
        told: dict[bytes, tuple[Rows, bool]] = {}
        table = self._table()
        for actor in self._roster.of("actor"):
            rows, leader = table.get((actor.relay_key, actor.host), _ALONE) if actor.relay else _ALONE
            word = rows, leader in ("", actor.name)
            if word != self._told.get(actor.identity, ([], True)):
                self._post.send(actor, "parents", parents=word[0], leads=word[1])
            told[actor.identity] = word
        self._told = told

    def _table(self) -> dict[tuple[str, str], tuple[Rows, str]]:
        """By key and host: whom it pulls from, and the name of who sends on."""
        trees: dict[str, dict[str, Session]] = defaultdict(dict)
        for actor in self._roster.of("actor"):
            if actor.relay and not self._is_learners(actor.host):
                trees[actor.relay_key].setdefault(actor.host, actor)
        table: dict[tuple[str, str], tuple[Rows, str]] = {}
        for key, tree in trees.items():
            hosts = sorted(tree.values(), key=lambda actor: actor.fenced)  # stable: then in order of arrival
            addresses = [actor.relay for actor in hosts]
            for actor, row in zip(hosts, parents(len(hosts), self._config.relay), strict=True):
                rows: Rows = [[p.address, p.depth] for p in addressed(row, addresses)]
                table[key, actor.host] = rows, actor.name
        return table

    def _is_learners(self, host: str) -> bool:
        newest = self._versions.newest
        return self._config.path == "auto" and newest is not None and newest.host == host
