"""The faster CPU path computes what speculators computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eaglebook import cpu_training
from hypothesis import given, settings
from hypothesis import strategies as st
from speculators.losses import eager
from speculators.models.eagle3.attention import create_combined_mask_mod, extend_dense_mask_for_draft_tokens
from torch.nn import functional
from torch.nn.attention.flex_attention import create_mask


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([(4, 4), (6, 2)]))
def test_attention_over_unrolled_steps_is_attention_on_the_dense_mask(steps, documents, heads) -> None:
    torch.manual_seed(sum(documents))
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    ids = torch.cat([ids, torch.tensor([-1, -1])])  # and padding
    tokens, (many, few) = len(ids), heads
    mask = create_mask(create_combined_mask_mod(ids, tokens), None, None, tokens, tokens, device="cpu")
    for _ in range(steps - 1):
        mask = extend_dense_mask_for_draft_tokens(mask, tokens)
    inputs = [torch.randn(1, n, length, 8, requires_grad=True) for n, length in
              ((many, tokens), (few, steps * tokens), (few, steps * tokens))]  # fmt: skip
    query, key, value = inputs
    wide = [x.repeat_interleave(many // few, 1) for x in (key, value)]
    expected = functional.scaled_dot_product_attention(query, *wide, attn_mask=mask).transpose(1, 2)
    found, _ = cpu_training.attend(None, query, key, value, mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(expected)
    slopes = [torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True) for out in (found, expected)]
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_the_divergence_and_its_gradient_are_the_librarys() -> None:
    torch.manual_seed(0)
    logits, targets, weights = torch.randn(1, 30, 50) * 3, torch.randn(1, 30, 50) * 3, torch.rand(1, 30)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = cpu_training._KLDivergence.apply(ours, targets)
    expected = eager.kl_div_loss(theirs, targets)
    torch.testing.assert_close(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_the_loss_against_numpy() -> None:
    generator = np.random.default_rng(0)
    logits, targets = (generator.normal(size=(1, 7, 11)) for _ in range(2))

    def log_softmax(x):
        return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)

    p, q = log_softmax(targets), log_softmax(logits)
    expected = (np.exp(p) * (p - q)).sum(-1)
    found = cpu_training._KLDivergence.apply(torch.tensor(logits), torch.tensor(targets))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


def test_argmax_is_argmax() -> None:
    x = torch.randn(3, 40, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert (x.gather(-1, cpu_training._argmax(x, -1)[..., None])[..., 0] == x.amax(-1)).all()
    assert torch.equal(cpu_training._argmax(x.float(), -1), x.float().argmax(-1))
    assert cpu_training._argmax(x) == x.argmax()
    assert cpu_training._argmax(x, 1, keepdim=True).shape == (3, 1, 300)


@pytest.mark.parametrize(("used", "left"), [(1, 32), (32, 32), (33, 64), (200, 200)])
def test_padding_is_cut_and_nothing_else(used, left) -> None:
    ids = torch.full((1, 200), -1)
    ids[0, :used] = 0
    batch = {"document_ids": ids, "hidden_states": torch.ones(1, 200, 6), "error_records": 0}
    cut = cpu_training.trim(batch)
    assert cut["document_ids"].shape == (1, left)
    assert cut["hidden_states"].shape == (1, left, 6)
    assert (cut["document_ids"] != -1).sum() == used
    assert cut["error_records"] == 0
