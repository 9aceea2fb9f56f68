"""What a draft weighs, tensor by tensor, from its geometry alone.

One llama layer over aux states of the verifier, as speculators 0.9's ``Eagle3DraftModel`` stores it and vLLM reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eaglebook.checkpoint.verifier_config import VerifierFacts
from eaglebook.params import Preflight, Train

BF16, FP32 = 2, 4
_CHECKPOINTS_KEPT = 3


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint. ``trained``: it has a gradient and optimiser state (embedding and head are frozen)."""

    name: str
    shape: tuple[int, ...]
    bytes_per_element: int
    trained: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.bytes_per_element


@dataclass(frozen=True)
class Geometry:
    """Sizes in elements. ``head_dim`` is its own number: 64 heads of 128 over a hidden size of 7,168 are possible.

    ``aux_norms``: a norm before fc, over all captured states at once or over each, is as wide as they are together.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    aux_norms: bool = False
    head_trained: bool = False

    @classmethod
    def of(
        cls, facts: VerifierFacts, draft_vocab_size: int, num_aux: int, *, heads: int = 0, kv_heads: int = 0,
        head_dim: int = 0, intermediate_size: int = 0, aux_norms: bool = False, head_trained: bool = False,
    ) -> Geometry:  # fmt: skip
        """A draft for a verifier, whose own sizes are taken where none is given."""
        vocabulary = facts.vocab_size or 0
        return cls(
            facts.hidden_size or 0, vocabulary, min(draft_vocab_size, vocabulary), num_aux, heads or facts.num_heads or 0,
            kv_heads or facts.num_kv_heads or 0, head_dim or facts.head_dim or 0,
            intermediate_size or facts.intermediate_size or 0, aux_norms, head_trained,
        )  # fmt: skip

    def tensors(self) -> list[Stored]:
        """Every tensor of the checkpoint, in bf16; ``d2t`` and ``t2d`` only where the draft's vocabulary is a part."""
        hidden, captured = self.hidden_size, self.num_aux * self.hidden_size
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def layer(name: str, *shape: int) -> Stored:
            return Stored(name, shape, BF16, trained=True)

        return [
            Stored("embed_tokens.weight", (self.vocab_size, hidden), BF16),
            Stored("lm_head.weight", (self.draft_vocab_size, hidden), BF16, self.head_trained),
            layer("fc.weight", hidden, captured),
            layer("layers.0.self_attn.q_proj.weight", query, 2 * hidden),
            layer("layers.0.self_attn.k_proj.weight", key, 2 * hidden),
            layer("layers.0.self_attn.v_proj.weight", key, 2 * hidden),
            layer("layers.0.self_attn.o_proj.weight", hidden, query),
            layer("layers.0.mlp.gate_proj.weight", self.intermediate_size, hidden),
            layer("layers.0.mlp.up_proj.weight", self.intermediate_size, hidden),
            layer("layers.0.mlp.down_proj.weight", hidden, self.intermediate_size),
            layer("layers.0.input_layernorm.weight", hidden),
            layer("layers.0.hidden_norm.weight", hidden),
            layer("layers.0.post_attention_layernorm.weight", hidden),
            layer("norm.weight", hidden),
            *([layer("norms before fc", captured)] if self.aux_norms else []),
            *(
                [Stored("d2t", (self.draft_vocab_size,), 8), Stored("t2d", (self.vocab_size,), 1)]
                if self.draft_vocab_size < self.vocab_size
                else []
            ),
        ]

    @property
    def parameters(self) -> int:
        return sum(t.elements for t in self.tensors() if t.bytes_per_element == BF16)

    @property
    def trained(self) -> int:
        return sum(t.elements for t in self.tensors() if t.trained)

    @property
    def checkpoint_bytes(self) -> int:
        return sum(t.bytes for t in self.tensors())

    def saved_bytes(self, optimizer: str) -> int:
        """One checkpoint of the Trainer: the draft and, in bf16, what the optimiser keeps of each trained number."""
        return self.checkpoint_bytes + moments(optimizer) * BF16 * self.trained

    def kept_bytes(self, optimizer: str, epochs: int) -> int:
        """The checkpoints that lie on the disk at once: the best, the last, and the one being written."""
        return min(_CHECKPOINTS_KEPT, epochs + 1) * self.saved_bytes(optimizer)

    def training_bytes(self, *, optimizer: str, pack_tokens: int, ttt_steps: int, processes: int, sharded: bool) -> int:
        """Memory of one training process, 15 % of allowance in it.

        speculators' Trainer keeps everything in fp32, the verifier's head rows and norm beside the draft, and casts: the
        trained weights once, the frozen head in every step (its copies are not cached). Saved activations were counted on
        the library's own forward: 5.5 bytes for each number that passes through the layer, 8 for each logit.
        """
        head = self.draft_vocab_size * self.hidden_size
        kept = FP32 * (self.parameters + head + self.hidden_size) + FP32 * self.trained * (1 + moments(optimizer))
        buckets = FP32 * self.trained if processes > 1 and not sharded else 0
        copies = BF16 * (self.trained + ttt_steps * head)
        width = 2 * (self.heads + self.kv_heads) * self.head_dim + 4 * self.hidden_size + 3 * self.intermediate_size
        saved = pack_tokens * ttt_steps * (5.5 * width + 8 * self.draft_vocab_size)
        backward = 3 * FP32 * pack_tokens * self.draft_vocab_size
        return int(1.15 * (kept / (processes if sharded else 1) + buckets + copies + saved + backward))


def asked(p: Preflight | Train, facts: VerifierFacts, draft_vocab_size: int, num_aux: int) -> Geometry:
    """The draft that a notebook's parameters ask for."""
    return Geometry.of(
        facts, draft_vocab_size, num_aux, heads=p.draft_heads, kv_heads=p.draft_kv_heads,
        head_dim=p.draft_head_dim, intermediate_size=p.draft_intermediate_size,
        aux_norms=p.norm_before_fc or p.fc_norm, head_trained=p.train_lm_head,
    )  # fmt: skip


def moments(optimizer: str) -> int:
    """Numbers that an optimiser keeps for each weight."""
    return {"adamw": 2, "muon": 1}[optimizer]
