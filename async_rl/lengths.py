"""How long responses are: the distributions that the mock engine draws from and that planning computes with.

    "constant" | "lognormal" | FILE ─► parse ─► Lengths ─► draw (a generator of each request's own), mean

A file tells recorded lengths: a JSON list, one number a line, one object a line with ``length`` or ``lengths``, or a
run folder, whose sampled texts are measured in characters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from async_rl.errors import ConfigError

Z99 = 2.3263478740408408
"""99 % of a standard normal lie below it: p99 / p50 of a log-normal is exp(Z99 σ)."""

LOGNORMAL_P99_OVER_P50 = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution over whole numbers of tokens between 1 and ``longest``.

    Raises:
        ValueError: a number is out of range, or ``recorded`` is empty where it is needed.
    """

    kind: Literal["constant", "lognormal", "recorded"]
    median: float = 1.0
    """Of ``constant`` (its one length) and ``lognormal``, before ``longest`` cuts."""
    p99_over_p50: float = LOGNORMAL_P99_OVER_P50
    """Of ``lognormal``, before ``longest`` cuts."""
    recorded: tuple[int, ...] = ()
    """Drawn from with replacement."""
    longest: int = 1 << 30
    """Longer ones are cut to it."""

    def __post_init__(self) -> None:
        if self.median < 1 or self.longest < 1 or self.p99_over_p50 < 1:
            raise ValueError(f"median, longest and p99_over_p50 must be 1 or more: {self}")
        if self.kind == "recorded" and (not self.recorded or min(self.recorded) < 1):
            raise ValueError("recorded lengths: at least one, each 1 or more")

    @classmethod
    def parse(
        cls, text: str, *, median: float, p99_over_p50: float = LOGNORMAL_P99_OVER_P50, longest: int = 1 << 30
    ) -> Lengths:
        """From a setting: ``constant``, ``lognormal``, or a file that :func:`read_lengths` reads.

        Raises:
            ConfigError: the file is not there, or holds no lengths.
        """
        if text == "constant":
            return cls(kind="constant", median=median, longest=longest)
        if text == "lognormal":
            return cls(kind="lognormal", median=median, p99_over_p50=p99_over_p50, longest=longest)
        return cls(kind="recorded", recorded=read_lengths(Path(text).expanduser()), longest=longest)

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm (``lognormal``): ln(p99 / p50) / Z99."""
        return math.log(self.p99_over_p50) / Z99

    def draw(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
        """int64 [n]: lengths, independent of each other."""
        if self.kind == "constant":
            lengths = np.full(n, self.median)
        elif self.kind == "lognormal":
            lengths = self.median * np.exp(self.sigma * rng.standard_normal(n))
        else:
            lengths = rng.choice(np.asarray(self.recorded, np.float64), n)
        return np.rint(lengths).clip(1, self.longest).astype(np.int64)

    def mean(self) -> float:
        """Expected length after the cut; rounding, which hardly moves it, is left out.

        Log-normal with median m, cut at c: E[min(X, c)] = m exp(σ²/2) Φ((ln(c/m) − σ²) / σ) + c Φ(−ln(c/m) / σ).
        """
        if self.kind == "recorded":
            return float(np.minimum(self.recorded, self.longest).mean())
        if self.kind == "constant" or self.sigma == 0:
            return float(min(round(self.median), self.longest))
        sigma, distance = self.sigma, math.log(self.longest / self.median)
        below = self.median * math.exp(sigma**2 / 2) * _normal_cdf((distance - sigma**2) / sigma)
        return below + self.longest * _normal_cdf(-distance / sigma)


def request_rng(seed: Iterable[int]) -> np.random.Generator:
    """The generator from which the lengths of a request are drawn first; the same seed gives the same lengths.

    Args:
        seed: of the request: (run seed, ordinal, draw).
    """
    return np.random.default_rng([s % 2**64 for s in seed])


def read_lengths(path: Path) -> tuple[int, ...]:
    """Recorded lengths of a file, or of a run folder.

    Raises:
        ConfigError: it is not there, or holds no lengths; says what is expected.
    """
    file = path / "samples.jsonl" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"lengths = {str(path)!r}: {error}; write constant, lognormal, a file of lengths or a run folder"
        ) from None
    try:
        found = [length for row in _rows(text) for length in _lengths_of(row)]
    except (ValueError, TypeError):
        found = []
    if not found or min(found) < 1:
        raise ConfigError(
            f"lengths = {str(path)!r}: expected a JSON list of numbers of 1 or more, one number a line, or one object "
            "a line with length, lengths or completions"
        )
    return tuple(round(length) for length in found)


def _rows(text: str) -> Iterable[Any]:
    """One document, or one a line."""
    try:
        whole = json.loads(text)
        return whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _lengths_of(row: Any) -> list[float]:
    if isinstance(row, dict) and "completions" in row:  # of samples.jsonl
        return [max(1.0, float(len(text))) for text in row["completions"]]
    if isinstance(row, dict):
        row = next((row[key] for key in ("lengths", "length") if key in row), [])
    values = row if isinstance(row, list) else [row]
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in values):
        raise ValueError
    return [float(v) for v in values]


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))
