"""Answers that go round in circles. They flatter acceptance: a draft guesses a loop easily, and no reader wants one."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD, REPEATS, SHARE = 32, 4, 0.5


def period(token_ids: Sequence[int]) -> int:
    """Length of the loop an answer ends in, 0 when it ends in none.

    A loop of at most ``LONGEST_PERIOD`` tokens, said at least ``REPEATS`` times, over at least half of the answer.
    """
    for length in range(1, min(LONGEST_PERIOD, len(token_ids) // REPEATS) + 1):
        same = 0
        while same + length < len(token_ids) and token_ids[-1 - same] == token_ids[-1 - same - length]:
            same += 1
        if same + length >= max(REPEATS * length, SHARE * len(token_ids)):
            return length
    return 0


def share(answers: Sequence[Sequence[int]]) -> float:
    """Share of answers that end in a loop; 0 for none at all."""
    return sum(period(ids) > 0 for ids in answers) / len(answers) if answers else 0.0
