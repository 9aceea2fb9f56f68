"""Named ways to break the perfect draft: what is changed, and the finding that must name it.

Each fault is one line of change to a copy. The predicted outcome comes from the inspection's own rules, the real one from
vLLM's engine; nothing here says what either will be, except for the few faults that by their nature cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eaglebook.checkpoint import weights
from eaglebook.faults import perfect
from eaglebook.faults.perfect import AUX_IDS, DRAFT_VOCAB, HEAD_DIM, VOCAB, H, Weights

L = "midlayer."
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Copy:
    """A copy of the perfect draft in memory, to be broken and written. ``files``: what is done to the folder afterwards."""

    config: dict[str, Any]
    tensors: Weights
    files: list[Callable[[Path], object]] = field(default_factory=list)

    def set(self, **changes: Any) -> Copy:
        """Change keys of the config; None removes one."""
        for key, value in changes.items():
            if value is None:
                self.config.pop(key, None)
            else:
                self.config[key] = value
        return self

    def drop(self, *names: str) -> Copy:
        for name in names:
            del self.tensors[name]
        return self

    def rename(self, old: str, new: str) -> Copy:
        self.tensors = {name.replace(old, new): array for name, array in self.tensors.items()}
        return self

    def add(self, name: str, *shape: int, value: float = 1.0) -> None:
        self.tensors[name] = np.full(shape, value)

    def ids(self, ids: list[int] | None, **eagle: Any) -> None:
        """Ids at both places, without a word about what they count; None removes them."""
        self.set(**{IDS: ids, "eagle_config": {"use_aux_hidden_state": True, **({IDS: ids} if ids else {}), **eagle}})

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        weights.write([perfect.piece(n, a) for n, a in self.tensors.items()], folder / "model.safetensors")
        for change in self.files:
            change(folder)
        return folder


@dataclass(frozen=True)
class Fault:
    """``code``: the finding (error or warning) that must name it. ``harmless``: wrong, but this engine serves it fully."""

    name: str
    group: str
    code: str
    change: Callable[[Copy], object]
    harmless: bool = False
    ids: tuple[int, ...] = tuple(AUX_IDS)  # the ids the draft was built for


def write(fault: Fault, base: Path, folder: Path) -> Path:
    """Break a copy of the perfect draft below ``base`` (see `drafts_for`) and write it into the new ``folder``."""
    source = base / "-".join(map(str, fault.ids)) / "draft"
    copy = Copy(json.loads((source / "config.json").read_text()), perfect.load(source))
    fault.change(copy)
    return copy.write(folder)


def build_bases(base: Path) -> dict[tuple[int, ...], perfect.Pair]:
    """The perfect pairs that the faults start from, one for each choice of aux ids."""
    return {ids: perfect.build(base / "-".join(map(str, ids)), aux_ids=list(ids)) for ids in {f.ids for f in FAULTS}}


# ---- changes that take more than a line


def _nested(copy: Copy, layer: dict[str, Any] | None = None, **top: Any) -> None:
    """The same draft as speculators writes it, with changes."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "rope_parameters", "model_type")  # fmt: skip
    inner = {key: copy.config[key] for key in keys} | (layer or {})
    outer = {
        key: copy.config[key]
        for key in ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", IDS)
    }
    copy.config = {
        **outer, "architectures": ["Eagle3DraftModel"], "dtype": "float32", "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3", "verifier": {"name_or_path": "perfect/verifier", "architectures": ["LlamaForCausalLM"]},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
        "transformer_layer_config": {k: v for k, v in inner.items() if v is not None}, **top,
    }  # fmt: skip


def swap_states(copy: Copy) -> None:
    """A trainer that concatenated the states in the opposite order and said so: vLLM sorts the ids all the same."""
    fc, ids = copy.tensors["fc.weight"], copy.config[IDS]
    copy.tensors["fc.weight"] = fc.reshape(len(fc), len(ids), -1)[:, ::-1].reshape(fc.shape)
    copy.ids(ids[::-1], ids_mean="input")


def _targets(copy: Copy) -> np.ndarray:
    return np.arange(DRAFT_VOCAB) + copy.tensors["d2t"]


def _map(copy: Copy, d2t: np.ndarray, *, mask: bool = True) -> None:
    copy.tensors["d2t"] = d2t
    if not mask:
        copy.drop("t2d")


def _nan(copy: Copy, name: str, value: float = np.nan) -> None:
    copy.tensors[name] = copy.tensors[name].copy()
    copy.tensors[name].flat[0] = value


def _rope(copy: Copy, **rope: Any) -> None:
    copy.set(rope_theta=None, rope_parameters=rope or None)


def _narrow(copy: Copy, name: str, columns: int) -> None:
    copy.tensors[name] = copy.tensors[name][:, :columns]


def _index(folder: Path, **where: str) -> None:
    names = [*perfect.load(folder)]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors") | where})
    )


def _left_out(folder: Path) -> None:
    """Split lm_head off into a second file and forget it in the index."""
    tensors = perfect.load(folder)
    head = tensors.pop("lm_head.weight")
    weights.write([perfect.piece("lm_head.weight", head)], folder / "model-2.safetensors")
    weights.write([perfect.piece(n, a) for n, a in tensors.items()], folder / "model.safetensors")
    _index(folder)


def without(name: str) -> Callable[[Copy], object]:
    return lambda copy: copy.drop(name)


def _faults() -> list[Fault]:
    def f(name: str, code: str, change: Callable[[Copy], object], **more: Any) -> None:
        found.append(Fault(name, group, code, change, **more))

    found: list[Fault] = []
    group = "config"
    f("model_type eagle3", "model-type-unknown", lambda c: c.set(model_type="eagle3"))
    f("model_type left out", "model-type-missing", lambda c: c.set(model_type=None))
    f("model_type deepseek_v3", "taken-for-mtp", lambda c: c.set(model_type="deepseek_v3"))
    f("architecture of Mistral", "architecture-unsupported", lambda c: c.set(architectures=["MistralForCausalLM"]))
    f("architecture of EAGLE-1", "architecture-unsupported", lambda c: c.set(architectures=["EagleLlamaForCausalLM"]))
    f("architectures null", "architecture-unsupported", lambda c: c.set(architectures=None))
    f("activation gelu", "activation-unsupported", lambda c: c.set(hidden_act="gelu"))
    f("layer_types of two layers", "layer-types-length", lambda c: c.set(layer_types=["full_attention"] * 2))
    f("nested: type left out", "speculators-type-unsupported", lambda c: _nested(c, speculators_model_type=None))
    f("nested: layer of Mistral", "speculators-layer-unsupported", lambda c: _nested(c, {"model_type": "mistral"}))
    f("nested: no rms_norm_eps", "speculators-key-missing", lambda c: _nested(c, {"rms_norm_eps": None}))
    f("nested: no hidden_act", "speculators-key-missing", lambda c: _nested(c, {"hidden_act": None}))
    f("nested: model_type speculator_model", "model-type-unknown", lambda c: _nested(c, model_type="speculator_model"))
    f(
        "config not JSON",
        "config-unreadable",
        lambda c: c.files.append(lambda d: (d / "config.json").write_text("{'a': 1}")),
    )
    group = "sizes"
    f("head_dim halved", "head-dim-mismatch", lambda c: c.set(head_dim=HEAD_DIM // 2))
    f("head_dim doubled", "head-dim-mismatch", lambda c: c.set(head_dim=2 * HEAD_DIM))
    f("head_dim left out", "head-dim-mismatch", lambda c: c.set(head_dim=None))
    f("heads halved", "heads-mismatch", lambda c: c.set(num_attention_heads=2))
    f("kv heads halved", "kv-heads-mismatch", lambda c: c.set(num_key_value_heads=2))
    f("one kv head", "kv-heads-mismatch", lambda c: c.set(num_key_value_heads=1))
    f("kv heads left out", "kv-heads-implicit", lambda c: c.set(num_key_value_heads=None), harmless=True)
    f("inner size halved", "intermediate-size-mismatch", lambda c: c.set(intermediate_size=32))
    f("inner size doubled", "intermediate-size-mismatch", lambda c: c.set(intermediate_size=128))
    f("hidden size of another model", "hidden-size-mismatch", lambda c: c.set(hidden_size=64, target_hidden_size=64))
    f("a layer too many in the config", "layers-missing", lambda c: c.set(num_hidden_layers=2))
    f("a layer too many in the file", "layers-surplus", lambda c: c.add("layers.1.input_layernorm.weight", H))
    f("size as text", "config-value", lambda c: c.set(intermediate_size="64"))
    group = "vocabulary"
    f("draft_vocab_size left out", "draft-vocab-missing", lambda c: c.set(draft_vocab_size=None))
    f("draft_vocab_size one more", "draft-vocab-mismatch", lambda c: c.set(draft_vocab_size=DRAFT_VOCAB + 1))
    f("vocab_size too small", "verifier-vocab-size", lambda c: c.set(vocab_size=VOCAB // 2))
    f("vocab_size padded", "verifier-vocab-size", lambda c: c.set(vocab_size=VOCAB + 64), harmless=True)
    f("tied, without a head", "tied-embeddings", lambda c: c.set(tie_word_embeddings=True).drop("lm_head.weight"))
    f("end token outside", "special-token-out-of-range", lambda c: c.set(eos_token_id=VOCAB), harmless=True)
    group = "mapping"
    f("d2t missing", "d2t-missing", lambda c: c.drop("d2t"))
    f("d2t under vLLM's own name", "d2t-misnamed", lambda c: c.rename("d2t", "draft_id_to_target_id"))
    f("d2t all zero", "d2t-all-zero", lambda c: _map(c, np.zeros(DRAFT_VOCAB)))
    f("d2t of target ids", "d2t-absolute", lambda c: _map(c, _targets(c)))
    f("d2t of target ids, no mask", "d2t-absolute", lambda c: _map(c, _targets(c), mask=False))
    f(
        "d2t moved by one row",
        "d2t-t2d-disagree",
        lambda c: _map(c, np.roll(_targets(c), 1) - np.arange(DRAFT_VOCAB) + np.eye(1, DRAFT_VOCAB)[0]),
    )
    f(
        "d2t with a token twice",
        "d2t-duplicate",
        lambda c: _map(c, np.maximum(_targets(c) // 8 * 8, 3) - np.arange(DRAFT_VOCAB)),
    )
    f("d2t out of range", "d2t-out-of-range", lambda c: _map(c, c.tensors["d2t"] + VOCAB // 2))
    f("d2t too short", "d2t-length", lambda c: _map(c, c.tensors["d2t"][:-1]))
    f("d2t of two dimensions", "d2t-length", lambda c: _map(c, c.tensors["d2t"][:, None]))
    f("d2t under model.", "tensor-prefixed", lambda c: c.rename("d2t", "model.d2t"))
    group = "aux ids"
    f("ids one less", "aux-ids-count-outputs", lambda c: c.ids([i - 1 for i in AUX_IDS]))
    f("ids in another order", "aux-ids-unsorted", swap_states)
    f("ids left out", "aux-ids-missing", lambda c: c.ids(None), ids=(1, 3, 6))
    f("ids under layer_ids", "aux-ids-wrong-key", lambda c: c.ids(None, layer_ids=[1, 3, 6]), ids=(1, 3, 6))
    f("ids only in eagle_config", "aux-ids-nested-only", lambda c: c.set(**{IDS: None}), ids=(1, 3, 6), harmless=True)
    f("ids that contradict", "aux-ids-conflict", lambda c: c.set(**{IDS: [2, 4, 7]}), ids=(1, 3, 6))
    f("ids as text", "config-value", lambda c: c.set(**{IDS: ["1", "3", "6"], "eagle_config": {}}), ids=(1, 3, 6))
    f("an id twice", "aux-ids-duplicate", lambda c: c.ids([2, 2, 5], ids_mean="input"))
    f("an id past the last layer", "aux-ids-out-of-range", lambda c: c.ids([2, 4, 9], ids_mean="input"))
    f("a negative id", "aux-ids-out-of-range", lambda c: c.ids([-1, 4, 5], ids_mean="input"))
    f("four ids, fc of three", "aux-count", lambda c: c.ids([2, 4, 5, 6], ids_mean="input"))
    f("a count of four", "aux-count", lambda c: c.set(num_aux_hidden_states=4))
    f("aux states switched off", "fc-unasked", lambda c: c.set(eagle_config={"use_aux_hidden_state": False}))
    group = "norms and flags"
    f(
        "norm_before_residual left out",
        "norm-before-residual-implicit",
        lambda c: c.set(norm_before_residual=None).rename(L, "layers.0."),
    )
    f("norm_before_residual as text", "config-value", lambda c: c.set(norm_before_residual=""))
    f(
        "norm_before_fc without its tensor", "input-norm-missing", lambda c: c.set(norm_before_fc=True), harmless=True
    )  # a norm of ones, and fc is read by a norm
    f("input_norm without its flag", "input-norm-unasked", lambda c: c.add("input_norm.weight", 3 * H), harmless=True)
    f("fc_norm without its tensors", "fc-norm-missing", lambda c: c.set(fc_norm=True), harmless=True)
    f("fc_norm without its flag", "fc-norm-unasked", lambda c: c.add("fc_norm.0.weight", H))
    f(
        "two answers about norm_before_fc",
        "norm-flag-conflict",
        lambda c: c.set(eagle_config={"norm_before_fc": True}),
        harmless=True,
    )
    f("rms_norm_eps left out", "rms-norm-eps-implicit", lambda c: c.set(rms_norm_eps=None), harmless=True)
    group = "rope and length"
    f("rope left out", "rope-implicit", lambda c: _rope(c))
    f("another theta", "rope-differs", lambda c: _rope(c, rope_type="default", rope_theta=10000.0))
    f("two thetas", "rope-conflict", lambda c: c.set(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    f("linear scaling", "rope-differs", lambda c: _rope(c, rope_type="linear", rope_theta=perfect.THETA, factor=4.0))
    f(
        "a scaled rope without its factor",
        "rope-incomplete",
        lambda c: _rope(c, rope_type="linear", rope_theta=perfect.THETA),
    )
    f("a length of 64", "max-positions-short", lambda c: c.set(max_position_embeddings=64))
    f("no length", "max-positions-implicit", lambda c: c.set(max_position_embeddings=None), harmless=True)
    f("a window of one token", "sliding-window", lambda c: c.set(layer_types=["sliding_attention"], sliding_window=1))
    group = "tensors missing"
    for part in (
        "fc",
        "norm",
        f"{L}hidden_norm",
        f"{L}self_attn.q_proj",
        f"{L}self_attn.k_proj",
        f"{L}self_attn.v_proj",
        f"{L}self_attn.o_proj",
    ):
        f(f"no {part.removeprefix(L)}", "tensor-missing", without(f"{part}.weight"))
    f(
        "no input_layernorm", "tensor-missing", lambda c: c.drop(f"{L}input_layernorm.weight"), harmless=True
    )  # it is ones
    f("no down_proj", "tensor-missing", lambda c: c.drop(f"{L}mlp.down_proj.weight"))
    f("no lm_head", "lm-head-missing", lambda c: c.drop("lm_head.weight"))
    group = "tensors wrong"
    f("names under model.", "tensor-prefixed", lambda c: c.rename(L, "model.layers.0."))
    f("names under draft_model.", "tensor-prefixed", lambda c: c.rename(L, "draft_model.midlayer."))
    f("the verifier's head inside", "verifier-tensors", lambda c: c.add("verifier_lm_head.weight", VOCAB, H))
    f("an unknown tensor", "tensor-unknown", lambda c: c.add("adapter.weight", H, H))
    f("q_norm on a llama layer", "qk-norm-on-llama", lambda c: c.add(f"{L}self_attn.q_norm.weight", HEAD_DIM))
    f("a bias nobody asks for", "bias-unasked", lambda c: c.add("fc.bias", H, value=0.0), harmless=True)
    f("biases asked for, not stored", "bias-missing", lambda c: c.set(attention_bias=True, mlp_bias=True))
    f("scales without a quantisation", "quantised-without-config", lambda c: c.add(f"{L}mlp.down_proj.weight_scale", 1))
    f("q reads one state", "qkv-input-width", lambda c: _narrow(c, f"{L}self_attn.q_proj.weight", H))
    f("fc reads two states", "fc-width", lambda c: _narrow(c, "fc.weight", 2 * H))
    f("an embedding of other rows", "embed-shape", lambda c: c.add("embed_tokens.weight", VOCAB + 8, H))
    f(
        "an embedding of its own",
        "embed-differs",
        lambda c: c.tensors.update({"embed_tokens.weight": np.random.default_rng(1).normal(size=(VOCAB, H))}),
    )
    f("NaN in fc", "not-finite", lambda c: _nan(c, "fc.weight"))
    f("infinity in lm_head", "not-finite", lambda c: _nan(c, "lm_head.weight", np.inf))
    f("lm_head all zero", "all-zero", lambda c: c.tensors.update({"lm_head.weight": np.zeros((DRAFT_VOCAB, H))}))
    group = "files"
    f(
        "a file cut short",
        "weights-unreadable",
        lambda c: c.files.append(lambda d: (d / "model.safetensors").open("r+b").truncate(100_000)),
    )
    f(
        "a page instead of weights",
        "weights-unreadable",
        lambda c: c.files.append(lambda d: (d / "model.safetensors").write_text("<html>404")),
    )
    f("an index that forgets a file", "index-stale", lambda c: c.files.append(_left_out))
    f(
        "an index that names a missing file",
        "index-shard-missing",
        lambda c: c.files.append(lambda d: _index(d, extra="model-2.safetensors")),
    )
    f(
        "another file beside consolidated",
        "consolidated-mixed",
        lambda c: c.files.append(
            lambda d: weights.write([perfect.piece("norm.weight", np.ones(H))], d / "consolidated.safetensors")
        ),
    )
    return found  # fmt: skip


FAULTS: list[Fault] = _faults()
