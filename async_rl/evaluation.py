"""Which versions are evaluated: the first of the run, every ``eval.every``-th, and the last."""

from async_rl.config import RunConfig


def is_evaluated(config: RunConfig, version: int, start_version: int) -> bool:
    """Whether held-out problems are answered with this version; decides the segment that holds it, too."""
    periodic = config.eval.every > 0 and version % config.eval.every == 0
    return version in (start_version, config.steps) or periodic
