"""Brings a checkpoint from rank 0's host to the hosts that do not share its run folder.

rank 0: marker in the run folder ─► who sees it shares the folder, and reads the checkpoint there
        └─ somebody does not ─► every file, block by block, to all ranks ─► FOLDER/received/step_N there ─► load

So parameters, moments and whatever else a domain saves arrive in the form in which they are loaded anyway. Shared or
not is found out, not configured. What is the server's (ledger, groups) stays where it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path, PurePosixPath

from async_rl.errors import AsyncRLError
from learner.group import LearnerGroup

BLOCK_BYTES = 64 << 20
RECEIVED = "received"
"""Folder of what came from rank 0, in the host's own folder; it goes again once it is loaded."""
_MARKER = ".life_"
_OF_THE_SERVER = ("ledger.json", "groups.bin")


def bring(group: LearnerGroup, checkpoint: Path, own: Path, life: str) -> Path:
    """The folder from which this rank loads the checkpoint; a collective of all ranks.

    Args:
        group: the ranks.
        checkpoint: in the run folder as this host names it; it is there on rank 0's host.
        own: this host's own folder.
        life: name of this life of the group, the same on all ranks.

    Raises:
        AsyncRLError: some host could not write what came.
    """
    shares = _shares(group, checkpoint.parent, life)
    if group.all_agree(shares):
        return checkpoint
    target = own / RECEIVED / checkpoint.name
    _ship(group, checkpoint, target if not shares and group.local_rank == 0 else None)
    return checkpoint if shares else target


def discard(group: LearnerGroup, own: Path) -> None:
    """All ranks have loaded what came: it is removed; a collective of all ranks."""
    group.all_agree(True)
    if group.local_rank == 0:
        shutil.rmtree(own / RECEIVED, ignore_errors=True)


def _shares(group: LearnerGroup, folder: Path, life: str) -> bool:
    """Whether this rank sees what rank 0 writes into the folder."""
    marker = folder / f"{_MARKER}{life}"
    if group.rank == 0:
        for stale in folder.glob(f"{_MARKER}*"):  # of a life that ended just then
            stale.unlink()
        marker.touch()
    group.all_agree(True)  # it is there now
    found = marker.exists()
    group.all_agree(True)  # all have looked
    if group.rank == 0:
        marker.unlink()
    return found


def _ship(group: LearnerGroup, source: Path, target: Path | None) -> None:
    """Send the files of ``source`` from rank 0; a rank with a ``target`` writes them."""
    trouble = ""
    if target is not None:
        shutil.rmtree(target.parent, ignore_errors=True)
    for name, block in _blocks(group, source):
        if target is not None and not trouble:
            trouble = _append(target / name, block)
    if not group.all_agree(not trouble):  # nobody goes on alone
        why = f"{trouble}; free some space or check the permissions" if trouble else "the log of another rank says why"
        raise AsyncRLError(f"the checkpoint {source.name} could not be brought to every learner host: {why}")


def _blocks(group: LearnerGroup, source: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of one piece after the other, on every rank; an empty file is one empty piece."""
    listed = json.dumps(_files(source)).encode() if group.rank == 0 else b""
    for name, size in json.loads(group.broadcast_bytes(listed)):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise AsyncRLError(f"rank 0 names a file outside its checkpoint: {name!r}")
        with (source / name).open("rb") if group.rank == 0 else nullcontext() as file:
            for _ in range(0, max(size, 1), BLOCK_BYTES):
                yield name, group.broadcast_bytes(b"" if file is None else file.read(BLOCK_BYTES))


def _files(folder: Path) -> list[tuple[str, int]]:
    """What a rank loads, with sizes."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in _OF_THE_SERVER]
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in found]


def _append(file: Path, block: bytes) -> str:
    """Write a piece; what went wrong, or nothing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as sink:
            sink.write(block)
    except OSError as error:
        return f"{file}: {error.strerror}"
    return ""
