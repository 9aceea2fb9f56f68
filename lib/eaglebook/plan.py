"""What a run will cost: disk, memory and time, from configs and parameters alone, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

from eaglebook import hidden_states
from eaglebook.verifier import Verifier

# Shares of a machine's measured bf16 GEMM rate that each stage reaches, and what a server costs to start, on the
# two-core machine of the README. Orders of magnitude for the time plan; the run itself measures.
_GENERATION_TOKENS_PER_TFLOP, _EXTRACTION_SHARE, _TRAINING_TOKENS_PER_TFLOP = 800, 0.6, 2000
_SERVER_START_S, _KERNEL_START_S, _LADDER_AND_FAULTS_S, _LOAD_TESTS_S = 40, 12, 150, 320


@dataclass(frozen=True)
class Draft:
    """Parameters of a one-layer llama draft. ``trainable`` leaves out the embedding and the frozen head."""

    total: int
    trainable: int

    @property
    def checkpoint_bytes(self) -> int:
        """bf16 weights as saved: embedding and one head included."""
        return 2 * self.total


def draft_parameters(verifier: Verifier, draft_vocab_size: int, num_aux: int) -> Draft:
    """Count a draft's parameters: same hidden size, heads and MLP as the verifier, q/k/v twice as wide on the input."""
    hidden, head_dim = verifier.hidden_size, verifier.head_dim
    query, key = verifier.num_heads * head_dim, verifier.num_kv_heads * head_dim
    attention = 2 * hidden * (query + 2 * key) + query * hidden
    mlp = 3 * hidden * verifier.config["intermediate_size"]
    trainable = num_aux * hidden * hidden + attention + mlp + 4 * hidden
    return Draft(trainable + (verifier.vocab_size + draft_vocab_size) * hidden, trainable)


@dataclass(frozen=True)
class Plan:
    """Upper bounds: every prompt and every answer at its longest. Bytes and seconds by stage."""

    tokens: int
    disk_bytes: dict[str, int]
    memory_bytes: dict[str, int]
    seconds: dict[str, float]

    @property
    def total_disk_bytes(self) -> int:
        return sum(self.disk_bytes.values())


def estimate(
    verifier: Verifier,
    *,
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    num_aux: int,
    draft_vocab_size: int,
    epochs: int,
    gemm_flops: float,
) -> Plan:
    """Plan of a run. ``prompt_tokens`` is the mean length of the rendered prompts."""
    tokens = prompts * (prompt_tokens + new_tokens)
    draft = draft_parameters(verifier, draft_vocab_size, num_aux)
    tera = gemm_flops / 1e12
    body_flops = 2 * (verifier.parameters - verifier.vocab_size * verifier.hidden_size)
    # weights and both Adam moments in fp32, one checkpoint an epoch in bf16
    checkpoints = epochs * (draft.checkpoint_bytes + 2 * 2 * draft.trainable)
    return Plan(
        tokens=tokens,
        disk_bytes={
            "01_responses": tokens * 12,
            "02_hidden_states": hidden_states.sample_bytes(tokens, num_aux, verifier.hidden_size),
            "04_train": checkpoints + tokens * 24,
            "05_checkpoint": draft.checkpoint_bytes,
        },
        memory_bytes={
            "01_responses": 2 * verifier.weight_bytes + 3_000_000_000,
            "02_hidden_states": verifier.weight_bytes + 1_500_000_000,
            "04_train": 4 * (draft.total + draft_vocab_size * verifier.hidden_size)
            + 12 * draft.trainable
            + 2_000_000_000,
            "07_serve": 2 * (verifier.weight_bytes + draft.checkpoint_bytes) + 3_000_000_000,
        },
        seconds={
            "01_responses": _SERVER_START_S + prompts * new_tokens / (_GENERATION_TOKENS_PER_TFLOP * tera),
            "02_hidden_states": _KERNEL_START_S
            + _SERVER_START_S
            + tokens * body_flops / (_EXTRACTION_SHARE * gemm_flops),
            "03_vocab_mapping": _KERNEL_START_S,
            "04_train": 2 * _KERNEL_START_S + epochs * tokens / (_TRAINING_TOKENS_PER_TFLOP * tera),
            "05_checkpoint": _KERNEL_START_S,
            "06_load_ladder": _LADDER_AND_FAULTS_S,
            "07_serve": _LOAD_TESTS_S,
        },
    )
