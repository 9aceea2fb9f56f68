"""States of every family of verifier: nested or flat, tied, latent attention, mixtures of experts, sinks."""

from __future__ import annotations

import json
import shutil

import mocks
import pytest
import torch
from eaglebook import hidden_states, transformers_folder, verifier
from eaglebook.errors import UserError
from safetensors.torch import load_file, save_file

IDS = [2, 4, 5]


@pytest.fixture(scope="module", params=list(mocks.FAMILIES))
def model(request, tmp_path_factory):
    folder = mocks.build(request.param, tmp_path_factory.mktemp("verifier"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLEBOOK_MODELS", str(tmp_path_factory.mktemp("models")))
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


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Kimi-K2.5 with INT4 experts, beside the same model with their rounded values."""
    folder = tmp_path_factory.mktemp("packed")
    mocks.build("kimi_k25", folder / "rounded")
    mocks.pack_experts(folder / "rounded", folder / "packed")
    return folder


def test_packed_experts_are_unpacked(packed, sequences) -> None:
    ours, theirs = (
        hidden_states.capture(
            verifier.load_model(verifier.resolve(str(packed / name)), dtype="float32"), sequences[1:2], IDS
        )[0].float()
        for name in ("packed", "rounded")
    )
    assert ((ours - theirs).norm() / theirs.norm()).item() < 0.005


@pytest.mark.parametrize("part", ["mlp.experts.3.up_proj.weight_packed", "mlp.shared_experts.up_proj.weight"])
def test_a_weight_that_is_not_there_is_refused(packed, tmp_path, part: str) -> None:
    folder = shutil.copytree(packed / "packed", tmp_path / "torn")
    for file in folder.glob("*.safetensors"):
        save_file({name: t for name, t in load_file(file).items() if not name.endswith(f"2.{part}")}, file)
    with pytest.raises(UserError, match="weights are missing"):
        verifier.load_model(verifier.resolve(str(folder)), dtype="float32")


def test_a_type_that_transformers_has_no_class_for_is_read_as_the_one_that_is_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EAGLEBOOK_MODELS", str(tmp_path / "models"))
    (tmp_path / "k2").mkdir()
    config = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "code.Config"}, "hidden_size": 8}
    (tmp_path / "k2" / "config.json").write_text(json.dumps(config))
    (tmp_path / "k2" / "model.safetensors").write_bytes(b"weights")
    seen = transformers_folder.of(tmp_path / "k2")
    assert json.loads((seen / "config.json").read_text()) == {"model_type": "deepseek_v3", "hidden_size": 8}
    assert (seen / "model.safetensors").read_bytes() == b"weights"
    (tmp_path / "k2" / "model.safetensors").rename(tmp_path / "k2" / "model-1.safetensors")
    assert transformers_folder.of(tmp_path / "k2") == seen
    assert {file.name for file in seen.iterdir()} == {"config.json", "model-1.safetensors"}
    assert json.loads((tmp_path / "k2" / "config.json").read_text()) == config, "the verifier's own is as it was"
    (tmp_path / "k2" / "config.json").write_text('{"model_type": "llama"}')
    assert transformers_folder.of(tmp_path / "k2") == tmp_path / "k2"
