"""EAGLE-3 in plain torch: one greedy draft-and-verify walk, straight from an exported file.

It has no line in common with speculators' model or with vLLM's, and of transformers it takes the rope table only. So when
serving accepts less than training promised, this third opinion tells which side of the file the fault is on. One decoder
layer, llama or Qwen3, as in vLLM 0.32 (``llama_eagle3.py``, ``qwen3_eagle3.py``); in float32 and one step after another, to
be read rather than to be fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import functional

from eaglebook.checkpoint import inspection
from eaglebook.checkpoint.spec import DraftSpec
from eaglebook.checkpoint.verifier_config import default_aux_layer_ids
from eaglebook.errors import UserError

Past = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values, one pair a step: [heads, tokens, head_dim]


@dataclass(frozen=True)
class Draft:
    """A draft's numbers by their plain names (float32), its description, and its rope (positions to cosines and sines)."""

    spec: DraftSpec
    weights: dict[str, torch.Tensor]
    rope: Any
    targets: torch.Tensor  # the verifier's token that each draft token stands for

    def aux_ids(self, verifier_layers: int) -> list[int]:
        """The ids as vLLM reads them: sorted, whatever order ``fc`` was trained for, and a default when the file has none."""
        return sorted(set(self.spec.aux_layer_ids.value or default_aux_layer_ids(verifier_layers)))

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The verifier's states ``[tokens, n_aux, hidden]`` as one vector each, ``[tokens, hidden]``."""
        if self.spec.norm_before_fc.value:
            states = self._norm("input_norm.weight", states.flatten(1)).view_as(states)
        if self.spec.fc_norm.value:
            states = torch.stack([self._norm(f"fc_norm.{i}.weight", x) for i, x in enumerate(states.unbind(1))], 1)
        return states.flatten(1) @ self.weights["fc.weight"].T

    def step(
        self, states: torch.Tensor, token_ids: torch.Tensor, first_position: int, past: Past
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """One pass: ``states [tokens, hidden]`` and the token that followed each. Every token sees ``past`` and those before it.

        Returns the guess for the token after each, the state to feed back, and this pass's keys and values.
        """
        w, spec = self.weights, self.spec
        embeds = self._norm("layers.0.input_layernorm.weight", w["embed_tokens.weight"][token_ids])
        normed = self._norm("layers.0.hidden_norm.weight", states)
        residual = normed if spec.norm_before_residual.value else states
        query, keys, values = self._heads(torch.cat([embeds, normed], -1), first_position)
        all_keys, all_values = (torch.cat([*(pair[i] for pair in past), new], 1) for i, new in ((0, keys), (1, values)))
        seen = torch.ones(query.shape[1], all_keys.shape[1], dtype=torch.bool).tril(all_keys.shape[1] - query.shape[1])
        mixed = functional.scaled_dot_product_attention(
            query[None], all_keys[None], all_values[None], attn_mask=seen, enable_gqa=True
        )[0]
        hidden = residual + self._linear("layers.0.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
        inner = self._norm("layers.0.post_attention_layernorm.weight", hidden)
        gate, up = self._linear("layers.0.mlp.gate_proj", inner), self._linear("layers.0.mlp.up_proj", inner)
        hidden = hidden + self._linear("layers.0.mlp.down_proj", functional.silu(gate) * up)
        out = self._norm("norm.weight", hidden)
        guesses = self.targets[(out @ w["lm_head.weight"].T).argmax(-1)]
        return guesses, out if spec.norm_output.value else hidden, (keys, values)

    def _heads(self, inputs: torch.Tensor, first_position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value heads ``[heads, tokens, head_dim]``, turned by their positions."""
        size = self.spec.head_dim.value
        q, k, v = (
            self._linear(f"layers.0.self_attn.{n}_proj", inputs).view(len(inputs), -1, size).transpose(0, 1)
            for n in "qkv"
        )
        if "layers.0.self_attn.q_norm.weight" in self.weights:  # Qwen3
            q, k = self._norm("layers.0.self_attn.q_norm.weight", q), self._norm("layers.0.self_attn.k_norm.weight", k)
        positions = torch.arange(first_position, first_position + len(inputs))[None]
        cosines, sines = (table[0] for table in self.rope(inputs, positions))
        return _turn(q, cosines, sines), _turn(k, cosines, sines), v

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out, bias = x @ self.weights[f"{name}.weight"].T, self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps.value).rsqrt() * self.weights[name]


def load(folder: Path, verifier: Any) -> Draft:
    """The draft of a flat or nested checkpoint. ``verifier`` is a transformers model: it lends what the file leaves out.

    Raises UserError for what this page does not cover: more than one layer, multi-head latent attention, a window, an
    activation other than silu, missing weights.
    """
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    case = inspection.inspect(folder).case
    spec = case.spec
    _refuse_other(spec)
    weights: dict[str, torch.Tensor] = {}
    for name, plain in case.own.items():
        tensor = case.stored[plain]
        if tensor.file is not None and plain not in ("d2t", "t2d"):
            with safe_open(tensor.file, "pt") as file:
                weights[plain] = file.get_tensor(name).float()
    weights.setdefault("embed_tokens.weight", verifier.get_input_embeddings().weight.detach().float().cpu())
    full = spec.draft_vocab_size.value == spec.vocab_size.value
    if full:
        weights.setdefault("lm_head.weight", verifier.get_output_embeddings().weight.detach().float().cpu())
    missing = [name for name in _needed(spec) if name not in weights]
    if missing or not (full or case.mapping):
        raise UserError(
            f"{folder.name}: no reference can be computed",
            expected="every tensor of one decoder layer, and d2t",
            found=f"no {', '.join(missing or ['d2t'])}",
            fix=f"eaglebook inspect {folder.name}",
        )
    rope = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=spec.hidden_size.value, num_attention_heads=spec.num_attention_heads.value, head_dim=spec.head_dim.value,
            max_position_embeddings=spec.max_position_embeddings.value, rope_parameters=dict(spec.rope.value),
        )
    )  # fmt: skip
    targets = range(spec.vocab_size.value) if full or not case.mapping else case.mapping.targets
    return Draft(spec, weights, rope, torch.tensor(list(targets)))


def load_if_covered(folder: Path, verifier: Any) -> tuple[Draft | None, str]:
    """The draft, or None and the reason why this page cannot compute it."""
    try:
        return load(folder, verifier), ""
    except UserError as outside:
        return None, str(outside)


def walk(draft: Draft, states: torch.Tensor, token_ids: Sequence[int], prompt_tokens: int, positions: int) -> list[int]:
    """Draft and verify along an answer that the verifier gave greedily. Returns the accepted tokens of each draft in turn.

    ``states [tokens, n_aux, hidden]`` at the draft's aux ids, ``token_ids`` prompt and answer. Each draft begins behind the
    last token the verifier said, reads the verifier's states up to there, and from its second token on feeds on its own
    guesses and its own state. Since the answer is the verifier's, verifying a guess is comparing it. Drafts of which a
    token would lie past the end are left out: nobody knows what the verifier would have said.
    """
    ids = torch.tensor(token_ids)
    steps = []
    with torch.inference_mode():
        fused = draft.fuse(states[:-1].float())
        first, fed_back, (keys, values) = draft.step(fused, ids[1:], 0, [])
        at = prompt_tokens  # the last token that is known: the verifier's first
        while at + positions < len(ids):
            guess, state = first[at - 1 : at], fed_back[at - 1 : at]
            past: Past = [(keys[:, :at], values[:, :at])]
            accepted = 0
            while accepted < positions and guess == ids[at + 1 + accepted]:
                accepted += 1
                if accepted < positions:
                    guess, state, new = draft.step(state, guess, at - 1 + accepted, past)
                    past.append(new)
            steps.append(accepted)
            at += accepted + 1
    return steps


def _refuse_other(spec: DraftSpec) -> None:
    outside = {
        "num_hidden_layers": (spec.num_hidden_layers.value, 1), "hidden_act": (spec.hidden_act.value, "silu"),
        "mla": (spec.mla.value, None), "quantisation": (spec.quantisation.value, None),
        "sliding_attention": ("sliding_attention" in (spec.layer_types.value or ()), False),
        "use_aux_hidden_state": (spec.use_aux_hidden_state.value in (None, True), True),
        "partial_rotary_factor": ((spec.rope.value or {}).get("partial_rotary_factor") or 1.0, 1.0),
    }  # fmt: skip
    for key, (found, covered) in outside.items():
        if found != covered:
            raise UserError(
                "the plain reference does not cover this draft",
                expected=f"{key}: {covered}",
                found=str(found),
                fix="go by the teacher-forced and the served acceptance",
            )


def _needed(spec: DraftSpec) -> list[str]:
    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm", *(f"self_attn.{n}_proj" for n in "qkvo")]
    names = [f"layers.0.{n}.weight" for n in (*layer, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
    names += ["fc.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight"]
    names += ["input_norm.weight"] if spec.norm_before_fc.value else []
    return names + [f"fc_norm.{i}.weight" for i in range(len(spec.aux_layer_ids.value or ())) if spec.fc_norm.value]


def _turn(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, the two halves of a head as real and imaginary parts."""
    half = x.shape[-1] // 2
    return x * cosines + torch.cat([-x[..., half:], x[..., :half]], -1) * sines
