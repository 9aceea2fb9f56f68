"""States of every family of verifier: nested or flat, tied, latent attention, mixtures of experts, sinks."""

from __future__ import annotations

import mocks
import pytest
import torch
from eaglebook import hidden_states, verifier

IDS = [2, 4, 5]


@pytest.fixture(scope="module", params=list(mocks.FAMILIES))
def model(request, tmp_path_factory):
    folder = mocks.build(request.param, tmp_path_factory.mktemp("verifier"))
    return verifier.load_model(verifier.resolve(str(folder)), dtype="float32")


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, mocks.VOCAB, (n,), generator=generator).tolist() for n in (9, 70, 33)]


def test_the_slots_are_the_streams_they_are_named_after(model, sequences) -> None:
    (states,) = hidden_states.capture(model, [sequences[1]], IDS)
    with torch.inference_mode():
        out = model(torch.tensor([sequences[1]]), output_hidden_states=True)
        logits = model.lm_head(hidden_states.final_norm(model)(states[:, -1].float()))
    for slot, k in enumerate(IDS):
        torch.testing.assert_close(states[:, slot], out.hidden_states[k][0].bfloat16(), rtol=0.02, atol=0.02)
    agree = (logits.argmax(-1) == out.logits[0].argmax(-1)).float().mean()
    assert agree > 0.9, "norm and head on the last slot"
    assert hidden_states.convention(IDS, hidden_states.identify(model, states, sequences[1])) == "input"


def test_a_conversation_alone_and_in_a_batch(model, sequences) -> None:
    together = hidden_states.capture(model, sequences, IDS)
    for sequence, states in zip(sequences, together, strict=True):
        (alone,) = hidden_states.capture(model, [sequence], IDS)
        assert ((alone.float() - states.float()).norm() / alone.float().norm()).item() < 0.01
