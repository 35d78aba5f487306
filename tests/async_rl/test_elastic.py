"""64 actors that join and leave at random, some without a word, keep the learner fed; the books close."""

import random
from collections import Counter
from contextlib import ExitStack

from buffer_helpers import answer
from server_helpers import WAIT_S, Peer, config, eventually, lines, manifest, running

from async_rl.protocol import Ticket

STEPS, GROUPS, MOST = 40, 16, 64


class Actor:
    """One of the crowd; it answers some of what it holds whenever it is asked to."""

    def __init__(self, address: str, contract: str, name: str) -> None:
        self.peer = Peer(address, "actor", name, contract)
        welcome = self.peer.connect(WAIT_S)
        self.holds: list[Ticket] = []
        self.stopped = False
        if welcome["manifest"] is not None:
            self.go_live(welcome["manifest"]["version"])
        self.peer.send("credit", count=2)

    def go_live(self, version: int) -> None:
        self.version = version
        self.peer.send("live", version=version, checksum=manifest(version).checksum, transfer_s=0.0, commit_s=0.0)

    def turn(self, draw: random.Random) -> None:
        for header, _ in self.peer.receive(0.0):
            if header["type"] == "tickets":
                self.holds += [Ticket.from_wire(fields) for fields in header["tickets"]]
            elif header["type"] == "version":
                self.go_live(header["manifest"]["version"])
            elif header["type"] == "cancel":
                gone = {tuple(key) for key in header["tickets"]}
                self.holds = [t for t in self.holds if (t.ordinal, t.attempt) not in gone]
            elif header["type"] == "stop":
                self.stopped = True
        done = [t for t in self.holds if draw.random() < 0.8]
        self.holds = [t for t in self.holds if t not in done]
        if done:
            self.peer.send_groups([answer(t) for t in done])
            self.peer.send("credit", count=2 - len(self.holds))

    def leave(self, *, with_a_word: bool) -> None:
        if not with_a_word:
            self.peer._line._joined = False  # so that no bye is said: it looks as if it had been killed
        self.peer.close()


def test_64_actors_that_come_and_go_at_random_keep_the_learner_fed(tmp_path):
    draw = random.Random(0)
    buffer = {"groups_per_step": GROUPS, "max_staleness": 2, "heartbeat_s": 1.0, "watchdog_s": WAIT_S}
    settings = config(steps=STEPS, buffer=buffer)
    contract = settings.contract_hash()
    came, left, most = 0, Counter(), 0
    crowd: list[Actor] = []
    with running(settings, tmp_path) as server, ExitStack() as stack:
        learner = stack.enter_context(Peer(server.address, "learner", "learner0", contract, group="g"))
        learner.connect(WAIT_S)
        learner.request("trained", "trained", step=-1, manifest=manifest(0).to_wire(), stats={})
        stack.callback(lambda: [actor.peer.close() for actor in crowd])
        for step in range(STEPS):
            learner.send("next", step=step)
            shard = None
            while shard is None:
                target = draw.randrange(8, MOST + 1) if step < STEPS // 2 else draw.choice((4, MOST))
                while len(crowd) < min(target, len(crowd) + 8):
                    crowd.append(Actor(server.address, contract, f"a{came}"))
                    came += 1
                for actor in draw.sample(crowd, max(0, min(8, len(crowd) - target))):
                    crowd.remove(actor)
                    how = draw.random() < 0.5
                    left[how] += 1
                    actor.leave(with_a_word=how)
                most = max(most, len(crowd))
                for actor in crowd:
                    actor.turn(draw)
                shard = next((h for h, _ in learner.receive(0.02) if h["type"] == "shard"), None)
            assert shard["step"] == step
            learner.train(step)
        learner.send("done", stopped=False)
        eventually(lambda: server.service.account.status == "completed")
        books, failed = server.service.ledger.books(), dict(server.service.ledger.failed)
    assert most > MOST // 2
    assert left[True] > 10, left
    assert left[False] > 10, left
    assert set(failed) <= {"actor_lost", "run_ended"}
    assert books["issued"] == sum(books.values()) - books["issued"]
    rows = lines(tmp_path / "batches.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert set(Counter(o for row in rows for o in row["ordinals"]).values()) == {1}
    assert books["trained"] == STEPS * GROUPS
