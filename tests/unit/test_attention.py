"""Attention by blocks is attention, and what it does not know it leaves to torch."""

from __future__ import annotations

import pytest
import torch
from eaglebook import attention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 150), st.sampled_from([(4, 4), (6, 2), (4, 1)]), st.sampled_from([8, 24]))
def test_blocks_give_what_torch_gives(batch, tokens, heads, width) -> None:
    generator = torch.Generator().manual_seed(tokens)
    many, few = heads
    query = torch.randn(batch, many, tokens, 16, generator=generator)
    key = torch.randn(batch, few, tokens, 16, generator=generator)
    value = torch.randn(batch, few, tokens, width, generator=generator)
    expected = functional.scaled_dot_product_attention(
        query, key.repeat_interleave(many // few, 1), value.repeat_interleave(many // few, 1), is_causal=True, scale=0.3
    )
    torch.testing.assert_close(attention.causal(query, key, value, 0.3), expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [10, 200])
@pytest.mark.parametrize("kind", ["llama", "sliding window", "sinks"])
def test_a_model_says_the_same_and_is_left_as_it_was(kind, tokens) -> None:
    from transformers import (
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    small = dict(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=100,
    )  # fmt: skip
    torch.manual_seed(0)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**small)),
        "sliding window": lambda: MistralForCausalLM(MistralConfig(**small, sliding_window=32)),
        "sinks": lambda: GptOssForCausalLM(GptOssConfig(**small, num_local_experts=2, num_experts_per_tok=2)),
    }[kind]().eval()
    before = model.config._attn_implementation
    ids = torch.randint(0, 100, (2, tokens))
    with torch.inference_mode():
        expected = model(ids).logits
        with attention.by_blocks(model):
            found = model(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == before
