"""What the tests of all loops play with: a server that follows a script, a receiver that prepares at once."""

import os
from dataclasses import dataclass, field

from actors.receiver import Prepared
from async_rl.weights.manifest import Manifest, chunk_checksums, combine


def manifest(version, epoch=0):
    chunks = chunk_checksums(memoryview(b"abcd"), 4)
    return Manifest(
        version=version,
        epoch=epoch,
        run_id="r",
        tensors=(),
        nbytes=4,
        chunk_bytes=4,
        chunks=chunks,
        checksum=combine(chunks),
        segment="s",
        host="h",
    )


class Readable:
    """A descriptor that is always readable, so that the loop never sleeps."""

    def __init__(self):
        self.descriptor = os.eventfd(1)

    def fileno(self):
        return self.descriptor


@dataclass
class Server(Readable):
    """Each turn of the loop takes the next entry of the script, or what it returns; behind it, the server says stop."""

    script: list
    sent: list = field(default_factory=list)
    groups: list = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def receive(self, timeout_s):
        if not self.script:
            return [({"type": "stop", "reason": "end of the script", "error": False}, [])]
        turn = self.script.pop(0)
        return turn() if callable(turn) else turn

    def send(self, kind, **fields):
        self.sent.append((kind, fields))

    def send_groups(self, groups):
        self.groups += groups

    def of(self, kind):
        return [fields for sent, fields in self.sent if sent == kind]


class Receiver(Readable):
    """Prepares at once."""

    def __init__(self, data=b"abcd"):
        super().__init__()
        self.prepared, self.fetched, self.data = None, [], memoryview(data)

    def fetch(self, announced):
        self.fetched.append(announced.version)
        self.prepared = Prepared(manifest=announced, data=self.data, transfer_s=0.5, path="shm")

    def ready(self):
        prepared, self.prepared = self.prepared, None
        return prepared


# -- turns of a script


def version(number):
    return [({"type": "version", "manifest": manifest(number).to_wire()}, [])]


def cancel(*keys):
    return [({"type": "cancel", "tickets": [list(k) for k in keys]}, [])]


def acks(*outcomes, reason="bad_shape"):
    """One message about groups of ordinals 0, 1, ..."""
    return [({"type": "ack", "results": [[i, 0, outcome, reason] for i, outcome in enumerate(outcomes)]}, [])]
