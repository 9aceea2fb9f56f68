"""Shared fixtures: a tiny verifier made on the spot, and an outputs folder that no test shares with a user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from eaglebook import paths

# These read a finished run: ``EAGLEBOOK_DEMO=smoke pytest tests/demo``. Without one there is nothing to collect.
collect_ignore = [] if os.environ.get("EAGLEBOOK_DEMO") else ["demo"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty outputs folder; materialised verifiers are still found where setup put them."""
    monkeypatch.setenv("EAGLEBOOK_MODELS", str(paths.models()))
    monkeypatch.setenv("EAGLEBOOK_OUTPUTS", str(tmp_path / "outputs"))
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs"


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 8-layer Llama with a word-level tokenizer and a chat template, in bf16."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-verifier")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=300,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2.0)  # so that before and after the norm differ in direction too
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, 300)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder
