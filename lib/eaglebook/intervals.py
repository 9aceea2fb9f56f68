"""How far a measured ratio could be from the truth: the bootstrap over prompts.

Prompts are what was drawn, and tokens of one prompt are alike; so whole prompts are drawn again, with replacement, and the
ratio is taken of each draw's sums. The interval holds what lies between the outer percentiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SHARE, DRAWS = 0.95, 4000


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        ends = f"\N{NO-BREAK SPACE}({self.low:.2f}–{self.high:.2f})" if self.low == self.low else ""
        return f"{self.value:.2f}{ends}"


def of_sums(rows: object, statistic: Callable[..., np.ndarray], *, seed: int = 0) -> Estimate:
    """``statistic`` of the column sums of ``rows [prompts, columns]``, which gets one argument a column and must broadcast.

    One prompt tells nothing about others: the ends are then not numbers.
    """
    table = np.asarray(rows, dtype=float)
    count = len(table)
    again = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    with np.errstate(divide="ignore", invalid="ignore"):
        draws, value = statistic(*(again @ table).T), statistic(*table.sum(axis=0))
    sound = draws[np.isfinite(draws)]
    low, high = np.quantile(sound, [(1 - SHARE) / 2, (1 + SHARE) / 2]) if len(sound) and count > 1 else (np.nan, np.nan)
    return Estimate(float(value), float(low), float(high))
