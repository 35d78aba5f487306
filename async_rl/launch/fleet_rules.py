"""What is asked of a Ray cluster: how many actors, and what each place must have. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_rl.errors import ConfigError
from async_rl.launch.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRules:
    """What is wanted. Resources go by Ray's names (``CPU``, ``GPU``)."""

    least: int
    """Actors at any time."""
    most: int
    """Actors at the busiest time."""
    learners: int = 1
    """Learner hosts."""
    scorers: tuple[str, ...] = ()
    """Role of each scorer."""
    learner: Mapping[str, float]
    """Of a learner host."""
    worker: Mapping[str, float]
    """Of an actor or a scorer."""
    place_s: float = 120.0
    """The cluster finds a place within this time, or has none."""

    @classmethod
    def of(
        cls,
        job: Job,
        *,
        least: int,
        most: int,
        learners: int,
        learner: Mapping[str, float],
        worker: Mapping[str, float],
        place_s: float,
    ) -> FleetRules:
        """The same, checked.

        Raises:
            ConfigError: the wishes contradict each other or the configuration.
        """
        if most < least:
            raise ConfigError(f"--max-actors {most} is below --min-actors {least}")
        job.check_learner_gpus(learners, int(learner["GPU"]))
        if worker["GPU"] > 1:
            raise ConfigError(
                f"--actor-gpus {worker['GPU']:g}: on Ray each actor has a place of its own, and one device; ask for "
                "more actors (--min-actors, --max-actors) instead"
            )
        if job.config.device == "cuda" and not (learner["GPU"] and worker["GPU"]):
            raise ConfigError("device = 'cuda': ask for GPUs with --learner-gpus and --actor-gpus")
        return cls(
            least=least,
            most=most,
            learners=learners,
            scorers=tuple(job.scorers),
            learner=_wanted(learner),
            worker=_wanted(worker),
            place_s=place_s,
        )


def _wanted(resources: Mapping[str, float]) -> dict[str, float]:
    """Without what is not asked for, which Ray would refuse in a bundle."""
    return {kind: amount for kind, amount in resources.items() if amount}
