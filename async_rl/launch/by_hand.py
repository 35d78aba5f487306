"""The commands of "Several hosts" (docs/operations.md) as words, for Slurm jobs and Ray clusters alike. Pure.

    async-rl learner  BEGIN...  --set buffer.bind=tcp://ADDRESS                                     one learner host
    async-rl learner  BEGIN...  --trusted-network --nnodes N --node-rank R --rendezvous ADDRESS     several
    async-rl actor    CONFIG    --connect tcp://ADDRESS [--role ROLE] [--engines N] [--name NAME]

A word is a value, or what a shell makes one of (``"$address"``). The launch scripts hand all of them on as they are.
"""

from __future__ import annotations

from collections.abc import Sequence


def learner_words(begin: Sequence[str], address: str, hosts: int = 1, index: str = "0") -> list[str]:
    """Arguments of ``async-rl learner`` or ``launch_learner.sh``; the last one ends with the address.

    Args:
        begin: configuration and run folder: ``CONFIG --out DIR`` or ``CONFIG --resume DIR``.
        address: ``HOST:PORT`` of the buffer server, which the first learner host binds.
        hosts: learner hosts; of several somebody has vouched for the network between them.
        index: of this one, from 0.
    """
    if hosts == 1:
        return [*begin, "--set", f"buffer.bind=tcp://{address}"]
    return [*begin, "--trusted-network", "--nnodes", str(hosts), "--node-rank", index, "--rendezvous", address]


def actor_words(
    config: str, address: str, role: str = "actor", *, engines: str | None = None, name: str | None = None
) -> list[str]:
    """Arguments of ``async-rl actor`` or ``launch_actor.sh``.

    Args:
        config: configuration file.
        address: ``HOST:PORT`` of the buffer server.
        role: ``actor``, ``reward`` or ``reference``.
        engines: processes; ``None``: one, and with the script one for every GPU that it sees.
        name: unique in the run; ``None``: of host and process.
    """
    return [
        *(config, "--connect", f"tcp://{address}"),
        *(() if role == "actor" else ("--role", role)),
        *(() if engines is None else ("--engines", engines)),
        *(() if name is None else ("--name", name)),
    ]
