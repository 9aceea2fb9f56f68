"""The faster CPU path computes what speculators computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eaglebook import cpu_sums, cpu_training
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
    found, _ = cpu_sums.attend(None, query, key, value, mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(expected)
    slopes = [torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True) for out in (found, expected)]
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_the_divergence_and_its_gradient_are_the_librarys() -> None:
    torch.manual_seed(0)
    logits, targets, weights = torch.randn(1, 30, 50) * 3, torch.randn(1, 30, 50) * 3, torch.rand(1, 30)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = cpu_sums.KLDivergence.apply(ours, targets)
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
    found = cpu_sums.KLDivergence.apply(torch.tensor(logits), torch.tensor(targets))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)


def test_argmax_is_argmax() -> None:
    x = torch.randn(3, 40, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert (x.gather(-1, cpu_sums.argmax(x, -1)[..., None])[..., 0] == x.amax(-1)).all()
    assert torch.equal(cpu_sums.argmax(x.float(), -1), x.float().argmax(-1))
    assert cpu_sums.argmax(x) == x.argmax()
    assert cpu_sums.argmax(x, 1, keepdim=True).shape == (3, 1, 300)


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


@pytest.mark.parametrize("loss", ["kl_div", '{"ce": 0.3, "tv": 0.7}'])
def test_only_what_is_taught_is_computed_and_the_loss_is_the_librarys(tiny_verifier, monkeypatch, loss) -> None:
    """Two conversations and padding in a pack: loss, gradients and what was right at each step, with and without the rest."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, core
    from speculators.train.cli import create_transformer_layer_config

    torch.manual_seed(0)
    layer = create_transformer_layer_config(str(tiny_verifier), 1, "llama", "silu", 2048, [0])
    layer._attn_implementation = "sdpa"
    t2d = torch.zeros(layer.vocab_size, dtype=torch.bool)
    t2d[10:110] = True
    draft = Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=torch.full((100,), 10), draft_vocab_size=100, verifier_name_or_path=str(tiny_verifier), ttt_steps=3,
        norm_before_residual=False, norm_output=False, draft_attn_impl="sdpa",
    ).float()  # fmt: skip
    hidden, tokens = layer.hidden_size, 48
    pack = {
        "hidden_states": torch.randn(1, tokens, 3 * hidden), "input_ids": torch.randint(10, 110, (1, tokens)),
        "verifier_last_hidden_states": torch.randn(1, tokens, hidden),
        "document_ids": torch.tensor([[0] * 20 + [1] * 23 + [-1] * 5]),
        "loss_mask": torch.tensor([[0] * 7 + [1] * 13 + [0] * 11 + [1] * 12 + [0] * 5]).bool(),
    }  # fmt: skip
    told = {"ttt_steps": 3, "ttt_step_loss_decay": 0.8, "loss_config": resolve_loss_config(loss, "eager")}
    weights = [p for p in draft.parameters() if p.requires_grad]

    def trained() -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
        _, found, metrics = draft(**pack, **told)
        return found.detach(), list(torch.autograd.grad(found, weights)), metrics

    monkeypatch.setattr(core, "compute_metrics", core.compute_metrics)  # so that it is put back
    loss_before, slopes_before, metrics_before = trained()
    asked = {name: pack[name] for name in ("hidden_states", "input_ids", "document_ids")}  # no loss wanted
    guesses_before = draft(**asked, ttt_steps=3)
    cpu_training._teach_only_what_is_taught(draft)
    loss_after, slopes_after, metrics_after = trained()
    guesses_after = draft(**asked, ttt_steps=3)
    torch.testing.assert_close(loss_after, loss_before)
    for ours, theirs in zip(slopes_after, slopes_before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert metrics_after.keys() == metrics_before.keys()
    kept = [f"{what}_{step}_{part}" for what in ("loss", "full_acc") for step in range(3) for part in ("sum", "total")]
    for name in ("loss_sum", *kept):
        torch.testing.assert_close(metrics_after[name], metrics_before[name], msg=name)
    assert all(torch.equal(a, b) for a, b in zip(guesses_after, guesses_before, strict=True))
