"""Seeds that differ between processes, their lives and their environments, by construction.

(run seed, name of the process, salt of its life) ──process_seed──► 62 bits ──environment_seeds──► one each
"""

from __future__ import annotations

import hashlib

import numpy as np

_SMALL = 1 << 32
"""Seeds of environments are below it: what draws with numpy's ``RandomState`` takes no larger ones."""


def process_seed(seed: int, name: str, salt: int | str = 0) -> int:
    """Seed of one process: a hash of all three, so that no two processes of a run draw the same numbers.

    Args:
        seed: of the run.
        name: of the process, one of a kind in the run.
        salt: tells its lives apart, so that a restarted process does not repeat what it did.
    """
    digest = hashlib.sha256(repr((seed, name, str(salt))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def life_seed(seed: int, name: str, next_step: int, life: int) -> int:
    """Seed of one life of a process, so that neither a resumed run nor a restarted process repeats what it did.

    Args:
        seed: of the run.
        name: of the process.
        next_step: that the learner trained when this life began.
        life: processes that had the name before, since the server started: several may begin at one step.
    """
    return process_seed(seed, name, f"{next_step}+{life}" if life else next_step)


def environment_seeds(seed: int, num_envs: int) -> list[int]:
    """Seeds of the environments of one process, all different.

    They have 32 bits, so that two of ten thousand environments in *different* processes may begin alike once in a
    hundred runs; their actions are drawn from the processes' own seeds and part them at once.
    """
    wanted = np.random.SeedSequence(seed).generate_state(num_envs, np.uint32)
    if len(np.unique(wanted)) < num_envs:
        return [int(one) for one in np.random.default_rng(seed).choice(_SMALL, num_envs, replace=False)]
    return [int(one) for one in wanted]


def batch_seed(seed: int) -> int:
    """Seed of an object that makes many environments at once: 31 bits, which every generator takes."""
    return environment_seeds(seed, 1)[0] >> 1
