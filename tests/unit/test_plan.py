"""The planner: sizes against files and the library's own class, the published Kimi figures, and what does not fit."""

from __future__ import annotations

import json

import pytest
import torch
from eaglebook import plan, verifier, verifier_size
from eaglebook.checkpoint import verifier_config
from eaglebook.draft_size import BF16, Geometry
from eaglebook.presets import load

KIMI_HEAD = Geometry(7168, 163840, 32000, 3, 64, 64, 128, 18432, aux_norms=True)
# The relevant keys of the published config: what the bytes hang on.
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840, "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        },
    },
    "vision_config": {"model_type": "kimi_k25_vision"},
}  # fmt: skip
ROOM = plan.Machine(gpus=8, memory_bytes=141e9, free_disk_bytes=3e12)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    file = tmp_path_factory.mktemp("kimi") / "config.json"
    file.write_text(json.dumps(KIMI))
    return file


def made(p, facts, *, prompts=1000, prompt_tokens=1000, has=ROOM, weight_bytes=595_000_000_000, speed=None):
    draft = plan.geometry(p, facts)
    speed = speed or plan.rates(p, 10**12, draft, 1.0)
    return plan.estimate(
        p, draft, weight_bytes, speed, has, prompts=prompts, prompt_tokens=prompt_tokens, benchmark_prompts=0
    )


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "stored"),
    [(112, 64, 4_628_410_368), (128, 64, 4_731_170_816), (128, 8, 4_320_129_024)],
    ids=["implicit, the first run's", "the published head's", "fewer key-value heads"],
)
def test_a_kimi_head_weighs_what_its_geometry_says(head_dim: int, kv_heads: int, stored: int) -> None:
    """4.628 GB was seen on a disk: the file's size already points at the wrong head_dim."""
    assert Geometry(7168, 163840, 32000, 3, 64, kv_heads, head_dim, 18432, aux_norms=True).checkpoint_bytes == stored


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("size", [100, 256])
def test_the_tensors_are_those_of_the_librarys_class(tiny_verifier, size: int, norms: bool) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    facts = verifier_config.read(tiny_verifier)
    layer = create_transformer_layer_config(str(tiny_verifier), 1, "llama", "silu", 2048, [0])
    layer.head_dim = 48  # not hidden size over heads
    partly = size < facts.vocab_size
    maps = {}
    if partly:
        maps = {"t2d": torch.arange(facts.vocab_size) < size, "d2t": torch.zeros(size, dtype=torch.long)}
    model = Eagle3DraftModel.from_training_args(
        layer, draft_vocab_size=size if partly else facts.vocab_size, verifier_name_or_path=str(tiny_verifier),
        ttt_steps=3, norm_before_fc=norms, norm_before_residual=False, fc_norm=False, norm_output=False,
        **({"t2d": None, "d2t": None} | maps),
    )  # fmt: skip
    planned = Geometry.of(facts, size if partly else facts.vocab_size, 3, head_dim=48, aux_norms=norms)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert planned.trained == trained
    saved = {k: v for k, v in model.state_dict().items() if not k.startswith("verifier_")}
    weights = {
        t.name: t.shape for t in planned.tensors() if t.bytes_per_element == BF16 and not t.name.startswith("norms")
    }
    assert weights.items() <= {k: tuple(v.shape) for k, v in saved.items()}.items()


def test_a_verifier_is_weighed_by_its_files_its_index_or_its_config(kimi, tmp_path) -> None:
    folder = verifier.resolve(verifier.EMBEDDED).path
    parameters, size, source = verifier_size.parameters_and_bytes(folder)
    assert (size, source) == (sum(f.stat().st_size for f in folder.glob("*.safetensors")), "its files")
    alone, counted, source = verifier_size.parameters_and_bytes(folder / "config.json")
    assert (alone, source) == (parameters, "its config")
    assert counted == pytest.approx(size, rel=0.001)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    index = {"metadata": {"total_size": 123_456_789}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert verifier_size.parameters_and_bytes(tmp_path)[1:] == (123_456_789, "model.safetensors.index.json")
    parameters, size, _ = verifier_size.parameters_and_bytes(kimi)
    assert parameters == pytest.approx(1027e9, rel=0.001)
    assert size == pytest.approx(595.1e9, rel=0.001)  # 570.8 GB of 4-bit experts with their scales, 24.4 GB of the rest


def test_the_lived_rates_give_the_lived_times(kimi) -> None:
    """1,000 conversations of 2,000 tokens: 11.4 minutes of extraction at 2,912 tokens/s, ten epochs in 27.7 minutes."""
    settings = load("kimi-k2.5", ["common.max_new_tokens=1000", "00.benchmarks=[]"])["00_preflight"]
    found = made(settings, verifier_config.read(kimi))
    loading = 595e9 / 414e6
    assert found.tokens == 2_000_000
    assert (found.seconds["02_hidden_states"] - loading) / 60 == pytest.approx(2e6 / 2912 / 60, abs=1.2)
    assert found.seconds["04_train"] / 60 == pytest.approx(27.7, abs=0.5)
    assert found.bytes_per_token == 57_352
    assert found.draft == Geometry(7168, 163840, 32000, 3, 64, 64, 128, 18432)


def test_training_memory_of_the_published_head() -> None:
    """Counted on the library's forward: 54 GB at packs of 8,192, 106 with the full vocabulary, before the allowance."""
    ask = dict(optimizer="adamw", ttt_steps=3, processes=8, sharded=False)
    full = Geometry(7168, 163840, 163840, 3, 64, 64, 128, 18432, aux_norms=True)
    assert KIMI_HEAD.training_bytes(pack_tokens=8192, **ask) / 1.15e9 == pytest.approx(54, rel=0.03)
    assert KIMI_HEAD.training_bytes(pack_tokens=2048, **ask) / 1.15e9 == pytest.approx(35, rel=0.05)
    assert full.training_bytes(pack_tokens=8192, **ask) / 1.15e9 == pytest.approx(106, rel=0.05)
    muon = KIMI_HEAD.training_bytes(pack_tokens=8192, **ask | {"optimizer": "muon"})
    assert KIMI_HEAD.training_bytes(pack_tokens=8192, **ask) - muon == pytest.approx(
        1.15 * 4 * KIMI_HEAD.trained, rel=0.01
    )
    assert KIMI_HEAD.training_bytes(pack_tokens=8192, **ask | {"sharded": True}) < muon


def test_states_deleted_after_training_are_gone_from_the_peak_of_what_follows(kimi) -> None:
    facts = verifier_config.read(kimi)
    kept = made(load("kimi-k2.5")["00_preflight"], facts)
    deleted = made(load("kimi-k2.5", ["common.delete_hidden_states=true"])["00_preflight"], facts)
    assert kept.disk_after["05_checkpoint"] - deleted.disk_after["05_checkpoint"] == kept.disk_bytes["02_hidden_states"]
    assert deleted.peak_disk_bytes == deleted.disk_after["04_train"]
    half = made(load("kimi-k2.5", ["common.storage=float8"])["00_preflight"], facts)
    assert half.disk_bytes["02_hidden_states"] == pytest.approx(0.5 * kept.disk_bytes["02_hidden_states"], rel=0.001)


@pytest.mark.parametrize(
    ("change", "has", "what", "fix"),
    [
        ("common.draft_head_dim=0", {}, "the draft's head_dim", "draft_head_dim"),
        ("common.draft_vocab_size=200000", {}, "the draft vocabulary", "draft_vocab_size"),
        ("common.aux_hidden_state_layer_ids=[2, 30, 61]", {}, "the aux hidden state layer ids", "aux_hidden_state_layer_ids"),
        ("common.aux_hidden_state_layer_ids=[30, 2, 58]", {}, "the aux hidden state layer ids", "aux_hidden_state_layer_ids"),
        ("common.tensor_parallel_size=6", {"memory_bytes": 1e12}, "tensor_parallel_size", "change"),
        ("common.epochs=10", {"gpus": 4}, "the GPUs", "processes"),
        ("common.epochs=10", {"free_disk_bytes": 1e11}, "the disk", "float8"),
        ("common.epochs=10", {"memory_bytes": 8e10}, "the memory for 01_responses", "tensor_parallel_size"),
        ("common.draft_vocab_size=163840", {"memory_bytes": 1.2e11}, "the memory for 04_train", "fsdp_shard: true"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_what_to_change(kimi, change: str, has: dict, what: str, fix: str) -> None:
    settings, facts = load("kimi-k2.5", [change])["00_preflight"], verifier_config.read(kimi)
    machine = plan.Machine(**vars(ROOM) | has)
    found = plan.problems(settings, facts, made(settings, facts, has=machine), machine)
    assert fix in next(p.fix for p in found if p.what == what)
    fits = load("kimi-k2.5")["00_preflight"]
    assert plan.problems(fits, facts, made(fits, facts), ROOM) == []


def test_a_verifier_that_no_draft_is_served_beside_is_told_before_anything_is_computed(kimi, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI | {"architectures": ["Gemma3ForCausalLM"]}))
    settings, facts = load("kimi-k2.5")["00_preflight"], verifier_config.read(tmp_path / "config.json")
    (found,) = plan.problems(settings, facts, made(settings, facts), ROOM)
    assert (found.what, found.found) == ("the verifier", "Gemma3ForCausalLM")


def test_more_of_anything_never_costs_less(kimi) -> None:
    facts = verifier_config.read(kimi)
    base = made(load("kimi-k2.5")["00_preflight"], facts)
    for change in (
        "common.epochs=20",
        "common.max_new_tokens=4096",
        "common.own_questions=500",
        "common.draft_vocab_size=64000",
    ):
        more = made(load("kimi-k2.5", [change])["00_preflight"], facts)
        assert more.peak_disk_bytes >= base.peak_disk_bytes, change
        assert sum(more.seconds.values()) >= sum(base.seconds.values()), change
