"""What rank 0 does beside training: publish versions, tell the server, log, write checkpoints.

step trained ─► stage: Publisher, manifest ─► announce: trained(step) ─► server ─► books ─► metrics.jsonl
                                                                 └─ who receives ─► broadcast, where the run says so
all trained  ─► checkpoint ─► done ─► server: last evaluation ─► stop ─► its figures ─► metrics.jsonl
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from async_rl.client import Client
from async_rl.config import RunConfig
from async_rl.errors import AsyncRLError, DeadlineError
from async_rl.evaluation import is_evaluated
from async_rl.metrics import Metrics, MetricsWriter
from async_rl.runfolder import RunFolder
from async_rl.timer import StateTimer
from async_rl.weights.manifest import Manifest
from async_rl.wire import Header
from learner.broadcaster import Broadcaster
from learner.checkpoint import CheckpointError, Checkpoints, TrainerState
from learner.domain import Domain
from learner.publisher import Publisher

SNAPSHOT_TIMEOUT_S = 300.0
LAST_TRIES_S = 120.0
"""A run's last checkpoint is tried again for so long; less than server and launcher give a run to wind down."""
_TRY_AGAIN_S = 5.0
FINISH_TIMEOUT_S = 330.0
"""The server waits for the last evaluation, with a deadline of its own that is shorter."""


class Leader:
    """Rank 0's outward side.

    Args:
        config: the run.
        out: run folder.
        client: connected to the server.
        run_id: names the weight segments.
        epoch: of the versions that are published.
        domain: what is trained.
        timer: told when this process publishes and checkpoints.
        start: version that the run starts with.
        broadcaster: sends versions to all engines, where the run says so; it is closed with the leader.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        out: Path,
        client: Client,
        run_id: str,
        epoch: int,
        domain: Domain,
        timer: StateTimer,
        start: int,
        broadcaster: Broadcaster | None = None,
    ) -> None:
        self._config = config
        self._broadcaster = broadcaster
        self._receivers: tuple[Manifest, str, int] | None = None
        """What is to be broadcast, with the name and the size of the group."""
        self._client = client
        self._domain = domain
        self._timer = timer
        self._start = start
        self._publisher = Publisher(run_id, domain.published, config.weights.chunk_bytes, config.dtype, epoch)
        self._metrics = MetricsWriter(out, config, start)
        self._checkpoints = Checkpoints(out.resolve(), config.checkpoint.keep)
        self._out = out
        self._saved_step = -1
        self.stopping = False
        """Whether the run winds down, by the server's answer to the last version: no step is begun any more."""
        self._trouble = ""
        self._staged: Manifest | None = None
        self._last_eval = start - 1  # the folder of a resumed run holds older ones

    def stage(self, version: int) -> None:
        """Copy the present weights into their slot, as ``version``; nobody hears of it before :meth:`announce`."""
        with self._timer.during("publishing"):
            evaluated = is_evaluated(self._config, version, self._start)
            self._staged = self._publisher.publish_pieces(self._domain.flat.pieces(), version, evaluated)

    def announce(self, step: int) -> Metrics:
        """Tell the server of the staged version, which moves the groups of ``step`` to trained; -1: the start version.

        Returns:
            The books and the seconds that copying and hashing took.
        """
        if self._staged is None:
            raise RuntimeError("announce() before stage()")
        manifest, self._staged = self._staged, None
        seconds = self._publisher.publish_s
        with self._timer.during("publishing"):
            wire, stats = manifest.to_wire(), {"publish_s": seconds}
            told: dict[str, Any] = {"sends": self._broadcaster.terms} if self._broadcaster else {}
            header, _ = self._client.request("trained", "trained", step=step, manifest=wire, stats=stats, **told)
        self.stopping = header["stopping"]
        place = header.get("broadcast", {"world": 1})
        self._receivers = (manifest, place["group"], place["world"]) if place["world"] > 1 else None
        metrics: Metrics = {f"books/{name}": float(count) for name, count in header["books"].items()}
        return metrics | {"time/publish_s": seconds}

    @property
    def has_receivers(self) -> bool:
        """Whether the announced version is to be broadcast: they wait."""
        return self._receivers is not None

    def broadcast(self) -> Metrics:
        """Send the announced version to those that wait for it; what goes wrong is told to the server.

        Returns:
            The seconds that it took, at most about ``weights.broadcast_s``.
        """
        if self._receivers is None or self._broadcaster is None:
            raise RuntimeError("broadcast() without receivers")
        (manifest, group, world), self._receivers = self._receivers, None
        with self._timer.during("publishing"):
            sent = self._broadcaster.send(manifest, group, world, self._domain.flat.pieces())
        if sent.error:
            print(f"version {manifest.version} was not broadcast: {sent.error}", file=sys.stderr, flush=True)
        self._client.send(
            "broadcast",
            epoch=manifest.epoch,
            version=manifest.version,
            missing=list(sent.missing),
            error=sent.error,
        )
        return {"time/broadcast_s": sent.seconds}

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics line of a step."""
        self._metrics.write(step, metrics)

    def checkpoint(self, state: TrainerState, *, final: bool) -> None:
        """Write a checkpoint, once per step. One that cannot be written is a warning, which the server shows, too.

        Args:
            state: of the learner.
            final: the run ends with it, so it is tried again for :data:`LAST_TRIES_S`.

        Raises:
            CheckpointError: a ``final`` one could not be written in that time; names the newest that there is.
        """
        deadline = time.monotonic() + LAST_TRIES_S
        with self._timer.during("checkpointing"):
            while state.step != self._saved_step:
                try:
                    self._checkpoints.save(state, self._domain, self._snapshot)
                except CheckpointError as error:
                    again = f"; trying for {LAST_TRIES_S:.0f} s: the run ends with it" if final else ""
                    self._warn(f"{error}{again}")
                    if not final:
                        return
                    self._pause(error, deadline)
                else:
                    self._saved_step = state.step
                    self._warn("")

    def finish(self, state: TrainerState, *, stopped: bool) -> None:
        """Say that the learner is done, wait for the server's stop, and log the evaluations that came meanwhile.

        Raises:
            AsyncRLError: the run ended with an error.
            DeadlineError: the server did not end the run in time.
        """
        self._timer.enter("idle")
        self._client.send("done", stopped=stopped)
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        stop: Header | None = None
        while stop is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(f"the server did not stop the run within {FINISH_TIMEOUT_S:.0f} s of the last step")
            heard = [header for header, _ in self._client.receive(left_s) if header["type"] == "stop"]
            stop = next((header for header in heard if "step" not in header), None)  # else it answered ``next``
        if stop["error"]:
            raise AsyncRLError(f"the run failed: {stop['reason']}")
        late = [e for e in RunFolder(self._out).evals if e["version"] > self._last_eval]
        if late:
            self._metrics.write(state.step, self.eval_metrics(late))

    def eval_metrics(self, evaluations: Iterable[Mapping[str, Any]]) -> Metrics:
        """Finished evaluations as metrics; each goes into one line only."""
        metrics: Metrics = {}
        for evaluation in evaluations:
            if evaluation["version"] == self._last_eval:  # a restarted server tells of the newest once more
                continue
            self._last_eval = max(self._last_eval, evaluation["version"])
            metrics |= {f"eval/{name}": value for name, value in evaluation["metrics"].items()}
            metrics["eval/version"] = float(evaluation["version"])
        return metrics

    def close(self) -> None:
        """Flush the metrics and unlink the weight segments."""
        self._metrics.close()
        self._publisher.close()
        if self._broadcaster is not None:
            self._broadcaster.close()

    def _warn(self, trouble: str) -> None:
        """Say what keeps a checkpoint from being written, once in our log, and to the server; empty: nothing more."""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble:
            print(f"async-rl: warning: {trouble}", file=sys.stderr, flush=True)
        self._client.send("trouble", reason=trouble)

    def _pause(self, error: CheckpointError, deadline: float) -> None:
        """Before the last checkpoint is tried again.

        Raises:
            CheckpointError: the time is up, or the run has ended meanwhile.
        """
        until = min(deadline, time.monotonic() + _TRY_AGAIN_S)
        why = f"for {LAST_TRIES_S:.0f} s" if until == deadline else ""
        while not why and (left_s := until - time.monotonic()) > 0:
            ends = [header for header, _ in self._client.receive(left_s) if header["type"] == "stop"]
            why = f"before the run ended ({ends[0]['reason']})" if ends else ""
        if why:
            newest = RunFolder(self._out).latest_checkpoint()
            there = f"the newest one is {newest}, from which --resume goes on" if newest else "there is no other one"
            raise CheckpointError(f"the run's last checkpoint could not be written {why}; {there} ({error})")

    def _snapshot(self, folder: Path) -> None:
        try:
            header, _ = self._client.request("snapshot", "snapshot", deadline_s=SNAPSHOT_TIMEOUT_S, path=str(folder))
        except DeadlineError as error:  # a disk that hangs; a server that is gone is said again at the next step
            raise CheckpointError(f"the server could not write its part of the checkpoint: {error}") from None
        if not header["ok"]:
            raise CheckpointError(f"the server could not write its part of the checkpoint: {header['detail']}")
