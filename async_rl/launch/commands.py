"""The command line of each process of a run, and which GPUs it may see. Pure: nothing is started here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.hosts import ONE_HOST, LearnerHosts

MAX_GROUP_RESTARTS = 1_000_000
"""torchrun counts restarts for good; the launcher decides when enough is enough (:mod:`async_rl.launch.policy`)."""
LAST_STEP_S = 300
"""Between torchrun's request to end and the death of its ranks; torchrun itself would give them 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """How the processes of one run are started."""

    config: Path
    """The resolved configuration in the run folder."""
    out: Path
    """Run folder."""
    ranks: int
    """Processes of the learner group on this host."""
    resume: Path | None = None
    """Checkpoint folder from which the server continues."""
    is_control: bool = False
    """Whether environments are controlled; else a language model is trained."""
    hosts: LearnerHosts = ONE_HOST
    """Over which the learner group is spread."""

    def server(self, *, recover: bool = False) -> list[str]:
        """The buffer server; it writes ``out/server.json`` once its socket is bound.

        Args:
            recover: another life of the same run: from its journal, at the same address.
        """
        command = [sys.executable, "-m", "async_rl.buffer.server", str(self.config), "--out", str(self.out)]
        if recover:
            return [*command, "--recover"]
        return [*command, "--resume", str(self.resume)] if self.resume else command

    def learner(self, address: str) -> list[str]:
        """The ranks of this host under torchrun; one alone starts sooner without. They find their checkpoint."""
        launch = [sys.executable]
        if self.ranks > 1:
            # not --standalone: that is a store on a port of all interfaces, which unpickles what anyone writes to it
            launch += ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"]
            launch += ["--nproc-per-node", str(self.ranks)]
            launch += ["--max-restarts", str(MAX_GROUP_RESTARTS)]
            # without a folder for logs one stays behind among the temporary ones
            launch += ["--log-dir", str(self.hosts.folder(self.out) / "logs" / "torchrun")]
            if not self.hosts.is_first:  # asked to end, they end their step; on the first host the server asks them
                launch += ["--shutdown-timeout", str(LAST_STEP_S)]
        main = ["-m", f"learner.{self._domain}main", str(self.config), "--out", str(self.out)]
        main += ["--connect", self.hosts.address or address]
        if self.hosts.count > 1:
            main += ["--nnodes", str(self.hosts.count), "--node-rank", str(self.hosts.index)]
        return [*launch, *main]

    def actor(self, address: str, name: str) -> list[str]:
        """One rollout actor."""
        main = ["-m", f"actors.{self._domain}main", str(self.config)]
        return [sys.executable, *main, "--connect", address, "--name", name]

    def scorer(self, address: str, name: str, role: str) -> list[str]:
        """One scorer of the stage ``role``: ``reward`` or ``reference``."""
        main = [sys.executable, "-m", "actors.scorers.main", str(self.config), "--role", role]
        return [*main, "--connect", address, "--name", name]

    def evaluator(self, address: str) -> list[str]:
        """The held-out evaluation."""
        module = "actors.control.evaluation" if self.is_control else "actors.evaluation.main"
        return [sys.executable, "-m", module, str(self.config), "--connect", address]

    @property
    def _domain(self) -> str:
        """Package of the domain's own processes, as a part of a module's name."""
        return "control." if self.is_control else ""


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Identifiers of the GPUs that this process may use, in order, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return [part.strip() for part in env["CUDA_VISIBLE_DEVICES"].split(",") if part.strip() not in ("", "-1")]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return []
    gpus = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(gpus))] if listed.returncode == 0 else []


def assign_gpus(
    gpus: Sequence[str], ranks: int, actors: int, scorers: Sequence[str] = (), *, colocated: bool = False
) -> dict[str, str]:
    """``CUDA_VISIBLE_DEVICES`` per process name: the learner first, then actors and scorers, who share the rest.

    With more GPUs than ranks the actors, then the scorers, take turns on the rest; with no more they take turns on all
    of them, beside the learner. Colocated actors take turns on the learner's. The evaluator sits with the last actor.
    Without GPUs nothing is assigned.

    Args:
        gpus: identifiers, in order.
        ranks: of the learner group.
        actors: number of actors.
        scorers: names of the scorers that hold a model.
        colocated: whether actors give their device to the learner and back.
    """
    if not gpus:
        return {}
    learner = list(gpus[:ranks])
    shared = list(gpus[ranks:]) or list(gpus)
    homes = learner if colocated else shared
    assigned = {"learner": ",".join(learner)}
    assigned |= {f"actor{i}": homes[i % len(homes)] for i in range(actors)}
    taken = 0 if colocated else actors
    assigned |= {name: shared[(taken + i) % len(shared)] for i, name in enumerate(scorers)}
    assigned["evaluator"] = homes[max(0, actors - 1) % len(homes)]
    return assigned
