"""The messages between the buffer server and its clients, in one table. Each is a msgpack header with a ``type``.

Transport: the server binds a ROUTER (``ROUTER_MANDATORY``), each client connects one DEALER. TCP keeps order; a client
numbers its messages with ``seq`` (from 1), the server counts gaps. Submissions are repeated until acknowledged and the
ledger is idempotent in (ordinal, attempt), so nothing is lost and nothing counted twice.

| type | from | fields | answer |
|---|---|---|---|
| hello | any | protocol, schema, contract, role, name, pid, host, rank, world, stage, step, group | welcome, refused |
| muster | recruit | settings and group: what ranks share, store: where rank 0 listens | mustered, when all are there |
| credit | actor | count: tickets it can take now, received: tickets seen so far | tickets, at once or when admitted |
| credit | scorer | count: groups it can take now, received: groups seen so far | lease, at once or when there are any |
| submit | actor | groups + frames (:mod:`async_rl.wire`); rewards are NaN where the stage ``reward`` gives them | ack |
| annotate | scorer | annotations + frames: rewards, or ref_logprobs, see :class:`async_rl.data.Annotation` | ack |
| fail | actor, scorer | ordinal, attempt, reason, detail, final | ack |
| asleep | actor | none: it has given its device back (colocated); it wakes with the next ``version`` | none |
| beat | any | timer: see :class:`async_rl.timer.StateTimer`, in_flight, cpu_s, rss_bytes, info | beat |
| live | actor, evaluator | epoch, version, checksum, transfer_s, commit_s, pause_s, received | none: it counts |
| relay | actor | address: where other hosts may pull weights from it, or empty, key: its public key | parents |
| receives | actor | devices: of its workers, which can take part in broadcasts of weights | none |
| next | learner | step, also ahead; an untrained one gives the same shard again | shard, when deliverable; or stop |
| trained | learner 0 | step (-1: the start version), manifest, stats, sends | trained: books, stopping, broadcast |
| broadcast | learner 0 | epoch, version, missing: ranks that did not come, error: empty where it went well | none |
| snapshot | learner 0 | path: folder of the run for ``ledger.json``, ``groups.bin`` | snapshot (path, ok, detail) |
| trouble | learner 0 | reason: why a checkpoint cannot be written, shown as a notice; empty: it is over | none |
| eval | evaluator | epoch, version, metrics, samples | none; forwarded in shard stats |
| done | learner 0 | stopped: true before the last step | stop: actors, after the last eval all |
| fatal | any | reason: ends the run with this sentence | stop goes to all |
| dead | launcher | name: a client whose process has ended; its leases return | none |
| stop | launcher | reason: wind down | stop, in place of the ranks' shards |
| bye | any | none: leaves on purpose, leases return | none |

| type | to | fields |
|---|---|---|
| welcome | any | run_id, heartbeat_s, next_step, epoch, life, start_version, manifest (or None), weights_address |
| refused | any | reason: a sentence; code: hello, hello_first, replaced, ahead, over, forsaken, or a message's fault |
| tickets | actor | tickets: list of :class:`Ticket` as lists |
| lease | scorer | groups + frames, lease_s: to be annotated in that time, or another scorer gets them |
| ack | actor, scorer | results: [[ordinal, attempt, outcome, reason]], see :class:`async_rl.buffer.records.Answer` |
| cancel | actor | tickets: [[ordinal, attempt]] that moved on: stop generating |
| mustered | recruit | store: of rank 0, with which the ranks make their process group |
| version | actor, evaluator | manifest of the newest version; again while it sleeps: there is more work at it |
| parents | actor | parents: [[address, depth]] by stripe (:mod:`async_rl.weights.tree`); leads: it pulls for its host |
| offer | actor | its place in the broadcast of the ``version`` that follows: :class:`async_rl.weights.offer.Offer` |
| shard | learner | step, groups + frames, minibatch, counts, costs (:mod:`async_rl.buffer.sharding`), stats |
| status | monitor | the run at a glance, after each event worth it and at each of its beats |
| stop | all | reason, error (bool); step: only in the answer to ``next`` |

Winding down: a rank gets ``stop`` as the answer to ``next`` of the first step that no rank has, so that all end after
the same step; one that all have ahead is not begun, because ``trained`` says ``stopping``. Rank 0 then sends
``snapshot`` and ``done`` with ``stopped``. An error stops all at once.
Rejoining: a client that is told ``hello_first`` (its connection broke, it was taken for dead, or the server was started
again) says hello again and repeats its credit, live version, waiting or trained step, snapshot, newest evaluation,
``done``, and what is unacknowledged: groups, annotations, failed attempts. A server that is silent for a period of
``heartbeat_s`` is missed, and for ``SERVER_GONE_S`` given up.
A learner's ``step`` in ``hello`` is the one that it continues with, later one more than the newest whose shard it has;
``group`` names the life of its group. One that the server has not heard of and whose step lies before the ledger's has
lost what came after: the run goes back there, in the next ``epoch``. One beyond the ledger's is refused as ``ahead``.
Versions are ordered by (epoch, version). In a run with an adapter ``hello`` also has ``base``, a checksum of the model
below it, which must be the server's (:mod:`async_rl.base_checksum`).
Where versions are broadcast, ``trained`` has ``sends``: the store of rank 0, and its device. The answer's ``broadcast``
has the group's name and its world, of which 1 is rank 0 alone; each actor in it gets its ``offer`` before ``version``.
A ``recruit`` is a rank of a group over several hosts before there is a group (:mod:`async_rl.buffer.muster`): with the
answer it leaves, and comes again as a learner. When a rank has vanished with its host the others are refused as
``forsaken`` (:mod:`async_rl.buffer.partners`): they are inside a collective that will not end, and begin again.
Colocated (``max_staleness`` 0): an actor that holds nothing any more, after some work, gives its device back and says
``asleep``; an empty list of ``tickets`` tells one that is awake for nothing to do so, too. A step is delivered once
every actor that had such a message has said so. It wakes with the next ``version``, which may be the one that it has
(a group was filtered or lost, so one more of that version is wanted), loads it and says ``live``. Tickets that cross
its ``asleep`` are taken back: a ``cancel`` follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PROTOCOL_VERSION = 4
Role = Literal["actor", "scorer", "evaluator", "learner", "monitor", "recruit"]
ROLES: tuple[Role, ...] = ("actor", "scorer", "evaluator", "learner", "monitor", "recruit")
Stage = Literal["reward", "reference"]
STAGES: tuple[Stage, ...] = ("reward", "reference")
BEATS_PER_PERIOD = 3
"""Clients beat so often in a period of ``buffer.heartbeat_s``; one that was silent for a whole period is dead."""

SERVER_GONE_S = 60.0
"""A client ends when the server has been silent for so long; a restarted one has that time to come back."""


def is_answer(question: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Whether a message answers this question: what both name, ``step`` or ``path``, is the same.

    A question that was asked twice, as after a break, is answered twice: the second answer must not be taken for that
    of the next question.
    """
    return all(question[name] == answer[name] for name in ("step", "path") if name in question and name in answer)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right and duty to produce one group."""

    ordinal: int
    """Position in the task stream."""
    attempt: int
    """0, or the number of times that earlier holders lost it."""
    task_index: int
    """Index into the training problems."""
    group_size: int
    """Trajectories to produce."""
    version: int
    """Live version of the holder when it was issued; its tokens are no older."""
    lease_s: float
    """Seconds until the server takes it back."""
    draw: int = 0
    """Earlier attempts that failed by their content, not by a fault of the machinery: the samples depend on
    (ordinal, draw), so that a lost attempt is sampled again as it was."""

    def to_wire(self) -> list[Any]:
        """As a plain list."""
        return [
            self.ordinal,
            self.attempt,
            self.task_index,
            self.group_size,
            self.version,
            self.lease_s,
            self.draw,
        ]

    @classmethod
    def from_wire(cls, fields: list[Any]) -> Ticket:
        """From the list that :meth:`to_wire` made."""
        return cls(*fields)
