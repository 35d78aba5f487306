"""Whether ``torch.compile`` can work on this machine: its kernels are C++ (on a GPU Triton, started from C++)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from async_rl.errors import ConfigError


def find_compiler(env: Mapping[str, str] = os.environ) -> str:
    """Path of the C++ compiler that torch calls: ``$CXX``, else ``g++``.

    Raises:
        ConfigError: there is none.
    """
    name = env.get("CXX") or "g++"
    found = shutil.which(name, path=env.get("PATH"))
    if found is None:
        raise ConfigError(
            f"learner.compile = true: there is no C++ compiler {name!r} here; install one (apt install g++), name it "
            "in CXX, or set learner.compile = false"
        )
    return found
