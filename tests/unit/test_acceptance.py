"""Acceptance: the definitions, and the offline evaluation against a draft whose guesses are known."""

from __future__ import annotations

import itertools

import pytest
import torch
from eaglebook.acceptance import Acceptance, as_served, correct_tokens, every_position, none
from hypothesis import given
from hypothesis import strategies as st

rows = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=40)


def test_the_definitions_on_a_hand_count() -> None:
    a = Acceptance(10, (6, 3, 1))
    assert a.mean_acceptance_length == 2.0
    assert a.position_rates == [0.6, 0.3, 0.1]
    assert (a + a) == Acceptance(20, (12, 6, 2))
    assert none(3).mean_acceptance_length == 1.0


def test_serving_jumps_over_what_was_accepted() -> None:
    right, wrong = [True, True, False], [False, True, True]
    assert as_served([right, wrong, wrong, wrong]) == Acceptance(2, (1, 1, 0))
    assert every_position([right, wrong]) == Acceptance(2, (1, 1, 0))


@given(rows)
def test_rates_never_rise_with_the_position(correct) -> None:
    for result in (every_position(correct), as_served(correct)):
        assert all(a >= b for a, b in itertools.pairwise(result.accepted))
        assert 1 <= result.mean_acceptance_length <= 4


@given(rows)
def test_all_right_gives_k_plus_one_and_all_wrong_gives_one(correct) -> None:
    if correct:
        assert as_served([[True] * 3] * len(correct)).mean_acceptance_length == 4
        assert as_served([[False] * 3] * len(correct)).mean_acceptance_length == 1


class Echo:
    """A draft that knows the sequence: step k at row t guesses token t + 2 + k, except where told to be wrong."""

    fc = torch.nn.Linear(1, 1)  # says where a draft computes

    def __init__(self, ids: list[int], d2t: torch.Tensor | None, wrong: set[tuple[int, int]] = frozenset()) -> None:
        self.ids, self.d2t, self.wrong = ids, d2t, wrong

    def __call__(self, features, input_ids, document_ids, position_ids, ttt_steps):
        assert input_ids[0].tolist() == self.ids[1:]
        assert features.shape == (1, len(self.ids) - 1, 6)
        guesses = []
        for k in range(ttt_steps):
            row = [self.ids[t + 2 + k] if t + 2 + k < len(self.ids) else 0 for t in range(len(self.ids) - 1)]
            row = [token + 1 if (k, t) in self.wrong else token for t, token in enumerate(row)]
            if self.d2t is not None:
                table = {int(i + o): i for i, o in enumerate(self.d2t)}
                row = [table.get(token, 0) for token in row]
            guesses.append(torch.tensor([row]))
        return guesses


IDS = [7, 8, 20, 21, 22, 23, 24]  # two prompt tokens, five generated
MASK = [0, 0, 1, 1, 1, 1, 1]
STATES = torch.zeros(7, 4, 2)


@pytest.mark.parametrize("d2t", [None, torch.tensor([20] * 8)])
def test_a_draft_that_knows_all_is_right_until_the_end(d2t) -> None:
    correct = correct_tokens(Echo(IDS, d2t), STATES, IDS, MASK, 3)
    # a draft is started after each generated token but the last; what lies past the end is a miss
    assert correct == [[True, True, True], [True, True, True], [True, True, False], [True, False, False]]


def test_a_wrong_guess_is_seen_where_it_was_made() -> None:
    correct = correct_tokens(Echo(IDS, None, wrong={(1, 1)}), STATES, IDS, MASK, 3)
    assert correct[0] == [True, False, True]


def test_a_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    d2t = torch.tensor([20, 20, 21, 21])  # 20, 21, 23, 24: the draft cannot say 22
    correct = correct_tokens(Echo(IDS, d2t), STATES, IDS, MASK, 1)
    assert correct == [[True], [False], [True], [True]]


def test_when_sampling_the_overlap_of_both_decides() -> None:
    """Three tokens by hand: the verifier says p, the draft knows two of them and says q; the chance is sum(min(p, q))."""
    from eaglebook.acceptance import expected_when_sampling

    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.9, 0.1])

    class Draft(Echo):
        lm_head = torch.nn.Identity()

        @staticmethod
        def verifier_norm(states):
            return states

        def __call__(self, features, input_ids, document_ids, position_ids, ttt_steps):
            for _ in range(ttt_steps):
                self.lm_head(q.log().expand(1, input_ids.shape[1], 2))
            return super().__call__(features, input_ids, document_ids, position_ids, ttt_steps)

    ids, mask = [0, 0, 2, 0, 2, 0], [0, 0, 1, 1, 1, 1]
    states = torch.zeros(6, 4, 2)
    states[:, -1] = torch.tensor([1.0, 0.0])  # the head's first column is all that counts
    head = torch.stack([p.log(), torch.zeros(3)], dim=1)
    rates = expected_when_sampling(Draft(ids, torch.tensor([0, 1])), head, [(states, ids, mask)], 2)
    # its two tokens are 0 and 2 of the verifier's, 0.3 of which lie on a token the draft cannot say
    overlap = min(0.5, 0.9) + min(0.2, 0.1)
    # three starts; the last has no second token left
    assert rates == pytest.approx([overlap, overlap**2 * 2 / 3], abs=1e-5)
