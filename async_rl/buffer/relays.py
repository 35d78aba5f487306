"""Who pulls the weights from whom: decided here, where it is known which hosts there are and how far they are.

    relay {address, key} ─► hosts in order ─► weights/tree.py ─► parents [[address, depth] per stripe], leads ─► actors

One process sends on for its host, and leads: the first that said so. It is the one that is to pull, so that chunks are
sent on as they come. A process that cannot listen says so by an empty address, and has the parents of its host. Hosts
that are late with a version come last, where nobody waits for them. Those of the learner's host map its memory and are
left out. Hosts relay to each other if they have the same key, and not over loopback, which ends at each of them.
Where nothing of this is possible, and whenever a parent fails, the learner is asked.

Who says ``relay`` is answered in the same turn of the server. The others hear of it with the next version or tick, so
that many who come at the same time cost each of them one message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from async_rl.buffer.fields import take
from async_rl.buffer.post import Post
from async_rl.buffer.roster import Roster, Session
from async_rl.buffer.versions import Versions
from async_rl.config import WeightsConfig
from async_rl.curve import is_loopback
from async_rl.errors import WireError
from async_rl.route import parted
from async_rl.weights.tree import addressed, parents
from async_rl.wire import Header

_MOST_CHARACTERS = 300

Rows = list[list[str | int]]
"""[address, depth] for each stripe; an empty address is the learner's."""
_ALONE: tuple[Rows, str] = ([], "")
_NOTHING: tuple[Rows, bool] = ([], True)
"""What everybody takes for granted who was told nothing."""


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
        """By identity: what it was told last."""
        self._asked: list[bytes] = []
        self._seen: object = None
        """What the decisions were made of."""

    def register(self, actor: Session, header: Header) -> None:
        """A process serves what it has, or would like to pull from others that do; it is told whom it pulls from.

        Raises:
            WireError: ``bad_field``.
        """
        address, key = take(header, "address", str), take(header, "key", str, "")
        if not _is_address(address) or len(address) + len(key) > _MOST_CHARACTERS:
            raise WireError("bad_field", f"address {address[:60]!r} of a relay")
        actor.relay, actor.relay_key = address, key
        if self._config.relay:
            self._asked.append(actor.identity)

    def answer(self) -> None:
        """Tell those that have said ``relay`` since the last call."""
        if self._asked:
            asked, self._asked = self._asked, []
            table = self._table(self._roster.of("actor"))
            for actor in filter(None, map(self._roster.find, asked)):
                self._tell(actor, table)

    def update(self) -> None:
        """Tell those whose parents have changed."""
        if not self._config.relay:
            return
        actors = self._roster.of("actor")
        seen = [(a.identity, a.relay, a.relay_key, a.fenced, self._is_learners(a.host)) for a in actors]
        if seen == self._seen:
            return
        self._seen = seen
        table = self._table(actors)
        for actor in actors:
            if _word(actor, table) != self._told.get(actor.identity, _NOTHING):
                self._tell(actor, table)
        here = {actor.identity for actor in actors}
        self._told = {identity: word for identity, word in self._told.items() if identity in here}

    def _tell(self, actor: Session, table: dict[tuple[str, str], tuple[Rows, str]]) -> None:
        rows, leads = self._told[actor.identity] = _word(actor, table)
        self._post.send(actor, "parents", parents=rows, leads=leads)

    def _table(self, actors: Sequence[Session]) -> dict[tuple[str, str], tuple[Rows, str]]:
        """By key and host: whom it pulls from, and the name of who sends on."""
        trees: dict[tuple[str, str], dict[str, Session]] = defaultdict(dict)
        for actor in actors:
            if actor.relay and not self._is_learners(actor.host):
                reach = actor.host if is_loopback(parted(actor.relay)[0]) else ""
                trees[actor.relay_key, reach].setdefault(actor.host, actor)
        table: dict[tuple[str, str], tuple[Rows, str]] = {}
        for (key, _), tree in trees.items():
            hosts = sorted(tree.values(), key=lambda actor: actor.fenced)  # stable: then in order of arrival
            addresses = [actor.relay for actor in hosts]
            for actor, row in zip(hosts, parents(len(hosts), self._config.relay), strict=True):
                rows: Rows = [[p.address, p.depth] for p in addressed(row, addresses)]
                table[key, actor.host] = rows, actor.name
        return table

    def _is_learners(self, host: str) -> bool:
        newest = self._versions.newest
        return self._config.pulls == "auto" and newest is not None and newest.host == host


def _word(actor: Session, table: Mapping[tuple[str, str], tuple[Rows, str]]) -> tuple[Rows, bool]:
    """Its parents, and whether it leads."""
    rows, leader = table.get((actor.relay_key, actor.host), _ALONE)
    return rows, leader in ("", actor.name)


def _is_address(text: str) -> bool:
    """``tcp://HOST:PORT``, or nothing."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    return not text or (text.startswith("tcp://") and host != "" and port.isdecimal())
