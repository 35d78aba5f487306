"""A token domain around an updater, and the counters of a checkpoint, for tests."""

from __future__ import annotations

from typing import Any

from learner.checkpoint import TrainerState
from learner.mismatch import MismatchCheck
from learner.token_domain import TokenDomain
from learner.updater import Updater


class Tokenizer:
    """Stands for the real one: writes one file."""

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def domain_of(updater: Updater, tokenizer: Any = None) -> TokenDomain:
    """The domain that has this updater."""
    check = MismatchCheck(updater._config, updater.networks, updater._group.device, warns=False)
    return TokenDomain(updater._config, updater, tokenizer or Tokenizer(), check)


def counters(step: int, contract: str = "any", **numbers: float) -> TrainerState:
    """Of a run that stands at ``step``."""
    return TrainerState(
        step=step,
        trained=77.0,
        contract=contract,
        numbers={"lr": 1e-3, "kl_coef": 0.0, "skipped_in_row": 0.0, **numbers},
    )
