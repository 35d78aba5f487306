"""One rank that trains a language model, started by torchrun.

torchrun --nproc-per-node N -m learner.main CONFIG.toml --out DIR --connect tcp://HOST:PORT

What a rank does from its start to its end is in :mod:`learner.rank`.
"""

from __future__ import annotations

from async_rl.config import load_config
from async_rl.process import leave, run_guarded
from learner.rank import main
from learner.token_domain import build

if __name__ == "__main__":
    run_guarded(lambda: main(load_config, build))
    leave()
