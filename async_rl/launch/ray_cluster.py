"""The edge to Ray, and the only file that imports it: a placement group and a keeper for each life of a command.

    connect ─► RayCluster.begin(task, resources) ─► RayLife: group asked for ─► placed ─► keeper ─► ... ─► removed

Ray carries tasks and reports between its own processes; samples, weights and batches never go through it.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.launch.places import Lost, Report
from async_rl.launch.ray_keeper import Keeper, Task

CONNECT_S = 5.0
CALL_S = 30.0
"""A keeper answers within this time, or its node is lost."""
_LOOK_S = 1.0
_NAMESPACE = "async_rl"


def connect(address: str) -> RayCluster:
    """Join a cluster that runs.

    Args:
        address: ``auto`` (the one of this host, or ``RAY_ADDRESS``) or ``HOST:PORT`` of its head.

    Raises:
        ConfigError: Ray is not installed, or the address is of the wrong form.
        AsyncRLError: there is no cluster, or it runs another version.
    """
    if address != "auto":
        _check_address(address)
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed here: pip install 'async-rl[ray]' on every node") from None
    try:
        ray.init(address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        where = "on this host (and RAY_ADDRESS names none)" if address == "auto" else f"at {address}"
        raise AsyncRLError(
            f"no Ray cluster {where} can be joined: {str(error).splitlines()[0] if str(error) else error!r}; start one "
            "with ray start --head, and ray start --address=HEAD:6379 on each further node"
        ) from None
    return RayCluster()


def _check_address(address: str) -> None:
    match = re.fullmatch(r"([^:/]+|\[[^\]]+\]):(\d+)", address)
    if match is None:
        raise ConfigError(
            f"--address {address!r}: write it as HOST:PORT of the cluster's head (or auto); a ray:// client cannot "
            "watch the buffer server, so run the command on a node of the cluster, or hand it to ray job submit"
        )
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise AsyncRLError(f"no Ray cluster at {address}: {why}; is its head running, and that port open?") from None


class RayCluster:
    """A cluster that was joined; :meth:`close` leaves it, and nothing of ours stays there."""

    def begin(self, task: Task, resources: Mapping[str, float]) -> RayLife:
        """Ask for a place for a task; it starts there by itself.

        Args:
            task: what is run.
            resources: of its placement group's one bundle, by Ray's names (``CPU``, ``GPU``).
        """
        return RayLife(task, resources)

    def room(self) -> str:
        """What is free, in words."""
        import ray

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

    def __init__(self, task: Task, resources: Mapping[str, float]) -> None:
        from ray.util.placement_group import placement_group

        self._task, self._resources = task, dict(resources)
        self._group = placement_group([self._resources], strategy="STRICT_PACK", name=task.name)
        self._keeper: Any = None
        self._asked: Any = None
        """The keeper's answer that is awaited."""
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
                self._look_for_place()
                return None
            done, _ = ray.wait([self._asked], timeout=0)
            if not done:
                return None
            answer: Report | None = ray.get(self._asked, timeout=CALL_S)
        except RayError as error:
            if isinstance(error, ActorUnavailableError) and self._may_come_back():
                self._asked = self._keeper.look.remote(_LOOK_S)
                return None
            return _lost(error)
        self._has_started, self._away_since = True, None
        self._asked = self._keeper.look.remote(_LOOK_S)
        return answer

    def stop(self) -> None:
        """Ask the command to end, as Ctrl-C would."""
        if self._keeper is not None:
            self._keeper.stop.remote()

    def remove(self) -> None:
        """End it by force, if it lives, and free its place."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._keeper is not None:
            ray.kill(self._keeper)  # the kernel ends the command with it
        remove_placement_group(self._group)

    def _may_come_back(self) -> bool:
        """Whether a keeper that cannot be reached is still waited for: a network may be gone for a moment."""
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        return self._has_started and now - self._away_since < CALL_S

    def _look_for_place(self) -> None:
        """Once there is one, a keeper starts the command there."""
        import ray
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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
        self._asked = self._keeper.start.remote()


def _lost(error: Exception) -> Lost:
    """A keeper that is gone with its node or its worker; or that could not begin, for a reason of ours."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, AsyncRLError):
        return Lost(why=str(cause), hopeless=isinstance(cause, ConfigError))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Lost(why=f"its Ray worker or node is gone ({lines[0] if lines else type(error).__name__})", hopeless=False)
