"""A draft beside a verifier of each family in vLLM's real engine: it changes no word, or is refused as foretold."""

from __future__ import annotations

import json
from pathlib import Path

import mocks
import pytest
import torch
from eaglebook.checkpoint import verifier_config
from eaglebook.draft_size import BF16, Geometry
from eaglebook.engine import trial
from safetensors.torch import save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
IDS, DRAFT_VOCAB = [2, 4, 5], 256


def random_draft(verifier: Path, folder: Path) -> Path:
    """A flat draft of random weights: two heads of 128 over a hidden size of 128."""
    facts = verifier_config.read(verifier)
    size = Geometry.of(facts, DRAFT_VOCAB, len(IDS), heads=2, kv_heads=2, head_dim=128, intermediate_size=256)
    folder.mkdir()
    torch.manual_seed(1)
    tensors = {
        t.name: torch.ones(t.shape) if len(t.shape) == 1 else torch.randn(t.shape) * 0.05
        for t in size.tensors()
        if t.bytes_per_element == BF16
    }
    keep = torch.arange(DRAFT_VOCAB) * 3
    tensors["d2t"] = keep - torch.arange(DRAFT_VOCAB)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": facts.hidden_size,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 256,
        "vocab_size": facts.vocab_size, "draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "torch_dtype": "float32",
        "tie_word_embeddings": False, "eagle_aux_hidden_state_layer_ids": IDS, "num_aux_hidden_states": 3,
        "norm_before_residual": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS, "use_aux_hidden_state": True},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", list(mocks.FAMILIES))
def test_a_draft_is_served_beside_every_family(family: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # see tests/chain/test_kimi_mock.py
    verifier = mocks.build(family, tmp_path / "verifier")
    draft = random_draft(verifier, tmp_path / "draft")
    prompts = [[5, 9, 13, 17, 400, 401], [700, 8, 30]]
    alone, beside = trial.run(verifier, [None, draft], prompts, max_tokens=24, timeout_s=120)
    assert (alone.stage, alone.error) == ("", "")
    if not verifier_config.read(verifier).supports_eagle3:  # as its config alone had told
        assert beside.stage == "load"
        assert "EAGLE3 interface" in beside.error or "does not support" in beside.error, beside.error
        return
    assert (beside.stage, beside.error) == ("", "")
    assert all(len(answer) == 24 for answer in alone.tokens)
    assert beside.tokens == alone.tokens
    assert beside.acceptance is not None
    assert beside.acceptance.drafts > 5
