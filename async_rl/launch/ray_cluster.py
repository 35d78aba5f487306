"""The edge to Ray, and the only file that imports it: a placement group and a keeper for each life of a command.

    connect ─► RayCluster.begin(task, resources) ─► RayLife: group asked for ─► placed ─► keeper ─► ... ─► removed

Ray carries tasks and reports between its own processes; samples, weights and batches never go through it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch.places import Lost, Report, Task
from async_rl.launch.preflight import PORTS
from async_rl.launch.ray_keeper import Keeper
from async_rl.route import parted

CONNECT_S = 5.0
START_S = 90.0
"""A keeper has started its command within this time after its place was found: Ray starts a process for it first."""
CALL_S = 30.0
"""A keeper that runs answers within this time, or its node is lost."""
HEAD_S = 20.0
"""A head that cannot be reached for so long is gone; a minute after its end Ray ends whatever depended on it."""
_HEAD_PROBE_S = 1.0
_HEAD_EVERY_S = 1.0
_LOOK_S = 1.0
_NAMESPACE = "async_rl"
_HOW = "start one with ray start --head, and ray start --address=HEAD:6379 on each further node"


def connect(address: str) -> RayCluster:
    """Join a cluster that runs.

    Args:
        address: ``auto`` (the one of this host, or ``RAY_ADDRESS``) or ``HOST:PORT`` of its head.

    Raises:
        ConfigError: Ray is not installed, or the address is of the wrong form.
        AsyncRLError: there is no cluster, or it runs another version.
    """
    given = os.environ.get("RAY_ADDRESS") or "auto" if address == "auto" else address
    if given != "auto":
        _check_address(given)
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed here: pip install 'async-rl[ray]' on every node") from None
    try:
        ray.init(address=given, namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        where = "on this host (and RAY_ADDRESS names none)" if given == "auto" else f"at {given}"
        why = next(iter(str(error).splitlines()), repr(error))
        raise AsyncRLError(f"no Ray cluster {where} can be joined: {why}; {_HOW}") from None
    return RayCluster(ray.get_runtime_context().gcs_address)


def _check_address(address: str) -> None:
    match = re.fullmatch(r"([^:/]+|\[[^\]]+\]):(\d+)", address)
    if match is None or int(match[2]) not in PORTS:
        raise ConfigError(
            f"{address!r} is no address of a Ray cluster: write --address (or RAY_ADDRESS) as HOST:PORT of its head; a "
            "ray:// client cannot watch the buffer server, so run the command on a node of the cluster, or hand it to "
            "ray job submit"
        )
    if why := _unreachable(address, CONNECT_S):
        raise AsyncRLError(f"no Ray cluster at {address}: {why}; is its head running, and that port open?")


def _unreachable(address: str, timeout_s: float) -> str:
    """Why nothing listens there; empty if something does."""
    try:
        socket.create_connection(parted(address), timeout_s).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


class RayCluster:
    """A cluster that was joined; :meth:`close` leaves it, and nothing of ours stays there.

    Args:
        head: ``HOST:PORT`` of its head.
    """

    def __init__(self, head: str) -> None:
        self._head = head
        self._looked = time.monotonic()
        self._away_since: float | None = None

    def check(self) -> None:
        """Look now and then whether its head is there; with that gone Ray would say nothing, and end us in a minute.

        Raises:
            AsyncRLError: it has been away for :data:`HEAD_S`.
        """
        now = time.monotonic()
        if now - self._looked < _HEAD_EVERY_S:
            return
        self._looked = now
        why = _unreachable(self._head, _HEAD_PROBE_S)
        self._away_since = None if not why else self._away_since or now
        if self._away_since is not None and now - self._away_since > HEAD_S:
            raise AsyncRLError(
                f"the head of the Ray cluster at {self._head} is gone ({why}), and Ray ends what runs there; {_HOW}, "
                "and go on with --resume"
            )

    def has_head(self) -> bool:
        """Whether its head is there now; asked before each call that Ray would not return from without it."""
        return not _unreachable(self._head, _HEAD_PROBE_S)

    def begin(self, task: Task, resources: Mapping[str, float]) -> RayLife:
        """Ask for a place for a task; it starts there by itself.

        Args:
            task: what is run.
            resources: of its placement group's one bundle, by Ray's names (``CPU``, ``GPU``).
        """
        return RayLife(self, task, resources)

    def room(self) -> str:
        """What is free, in words."""
        import ray

        if not self.has_head():
            return f"its head at {self._head} cannot be reached"
        free, total = ray.available_resources(), ray.cluster_resources()
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        kinds = [f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {kind}" for kind in ("CPU", "GPU")]
        return f"{nodes} nodes have {' and '.join(kinds)} free"

    def close(self) -> None:
        """Leave; Ray removes what is left of us."""
        import ray

        ray.shutdown()


class RayLife:
    """One life of a command: :meth:`poll` moves it on, :meth:`remove` ends it and gives its place back."""

    def __init__(self, cluster: RayCluster, task: Task, resources: Mapping[str, float]) -> None:
        self._cluster, self._task, self._resources = cluster, task, dict(resources)
        self._group: Any = None
        self._keeper: Any = None
        self._answer: Any = None
        """The keeper's answer that is awaited."""
        self._asked_at = 0.0
        self._has_started = False
        self._away_since: float | None = None
        """Since when its node cannot be reached."""

    @property
    def is_placed(self) -> bool:
        """Whether it has found its place and runs there."""
        return self._has_started

    def poll(self) -> Report | None:
        """What has happened since the last call; never waits."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        try:
            if self._keeper is None:
                if self._cluster.has_head():
                    self._look_for_place()
                return None
            done, _ = ray.wait([self._answer], timeout=0)
            if not done:
                return self._hangs()
            answer: Report | None = ray.get(self._answer, timeout=CALL_S)
        except RayError as error:
            if isinstance(error, ActorUnavailableError) and self._may_come_back():
                self._look()
                return None
            return _lost(error)
        self._has_started, self._away_since = True, None
        self._look()
        return answer

    def stop(self) -> None:
        """Ask the command to end, as Ctrl-C would."""
        if self._keeper is not None:
            self._keeper.stop.remote()

    def remove(self) -> None:
        """End it by force, if it lives, and free its place."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._group is None or not self._cluster.has_head():
            return  # without a head Ray removes it by itself
        if self._keeper is not None:
            ray.kill(self._keeper)  # the kernel ends the command with it
        remove_placement_group(self._group)

    def _look(self) -> None:
        self._answer, self._asked_at = self._keeper.look.remote(_LOOK_S), time.monotonic()

    def _hangs(self) -> Lost | None:
        """A keeper that says nothing: its node stands still, or a file system on it."""
        limit_s = CALL_S + _LOOK_S if self._has_started else START_S
        if time.monotonic() - self._asked_at < limit_s:
            return None
        return Lost(told=f"its keeper has not answered for {limit_s:.0f} s: the node, or a file system there, hangs")

    def _may_come_back(self) -> bool:
        """Whether a keeper that cannot be reached is still waited for: a network may be gone for a moment."""
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        return self._has_started and now - self._away_since < CALL_S

    def _look_for_place(self) -> None:
        """Ask for one; once there is one, a keeper starts the command there."""
        import ray
        from ray.util.placement_group import placement_group, placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._group is None:
            self._group = placement_group([self._resources], strategy="STRICT_PACK", name=self._task.name)
        table = placement_group_table(self._group)
        if table.get("state") != "CREATED":
            return
        node = table["bundles_to_node_id"][0]
        hosts = [n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node and n["Alive"]]
        if not hosts:  # lost in this moment: Ray looks for another one
            return
        kind: Any = ray.remote(Keeper)
        self._keeper = kind.options(
            num_cpus=self._resources.get("CPU", 0.0),
            num_gpus=self._resources.get("GPU", 0.0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0),
        ).remote(self._task, str(hosts[0]))
        self._answer, self._asked_at = self._keeper.start.remote(), time.monotonic()


def _lost(error: Exception) -> Lost:
    """A keeper that is gone with its node or its worker; or that could not begin, for a reason of ours."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, AsyncRLError):
        return Lost(told=str(cause), hopeless=isinstance(cause, ConfigError))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    missing = [line for line in lines if line.startswith("ModuleNotFoundError")]
    if missing:
        return Lost(
            told=f"its node lacks our package ({missing[-1]}): install the same environment on every node",
            hopeless=True,
        )
    return Lost(told=f"its Ray worker or node is gone ({lines[0] if lines else type(error).__name__})")
